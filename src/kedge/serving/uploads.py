"""The image in the body of a request: limited before it is read, and counted as long as it is held in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus

from fastapi import Request
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from kedge.serving.metrics import Metrics
from kedge.serving.settings import Settings

__all__ = ["BUSY", "REQUEST_BODY", "Uploads"]

BUSY = "The server is busy: try again in a moment."
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


@dataclass(eq=False)
class _Upload:
    deadline: asyncio.Timeout
    size: int = 0


class Uploads:
    """Counts the bytes of all uploads in flight; beyond the limit, the upload that has stalled longest is cut off."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings, self._metrics = settings, metrics
        self._limit = max(settings.upload_memory, settings.max_bytes)
        self.held = 0
        """Bytes that arrived, of requests that are not answered yet."""
        self._arriving: dict[_Upload, None] = {}
        """The upload that has been silent longest comes first."""

    @asynccontextmanager
    async def image(self, request: Request) -> AsyncIterator[bytes]:
        """The bytes of the image, all of them; they count until the block ends."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if not (kind.startswith("image/") or kind in (_BYTES, _FORM)):
            reason = f"{kind[:100]} is not an image" if kind else "The request does not say what it holds"
            sentence = f"{reason}: send one as image/*, {_BYTES} or a form."
            raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, sentence)
        declared = request.headers.get("content-length", "")
        if declared.isdigit():
            self._check_size(int(declared))
        upload = _Upload(asyncio.timeout(self._settings.upload_seconds))
        self._arriving[upload] = None
        try:
            body = await self._receive(request, upload)
            if kind == _FORM:
                body = await _form_file(request, body)
            if not body:
                raise HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, "The image is empty (0 bytes).")
            yield body
        finally:
            self._release(upload)

    async def _receive(self, request: Request, upload: _Upload) -> bytes:
        body = bytearray()
        try:
            async with upload.deadline:
                async for chunk in request.stream():
                    body += chunk
                    self._check_size(len(body))
                    self._grow(upload, len(chunk))
        except ClientDisconnect:
            raise HTTPException(HTTPStatus.BAD_REQUEST, "The image ended before it was complete.") from None
        except TimeoutError:
            raise HTTPException(HTTPStatus.REQUEST_TIMEOUT, "The image came too slowly: try again.") from None
        del self._arriving[upload]  # a whole one is not cut off
        return bytes(body)

    def _check_size(self, count: int) -> None:
        limit = self._settings.max_bytes
        if count > limit:
            size = f"{limit / 2**20:g} MiB" if limit >= 2**20 else f"{limit:,} bytes"
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The image is larger than {size}.")

    def _grow(self, upload: _Upload, count: int) -> None:
        """Count bytes that arrived, if need be in the place of another upload's."""
        if upload not in self._arriving:  # cancelled, but not notified yet
            raise TimeoutError
        del self._arriving[upload]
        self._arriving[upload] = None
        self._count(upload, count)
        while self.held > self._limit:
            stalled = next(iter(self._arriving))
            if stalled is upload:
                self._metrics.refused.inc()
                raise HTTPException(HTTPStatus.TOO_MANY_REQUESTS, BUSY)
            self._release(stalled)
            stalled.deadline.reschedule(0)  # which has passed

    def _release(self, upload: _Upload) -> None:
        self._arriving.pop(upload, None)
        self._count(upload, -upload.size)

    def _count(self, upload: _Upload, count: int) -> None:
        upload.size += count
        self.held += count
        self._metrics.upload_bytes.set(self.held)


async def _form_file(request: Request, body: bytes) -> bytes:
    async def stream() -> AsyncIterator[bytes]:
        yield body

    try:
        parser = MultiPartParser(request.headers, stream(), max_files=1, max_fields=8)  # type: ignore[arg-type]
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError):
        raise HTTPException(HTTPStatus.BAD_REQUEST, "The form cannot be understood.") from None
    try:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, "The form must hold an image as `file`.")
        return await file.read()
    finally:
        await form.close()
