"""A process that decodes images for another one, which may kill it: `from kedge.images.decoder import main; main()`.

An order is a line of JSON and, behind it, the bytes of an image; so is the answer, with pixels or a JPEG behind it. The
process imports no torch, takes a bounded amount of memory and ends with its input.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from kedge.errors import ImageError
from kedge.images.io import center_square, make_thumbnail, read_image

__all__ = ["main"]

_MEMORY = 3 * 2**30
"""Bytes of address space: an image of 50,000,000 pixels takes up to 1 GiB in the decoder of JPEG 2000."""


def main() -> None:
    """Decode what comes in until there is no more."""
    _limit_memory()
    orders = sys.stdin.buffer
    # What libraries print must not stand between the answers.
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        while line := orders.readline():
            order = json.loads(line)
            answer, content = _answer(order, orders.read(order["bytes"]))
            answers.write(json.dumps({**answer, "bytes": len(content)}).encode() + b"\n")
            answers.write(content)
            answers.flush()


def _answer(order: dict[str, Any], content: bytes) -> tuple[dict[str, Any], bytes]:
    source = Path(order["path"]) if "path" in order else content
    try:
        image = read_image(source, max_pixels=order["max_pixels"])
        if "thumbnail" in order:
            return {}, make_thumbnail(image, order["thumbnail"])
        pixels = center_square(image, *order["square"])
        return {"shape": pixels.shape}, pixels.tobytes()
    except ImageError as error:
        return {"error": str(error)}, b""
    except MemoryError:
        return {"error": "The image cannot be read: it takes too much memory."}, b""


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
