"""The image in the body of a request: limited before it is read, and before it is decoded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

from fastapi import Request
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from kedge.serving.errors import Refused
from kedge.serving.limits import Upload, UploadBudget
from kedge.serving.settings import Settings

__all__ = ["REQUEST_BODY", "uploaded_image"]

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


@asynccontextmanager
async def uploaded_image(request: Request, settings: Settings, budget: UploadBudget) -> AsyncIterator[bytes]:
    """The bytes of the image, all of them; they count as in flight until the block ends."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not (kind.startswith("image/") or kind in (_BYTES, _FORM)):
        reason = f"{kind[:100]} is not an image" if kind else "The request does not say what it holds"
        raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"{reason}: send one as image/*, {_BYTES} or a form.")
    with budget.upload() as upload:
        try:
            async with upload.deadline(settings.upload_seconds):
                body = await _read(request, settings.max_bytes, budget, upload)
        except ClientDisconnect:
            raise Refused(HTTPStatus.BAD_REQUEST, "The image ended before it was complete.") from None
        except TimeoutError:
            raise Refused(HTTPStatus.REQUEST_TIMEOUT, "The image came too slowly: try again.") from None
        if kind == _FORM:
            body = await _form_file(request, body)
        if not body:
            raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, "The image is empty (0 bytes).")
        budget.complete(upload)
        yield body


async def _read(request: Request, max_bytes: int, budget: UploadBudget, upload: Upload) -> bytes:
    too_large = Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The image is larger than {_size(max_bytes)}.")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise too_large
        budget.grow(upload, len(chunk))
    return bytes(body)


async def _form_file(request: Request, body: bytes) -> bytes:
    async def stream() -> AsyncIterator[bytes]:
        yield body

    try:
        parser = MultiPartParser(request.headers, stream(), max_files=1, max_fields=8)  # type: ignore[arg-type]
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError):
        raise Refused(HTTPStatus.BAD_REQUEST, "The form cannot be understood.") from None
    try:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, "The form must hold an image as `file`.")
        return await file.read()
    finally:
        await form.close()


def _size(count: int) -> str:
    return f"{count / 2**20:g} MiB" if count >= 2**20 else f"{count:,} bytes"
