"""Files that are there as a whole or not at all."""

from __future__ import annotations

import io
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["whole_file"]


@contextmanager
def whole_file(final: Path, *, at_once: bool = True) -> Iterator[io.BufferedRandom]:
    """A stream to write; the file gets its name when the block ends well, and vanishes otherwise.

    Unless it may reach the disk later than `at_once`, it outlives a power cut from then on.
    """
    part = final.with_name(f".{final.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("x+b") as stream:
            yield stream
            stream.flush()
            if at_once:
                os.fsync(stream.fileno())
        part.replace(final)
    finally:
        part.unlink(missing_ok=True)
