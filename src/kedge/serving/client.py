"""A client for the API, which needs nothing but Python's own library."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from kedge.errors import ConfigError, ServiceError

__all__ = ["Client"]

_ATTEMPTS = 4
_RETRY_SECONDS = 1.0


class Client:
    """Client of the HTTP API; answers are its JSON, as dictionaries.

    A request that got 429 is sent again; everything else that goes wrong is a `ServiceError`.
    """

    def __init__(self, url: str = "http://127.0.0.1:8000", key: str | None = None, *, timeout: float = 60.0) -> None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise ConfigError(f"url must begin with http:// or https://, found {url!r}.")
        self.url = url.rstrip("/") + "/api/v1"
        self.timeout = timeout
        self._key = key

    def __repr__(self) -> str:
        access = "without a key" if self._key is None else "with a key"
        return f"Client({self.url.removesuffix('/api/v1')!r}, {access}, timeout={self.timeout:g})"

    def info(self) -> dict[str, Any]:
        """The facts of the gallery."""
        return dict(self._json("GET", "/info"))

    def classes(self) -> list[dict[str, Any]]:
        """The labels and how many items have them."""
        return list(self._json("GET", "/classes")["classes"])

    def anchors(self) -> list[dict[str, Any]]:
        """The anchors and how many items their lists hold."""
        return list(self._json("GET", "/anchors")["anchors"])

    def search(
        self,
        query: str | Path | bytes | int,
        k: int = 20,
        method: str = "two_stage",
        probes: int = 1,
        labels: Sequence[str] = (),
        *,
        rank: str = "auto",
    ) -> dict[str, Any]:
        """What is most like an image (a file or its bytes) or an item (its id); `rank` as in `Gallery.search`."""
        options = {"k": k, "method": method, "probes": probes, "label": list(labels), "rank": rank}
        if isinstance(query, int):
            return dict(self._json("GET", f"/items/{query}/similar", options))
        return dict(self._json("POST", "/search", options, _content(query)))

    def search_text(
        self, text: str, k: int = 20, method: str = "two_stage", labels: Sequence[str] = ()
    ) -> dict[str, Any]:
        """What a text describes best, where the gallery's model has a text tower; see `Gallery.search_text`."""
        return dict(self._json("GET", "/search", {"text": text, "k": k, "method": method, "label": list(labels)}))

    def items(self, label: str | None = None) -> Iterator[dict[str, Any]]:
        """All items, or those with a label, in order of their ids."""
        options: dict[str, Any] = {"limit": 500} | ({} if label is None else {"label": label})
        while True:
            page = self._json("GET", "/items", options)
            yield from page["items"]
            if page["next"] is None:
                return
            options["after"] = page["next"]

    def item(self, id: int) -> dict[str, Any]:
        """One item."""
        return dict(self._json("GET", f"/items/{id}"))

    def thumbnail(self, id: int) -> bytes:
        """A small copy of an item's image, as JPEG."""
        return self._bytes("GET", f"/items/{id}/thumbnail")

    def add(self, picture: str | Path | bytes, label: str | None = None) -> dict[str, Any]:
        """Add an image to a writable gallery, where a file keeps its name; the new item."""
        query = {"label": label, "name": None if isinstance(picture, bytes) else Path(picture).name}
        given = {name: value for name, value in query.items() if value is not None}
        return dict(self._json("POST", "/items", given, _content(picture)))

    def remove(self, id: int) -> None:
        """Remove an item from a writable gallery."""
        self._bytes("DELETE", f"/items/{id}")

    def _json(self, method: str, path: str, query: Mapping[str, Any] = {}, content: bytes | None = None) -> Any:
        try:
            return json.loads(self._bytes(method, path, query, content))
        except ValueError as error:
            raise ServiceError(f"{self.url} is not a Kedge server.") from error

    def _bytes(self, method: str, path: str, query: Mapping[str, Any] = {}, content: bytes | None = None) -> bytes:
        headers = {} if content is None else {"Content-Type": "application/octet-stream"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        request = Request(f"{self.url}{path}?{urlencode(query, doseq=True)}", content, headers, method=method)
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_RETRY_SECONDS)
            try:
                with _open(request, timeout=self.timeout) as answer:
                    return bytes(answer.read())
            except HTTPError as error:
                refusal = error
                if error.code != 429:
                    break
            except (URLError, OSError, HTTPException) as error:
                raise ServiceError(f"{self.url} does not answer: {getattr(error, 'reason', error)}.") from error
        raise ServiceError(_sentence(refusal)) from refusal


class _NoRedirects(HTTPRedirectHandler):
    """The key is for the server that was named, and for no other."""

    def redirect_request(self, *arguments: Any, **options: Any) -> None:
        """Not followed."""


_open = build_opener(_NoRedirects).open


def _content(picture: str | Path | bytes) -> bytes:
    if isinstance(picture, bytes):
        return picture
    try:
        return Path(picture).read_bytes()
    except OSError as error:
        raise ConfigError(f"{picture} cannot be read: {error.strerror or error}.") from error


def _sentence(error: HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"])
    except (ValueError, KeyError, TypeError, OSError):
        return f"The server answered with {error.code} {error.reason}."
