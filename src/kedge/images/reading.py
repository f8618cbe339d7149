"""Reading one picture: whatever is in the file, an upright RGB image or one clear error comes out."""

from __future__ import annotations

import io
import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from kedge.errors import PictureError

__all__ = ["MAX_PIXELS", "read_picture", "to_rgb", "upright"]

MAX_PIXELS = 100_000_000

# Pixel formats only: Pillow's EPS reader, for one, starts Ghostscript on the file it is given. No icons:
# opening one decodes it, before its size can be checked.
_FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF", "TGA")

# Pillow logs what it finds wrong besides raising it; without a handler that would land on standard error.
logging.getLogger("PIL").addHandler(logging.NullHandler())


def read_picture(source: str | Path | bytes | BinaryIO, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Read a picture as upright RGB, fully loaded; of an animation, the first frame.

    The size is checked against ``max_pixels`` before any pixel is decoded. (Pillow's own limit,
    ``2 * PIL.Image.MAX_IMAGE_PIXELS``, holds besides.) Whatever is wrong with the file, the error is a
    ``PictureError`` that names it.
    """
    name = _name(source)
    try:
        with _quiet(), ExitStack() as stack:
            stream = _open(source, stack)
            image = stack.enter_context(Image.open(stream, formats=_formats()))
            width, height = image.size
            if width * height > max_pixels:
                raise PictureError(
                    f"it has {width} x {height} pixels, more than the limit of {max_pixels:,}; "
                    "make it smaller, or raise max_pixels."
                )
            image.load()
            return to_rgb(upright(image))
    except UnidentifiedImageError:
        reason = "it is empty (0 bytes)" if _is_empty(source) else "it is not a picture of a known format"
    except Image.DecompressionBombError:
        reason = "it has more pixels than Pillow's own limit allows"
    except FileNotFoundError:
        reason = "there is no such file"
    except IsADirectoryError:
        reason = "it is a folder"
    except Exception as error:  # a damaged file can make Pillow's readers raise almost anything
        reason = str(error).rstrip(".") or type(error).__name__
    raise PictureError(f"{name} cannot be read: {reason}.")


def to_rgb(image: Image.Image) -> Image.Image:
    """Any mode as RGB: transparency on white, 16 bits to their high byte, the first frame of an animation."""
    if getattr(image, "is_animated", False) and image.tell() != 0:
        image.seek(0)
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return Image.fromarray(_eight_bits(image)).convert("RGB")
    try:
        if image.has_transparency_data:
            with_alpha = image.convert("LA").convert("RGBA") if image.mode == "La" else image.convert("RGBA")
            on_white = Image.new("RGBA", image.size, "white")
            on_white.alpha_composite(with_alpha)
            return on_white.convert("RGB")
        return image.convert("RGB")
    except ValueError as error:
        raise PictureError(f"mode {image.mode} cannot be turned into RGB ({error}).") from error


def _eight_bits(image: Image.Image) -> np.ndarray:
    values = np.asarray(image)
    if image.mode == "F":
        values = np.fmax(values, 0)  # of a NaN and 0, the 0
        # Floats carry no range of their own: up to 1 they are fractions of white, beyond it pixel values.
        values = np.rint(values * 255 if values.max(initial=0) <= 1 else values)
    elif image.mode != "I" or values.max(initial=0) > 255:
        values = values >> 8
    return np.asarray(np.clip(values, 0, 255), dtype=np.uint8)


def upright(image: Image.Image) -> Image.Image:
    """Decoded and turned as its EXIF block says."""
    image.load()
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # a broken EXIF block says nothing about the pixels, which are loaded already
        return image


def _open(source: str | Path | bytes | BinaryIO, stack: ExitStack) -> BinaryIO:
    if isinstance(source, str | Path):
        return stack.enter_context(Path(source).open("rb"))
    return io.BytesIO(source) if isinstance(source, bytes) else source


def _name(source: str | Path | bytes | BinaryIO) -> str:
    if isinstance(source, str | Path):
        return str(source)
    name = getattr(source, "name", None)
    return name if isinstance(name, str) else "The picture"


def _is_empty(source: str | Path | bytes | BinaryIO) -> bool:
    if isinstance(source, bytes):
        return not source
    if isinstance(source, str | Path):
        return Path(source).stat().st_size == 0
    return source.seekable() and source.seek(0, io.SEEK_END) == 0


@cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


class _Quiet:
    """Silences Pillow's warnings while any thread reads.

    ``warnings.catch_warnings`` alone is not safe in threads: two that overlap can restore each other's
    filters and leave the silence behind for good. The first reader in opens it, the last one out closes it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers = 0
        self._catcher: warnings.catch_warnings[None] | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._readers += 1
            if self._readers == 1:
                self._catcher = warnings.catch_warnings()
                self._catcher.__enter__()
                warnings.filterwarnings("ignore", module=r"PIL\b")
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            yield
        finally:
            with self._lock:
                self._readers -= 1
                if self._readers == 0 and self._catcher is not None:
                    self._catcher.__exit__(None, None, None)
                    self._catcher = None


_quiet = _Quiet()
