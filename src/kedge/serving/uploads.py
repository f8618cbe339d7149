"""The image in the body of a request: limited before it is read, and counted as long as it is held in memory."""

from __future__ import annotations

import asyncio
import unicodedata
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import PurePosixPath
from typing import NamedTuple

from fastapi import Request
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Message

from kedge.serving.metrics import Metrics
from kedge.serving.settings import Settings

__all__ = ["BUSY", "REQUEST_BODY", "Upload", "Uploads", "file_name"]

BUSY = "The server is busy; try again in a moment."
_FORM = "multipart/form-data"
_BYTES = "application/octet-stream"
_BINARY = {"type": "string", "format": "binary"}

REQUEST_BODY = {
    "requestBody": {
        "required": True,
        "description": "The bytes of an image, or a form with it as `file`.",
        "content": {
            "image/*": {"schema": _BINARY},
            _BYTES: {"schema": _BINARY},
            _FORM: {"schema": {"type": "object", "required": ["file"], "properties": {"file": _BINARY}}},
        },
    }
}


class Upload(NamedTuple):
    """An image as it came."""

    content: bytes
    name: str | None
    """The name of its file, where a form says it; anything may be in it."""


def file_name(name: str | None) -> str | None:
    """The name of an upload's file, safe in a folder: no path, nothing hidden, no control characters; None if empty."""
    last = PurePosixPath(unicodedata.normalize("NFC", name or "").replace("\\", "/")).name
    plain = "".join(char if char.isalnum() or char in " ._-()+," else "_" for char in last).strip(" .")
    if not plain.strip("_"):
        return None
    path = PurePosixPath(plain)
    return path.stem.encode()[:120].decode(errors="ignore").rstrip(" .") + path.suffix[:12]


class Uploads:
    """Counts the bytes of all uploads in flight; beyond the limit, the upload that has stalled longest is cut off."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings, self._metrics = settings, metrics
        self._limit = max(settings.upload_memory, settings.max_bytes)
        self.held = 0
        """Bytes that arrived, of requests that are not answered yet."""
        self._arriving: dict[asyncio.Timeout, bytearray] = {}
        """The upload that has been silent longest comes first."""
        metrics.upload_bytes.set_function(lambda: self.held)

    @asynccontextmanager
    async def image(self, request: Request) -> AsyncIterator[Upload]:
        """The whole image; its bytes count until the block ends."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if not (kind.startswith("image/") or kind in (_BYTES, _FORM)):
            reason = f"{kind[:100]} is not an image" if kind else "The request has no Content-Type"
            raise HTTPException(415, f"{reason}: send one as image/*, {_BYTES} or a form.")
        declared = request.headers.get("content-length", "")
        self._check_size(int(declared) if declared.isdigit() else 0)
        deadline, body = asyncio.timeout(self._settings.upload_seconds), bytearray()
        self._arriving[deadline] = body
        try:
            await self._read(request, deadline)
            upload = await _form_file(request, bytes(body)) if kind == _FORM else Upload(bytes(body), None)
            if not upload.content:
                raise HTTPException(422, "The image is empty (0 bytes).")
            yield upload
        finally:
            self._arriving.pop(deadline, None)
            self.held -= len(body)

    async def _read(self, request: Request, deadline: asyncio.Timeout) -> None:
        try:
            async with deadline:
                async for chunk in request.stream():
                    self._receive(deadline, chunk)
        except ClientDisconnect:
            raise HTTPException(400, "The upload ended before it was complete.") from None
        except TimeoutError:
            raise HTTPException(408, "The upload took too long; try again.") from None
        del self._arriving[deadline]  # a whole one is not cut off

    def _check_size(self, count: int) -> None:
        limit = self._settings.max_bytes
        if count > limit:
            size = f"{limit / 2**20:g} MiB" if limit >= 2**20 else f"{limit:,} bytes"
            raise HTTPException(413, f"The image is larger than {size}.")

    def _receive(self, deadline: asyncio.Timeout, chunk: bytes) -> None:
        """Keep bytes that arrived, if need be in the place of another upload's."""
        if deadline not in self._arriving:  # cut off, but not notified yet
            raise TimeoutError
        body = self._arriving[deadline] = self._arriving.pop(deadline)  # the last to be cut off
        self._check_size(len(body) + len(chunk))
        body += chunk
        self.held += len(chunk)
        while self.held > self._limit:
            stalled = next(iter(self._arriving))
            if stalled is deadline:
                self._metrics.refused.inc()
                raise HTTPException(429, BUSY)
            content = self._arriving.pop(stalled)
            self.held -= len(content)
            content.clear()
            stalled.reschedule(0)  # which has passed


async def _form_file(request: Request, body: bytes) -> Upload:
    async def receive() -> Message:
        return {"type": "http.request", "body": body}

    upload = None
    try:
        async with Request(request.scope, receive).form(max_files=1, max_fields=8) as form:
            if isinstance(file := form.get("file"), UploadFile):
                upload = Upload(await file.read(), file.filename)
    except (HTTPException, KeyError, ValueError):
        raise HTTPException(400, "The form is not valid.") from None
    if upload is None:
        raise HTTPException(422, "The form must have an image as `file`.")
    return upload
