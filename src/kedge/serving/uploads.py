"""A picture from the body of a request: limited before it is read, and before it is decoded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

from fastapi import Request
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from kedge.serving.errors import Refused
from kedge.serving.in_flight import Upload, UploadBudget
from kedge.serving.settings import Settings

__all__ = ["REQUEST_BODY", "received"]

_FORM = "multipart/form-data"
_BYTES = "application/octet-stream"
_RAW: dict[str, object] = {"schema": {"type": "string", "format": "binary"}}

REQUEST_BODY = {
    "requestBody": {
        "required": True,
        "description": "The bytes of a picture, or a form with it as `file`.",
        "content": {
            "image/*": _RAW,
            _BYTES: _RAW,
            _FORM: {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {"file": {"type": "string", "format": "binary"}},
                }
            },
        },
    }
}


@asynccontextmanager
async def received(request: Request, settings: Settings, budget: UploadBudget) -> AsyncIterator[bytes]:
    """The bytes of the picture, all of them; they count as in flight until the block ends."""
    with budget.upload() as upload:
        content = await _received(request, settings, upload)
        upload.arrived()
        yield content


async def _received(request: Request, settings: Settings, upload: Upload) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not (kind.startswith("image/") or kind in (_BYTES, _FORM)):
        found = f"{kind[:100]} is not a picture" if kind else "The request does not say what it holds"
        raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"{found}: send one as image/*, {_BYTES} or a form.")
    try:
        async with upload.deadline(settings.upload_seconds):
            body = await _read(request, settings.max_bytes, upload)
    except ClientDisconnect:
        raise Refused(HTTPStatus.BAD_REQUEST, "The picture ended before it was complete.") from None
    except TimeoutError:
        raise Refused(HTTPStatus.REQUEST_TIMEOUT, "The picture came too slowly: try again.") from None
    if kind == _FORM:
        body = await _file_of(request, body)
    if not body:
        raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, "The picture is empty (0 bytes).")
    return body


async def _read(request: Request, most: int, upload: Upload) -> bytes:
    too_large = Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The picture is larger than {_size(most)}.")
    said = request.headers.get("content-length", "")
    if said.isdigit() and int(said) > most:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise too_large
        upload.grow(len(part))
    return bytes(body)


async def _file_of(request: Request, body: bytes) -> bytes:
    async def once() -> AsyncIterator[bytes]:
        yield body

    try:
        form = await MultiPartParser(request.headers, once(), max_files=1, max_fields=8).parse()  # type: ignore[arg-type]
    except (MultiPartException, KeyError, ValueError):
        raise Refused(HTTPStatus.BAD_REQUEST, "The form cannot be understood.") from None
    try:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, "The form must hold a picture as `file`.")
        return await file.read()
    finally:
        await form.close()


def _size(count: int) -> str:
    return f"{count / 2**20:g} MiB" if count >= 2**20 else f"{count:,} bytes"
