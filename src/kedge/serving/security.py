"""Security middleware: host names (DNS rebinding), bearer key, cross-site requests (CSRF), response headers."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import socket
import time
from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kedge.serving.metrics import Metrics
from kedge.serving.settings import Settings

__all__ = ["API", "SAFE_HEADERS", "SecurityMiddleware", "error_response"]

API = "/api/v1"
_PUBLIC = (f"{API}/health", f"{API}/ready")
"""Probes, which need no key."""
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
_ERROR_HEADERS = {429: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}

log = logging.getLogger("kedge.serving")


def error_response(status: int, sentence: str) -> JSONResponse:
    """An error as JSON, with the headers that its status asks for."""
    return JSONResponse({"error": sentence}, status, _ERROR_HEADERS.get(status))


class SecurityMiddleware:
    """Checks every request before the application sees it, and secures, counts and logs every response."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self.app, self.settings, self.metrics = app, settings, metrics
        self._hosts = {"localhost", socket.gethostname().lower(), *(host.lower() for host in settings.hosts)}
        self._origins = {origin.lower() for origin in settings.origins if origin}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, answer, count, log."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0

        async def secured(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers.update(SAFE_HEADERS)
                if _has_two_lengths(Headers(scope=scope)):
                    headers["Connection"] = "close"  # where the next request begins is not certain
                headers.setdefault("Cache-Control", "no-cache" if _is_page(_path_of(scope)) else "no-store")
            await send(message)

        refused = self._refusal(scope)
        try:
            await (self.app if refused is None else error_response(*refused))(scope, receive, secured)
        except Exception:
            # Answered here, so that this answer, too, has the headers; raised again for the log.
            if status == 0:
                await error_response(500, "Internal server error; see the server's log.")(scope, receive, secured)
            raise
        finally:
            self._record(scope, status or 500, time.perf_counter() - started)

    def _refusal(self, scope: Scope) -> tuple[HTTPStatus, str] | None:
        headers = Headers(scope=scope)
        if _has_two_lengths(headers):
            return HTTPStatus.BAD_REQUEST, "A request has Content-Length or Transfer-Encoding, not both."
        host = headers.get("host", "")
        if not self._is_own_host(host):
            return HTTPStatus.BAD_REQUEST, "Unknown host name; start the server with --allow-host to allow it."
        path, method = _path_of(scope), scope["method"]
        if method not in _SAFE and not self._same_site(headers, host):
            return (
                HTTPStatus.FORBIDDEN,
                "Requests from other sites are refused; start the server with --allow-origin to allow one.",
            )
        is_public = path in _PUBLIC or _is_page(path)
        # A CORS preflight carries no key.
        is_preflight = method == "OPTIONS" and headers.get("origin", "").lower() in self._origins
        if self.settings.key is not None and not (is_public or is_preflight) and not self._has_key(headers):
            return HTTPStatus.UNAUTHORIZED, "API key required: send it as Authorization: Bearer KEY."
        return None

    def _is_own_host(self, host: str) -> bool:
        """Whether this server is called so: another name may be DNS rebinding, by a page of another site."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
            return name in self._hosts or bool(ipaddress.ip_address(name))
        except ValueError:
            return False

    def _same_site(self, headers: Headers, host: str) -> bool:
        origin = headers.get("origin", "").lower()
        if origin in self._origins:
            return True
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return False
        return not origin or origin.partition("://")[2] == host.lower()

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        key = (self.settings.key or "").encode()
        return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode("latin-1", "replace"), key)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        method = scope["method"] if scope["method"] in (*_SAFE, "POST", "PUT", "PATCH", "DELETE") else "other"
        self.metrics.requests.labels(method, route, status).inc()
        self.metrics.seconds.labels(route).observe(seconds)
        # The path alone: what else a request says may be a secret.
        path = scope["path"].encode("unicode_escape").decode()[:200]
        log.info("%s %s %d %.1f ms", method, path, status, seconds * 1000)


def _has_two_lengths(headers: Headers) -> bool:
    """Request smuggling: a proxy may believe one and a server the other, and see a second request in the body."""
    return "content-length" in headers and "transfer-encoding" in headers


def _path_of(scope: Scope) -> str:
    """The path without the prefix that the application is mounted under."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def _is_page(path: str) -> bool:
    """Whether it is the page itself, which holds nothing of the gallery."""
    return path == "/" or path.startswith("/page/")
