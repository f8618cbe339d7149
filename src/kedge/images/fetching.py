"""The picture behind an address, for whoever asks for it."""

from __future__ import annotations

import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any

from PIL import Image

from kedge.errors import PictureError
from kedge.images.reading import read_picture

__all__ = ["fetch_picture", "is_url"]

MAX_BYTES = 64 * 2**20
_SECONDS = 20.0


class _SameKind(urllib.request.HTTPRedirectHandler):
    """Follows an address only to another one of the web."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if not is_url(newurl):
            raise PictureError(f"{req.full_url} leads to {newurl}, which is no http(s) address.")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def is_url(text: str) -> bool:
    """Whether a text is an http(s) address."""
    return text.lower().startswith(("http://", "https://"))


def fetch_picture(url: str, *, max_bytes: int = MAX_BYTES) -> Image.Image:
    """Fetch and read a picture."""
    if not is_url(url):
        raise PictureError(f"{url} is no http(s) address.")
    try:
        with urllib.request.build_opener(_SameKind).open(url, timeout=_SECONDS) as answer:
            content: bytes = answer.read(max_bytes + 1)
    except (urllib.error.URLError, OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise PictureError(f"{url} cannot be fetched: {reason}.") from error
    if len(content) > max_bytes:
        raise PictureError(f"{url} holds more than {max_bytes:,} bytes: fetch it yourself and give the file.")
    try:
        return read_picture(content)
    except PictureError as error:
        raise PictureError(str(error).replace("The picture", url, 1)) from error
