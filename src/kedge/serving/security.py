"""Who may ask for what: the host's name, the key, the site a request comes from; and what browsers are told."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import socket
import time
from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kedge.serving.errors import as_response
from kedge.serving.metrics import Metrics
from kedge.serving.settings import Settings

__all__ = ["API", "SAFE_HEADERS", "Guard"]

API = "/api/v1"
_OPEN = (f"{API}/health", f"{API}/ready")
"""Whoever watches over a server needs no key."""
_SAFE = ("GET", "HEAD", "OPTIONS")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SAFE_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}

log = logging.getLogger("kedge.serving")


class Guard:
    """Stands before the application."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self.app, self.settings, self.metrics = app, settings, metrics
        self._hosts = {"localhost", socket.gethostname().lower(), *(host.lower() for host in settings.hosts)}
        self._origins = {origin.lower() for origin in settings.origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, answer, count, log."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0

        async def guarded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in SAFE_HEADERS.items():
                    headers[name] = value
                if _has_two_lengths(Headers(scope=scope)):
                    headers["Connection"] = "close"  # where the next request begins is not certain
                headers.setdefault("Cache-Control", "no-cache" if _is_page(_path_of(scope)) else "no-store")
            await send(message)

        refused = self._refused(scope)
        try:
            if refused is not None:
                await as_response(*refused)(scope, receive, guarded)
            else:
                await self.app(scope, receive, guarded)
        except Exception:
            # Answered here, so that this answer, too, has the headers; raised again for the log.
            if status == 0:
                failed = HTTPStatus.INTERNAL_SERVER_ERROR, "The server failed: its log says why."
                await as_response(*failed)(scope, receive, guarded)
            raise
        finally:
            self._note(scope, status or 500, time.perf_counter() - started)

    def _refused(self, scope: Scope) -> tuple[HTTPStatus, str] | None:
        headers = Headers(scope=scope)
        if _has_two_lengths(headers):
            return HTTPStatus.BAD_REQUEST, "A request has Content-Length or Transfer-Encoding, not both."
        host = headers.get("host", "")
        if not self._is_ours(host):
            return HTTPStatus.BAD_REQUEST, "This server is not called by that name: start it with --allow-host."
        path, method = _path_of(scope), scope["method"]
        if method not in _SAFE and not self._same_site(headers, host):
            return HTTPStatus.FORBIDDEN, "Another site's page may not do that."
        is_open = path in _OPEN or _is_page(path)
        # A browser asks without a key whether another site's page may ask with one.
        asks_first = method == "OPTIONS" and headers.get("origin", "").lower() in self._origins
        if self.settings.key is not None and not (is_open or asks_first) and not self._knows_key(headers):
            return HTTPStatus.UNAUTHORIZED, "This server wants its key: Authorization: Bearer …"
        return None

    def _is_ours(self, host: str) -> bool:
        """Whether it is a name of this server: another one may be a trick to reach it from a foreign page."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _same_site(self, headers: Headers, host: str) -> bool:
        origin = headers.get("origin", "").lower()
        if origin in self._origins and origin:
            return True
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return False
        return not origin or origin.partition("://")[2] == host.lower()

    def _knows_key(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        known = (self.settings.key or "").encode()
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1", "replace"), known)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        self.metrics.requests.labels(_known(scope["method"]), route, status).inc()
        self.metrics.seconds.labels(route).observe(seconds)
        # The path alone: what else a request says may be a secret.
        path = scope["path"].encode("unicode_escape").decode()[:200]
        log.info("%s %s %d %.1f ms", _known(scope["method"]), path, status, seconds * 1000)


def _has_two_lengths(headers: Headers) -> bool:
    """A proxy may believe one and a server the other: a body to one is a second request to the other (smuggling)."""
    return "content-length" in headers and "transfer-encoding" in headers


def _path_of(scope: Scope) -> str:
    """Without what the application is mounted under."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def _is_page(path: str) -> bool:
    """Whether it is the page itself, which is everybody's; all else is the gallery's."""
    return path == "/" or path.startswith("/page/")


def _known(method: str) -> str:
    return method if method in (*_SAFE, "POST", "PUT", "PATCH", "DELETE") else "other"
