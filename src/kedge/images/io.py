"""Image IO: an upright RGB image out of a file, bytes or an http(s) address, or one clear error; many in threads.

Without torch.
"""

from __future__ import annotations

import io
import logging
import math
import os
import re
import threading
import urllib.error
import urllib.request
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cache
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO, NoReturn, TypeVar

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from kedge.errors import ImageError

__all__ = [
    "MAX_PIXELS",
    "center_square",
    "fetch_image",
    "is_url",
    "make_thumbnail",
    "prefetch",
    "read_image",
    "to_rgb",
    "upright",
]

T = TypeVar("T")
R = TypeVar("R")
_WORKERS = min(8, os.cpu_count() or 1)
MAX_PIXELS = 100_000_000
MAX_DOWNLOAD = 64 * 2**20
_FETCH_SECONDS = 20.0
_MAX_SCANNED = 2_000_000_000
"""Pixels that all scans of a JPEG may go over. A progressive one has some ten scans; it could have any number."""
_LARGE = 16_000_000
"""Images with more pixels are decoded one at a time, so that memory does not grow with the number of threads."""
_MAX_PER_BYTE = 10_000
"""Pixels of a large image for each byte of its file: deflate reaches 8,256, with one bit per pixel."""
_DRAFT = 2048
"""A JPEG is decoded at 1/2, 1/4 or 1/8 of its size as long as both sides keep so many pixels."""
_MAX_RATIO = 8
"""Images that are longer and narrower are not resized as a whole: the result would be huge."""
_REASONS: dict[type[Exception], str] = {
    UnidentifiedImageError: "it is not an image of a known format",
    Image.DecompressionBombError: "it has more pixels than Pillow's own limit allows",
    FileNotFoundError: "there is no such file",
    IsADirectoryError: "it is a folder",
}

# Pixel formats only: Pillow's EPS reader, for one, starts Ghostscript on the file it is given. No icons:
# opening one decodes it, before its size can be checked.
_FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF", "TGA")

# Pillow logs what it finds wrong besides raising it; without a handler that would land on standard error.
logging.getLogger("PIL").addHandler(logging.NullHandler())

# An image in one block: those of 16 MiB, Pillow's default, are kept by glibc for each thread once they are freed.
Image.core.set_block_size(2**30)  # type: ignore[attr-defined]


def read_image(source: str | Path | bytes | BinaryIO, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Read an image as upright RGB, fully loaded; of an animation, the first frame.

    The size is checked against ``max_pixels`` before any pixel is decoded, and so is the work that a JPEG's scans
    would be. (Pillow's own limit, ``2 * PIL.Image.MAX_IMAGE_PIXELS``, holds besides.) JPEGs whose sides have 4096
    pixels and more come out at a half, a quarter or an eighth of their size. Whatever is wrong with the file, the
    error is an ``ImageError`` that names it.
    """
    file = source if isinstance(source, str | Path) else getattr(source, "name", None)
    name = file if isinstance(file, str | Path) else "The image"
    try:
        with _quiet(), ExitStack() as stack:
            if isinstance(source, str | Path):
                stream: BinaryIO = stack.enter_context(Path(source).open("rb"))
            else:
                stream = io.BytesIO(source) if isinstance(source, bytes) else source
            if stream.seek(0, io.SEEK_END) == 0:
                raise ImageError("it is empty (0 bytes)")
            image = stack.enter_context(Image.open(stream, formats=_formats()))
            _check_work(image, stream, max_pixels)
            image.draft(None, (_DRAFT, _DRAFT))
            with _one_large if image.width * image.height > _LARGE else nullcontext():
                return to_rgb(upright(image, in_place=True))
    except Exception as error:  # a damaged file can make Pillow's readers raise almost anything
        reason = _REASONS.get(type(error)) or str(error).rstrip(".") or type(error).__name__
    raise ImageError(f"{name} cannot be read: {reason}.")


def _check_work(image: Image.Image, stream: BinaryIO, max_pixels: int) -> None:
    """Refuse what would take much memory or time, before anything is decoded. Only the first frame ever is."""
    width, height = image.size
    pixels = width * height
    if pixels > max_pixels:
        raise ImageError(
            f"it has {width} x {height} pixels, more than the limit of {max_pixels:,}; "
            "make it smaller, or raise max_pixels."
        )
    if pixels > _LARGE and pixels > _MAX_PER_BYTE * (size := stream.seek(0, io.SEEK_END)):
        raise ImageError(f"its header says {width} x {height} pixels, which its {size:,} bytes cannot hold.")
    if image.format in ("JPEG", "MPO"):
        stream.seek(0)
        scans = _count_scans(stream.read())
        if scans * pixels > _MAX_SCANNED:
            raise ImageError(f"it has {scans:,} scans of {width} x {height} pixels, which is too much to decode.")


def _count_scans(data: bytes) -> int:
    """How often the first image of a JPEG file goes over its pixels."""
    scans, position = 0, 2
    while marker := _MARKER.search(data, position):
        kind, start = marker[0][1], marker.end()
        if kind == _END:
            break
        scans += kind == _SCAN
        # Segments are as long as they say, whatever bytes are in them; behind a scan's follow its coded pixels.
        position = start + max(int.from_bytes(data[start : start + 2], "big"), 2)
    return scans


_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")
"""Those with a segment: in coded pixels there are no others than restarts, and each other FF is followed by 00."""
_SCAN, _END = 0xDA, 0xD9


def to_rgb(image: Image.Image) -> Image.Image:
    """Any mode as RGB: transparency on white, 16 bits to their high byte, the first frame of an animation."""
    # Asked in this order: to say whether it is animated, some formats look for all their frames.
    if image.tell() != 0 and getattr(image, "is_animated", False):
        image.seek(0)
    image.load()
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = Image.fromarray(_to_8_bits(image))
    try:
        if not image.has_transparency_data:
            return Image.Image()._new(image.im) if image.mode == "RGB" else image.convert("RGB")
        if image.mode != "RGBA":
            image = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        rgb = Image.new("RGB", image.size, "white")
        rgb.paste(image, mask=image)
        return rgb
    except ValueError as error:
        raise ImageError(f"mode {image.mode} cannot be turned into RGB ({error}).") from error


def _to_8_bits(image: Image.Image) -> np.ndarray:
    """The levels of a grey image with more than eight bits."""
    values: np.ndarray = np.array(image)  # a copy, changed in place: such an image may be large
    if image.mode == "F":
        np.fmax(values, 0, out=values)  # of a NaN and 0, the 0
        # Floats carry no range of their own: up to 1 they are fractions of white, beyond it pixel values.
        values *= 255 if values.max(initial=0) <= 1 else 1
        np.rint(values, out=values)
    elif image.mode != "I" or values.max(initial=0) > 255:
        values >>= 8
    return np.clip(values, 0, 255, out=values).astype(np.uint8)


def upright(image: Image.Image, *, in_place: bool = False) -> Image.Image:
    """Decoded and turned as its EXIF block says."""
    image.load()
    # A broken EXIF block says nothing about the pixels, which are loaded already.
    with suppress(Exception):
        if not in_place:
            return ImageOps.exif_transpose(image)
        ImageOps.exif_transpose(image, in_place=True)
    return image


def is_url(text: str) -> bool:
    """Whether a text is an http(s) address."""
    return text.lower().startswith(("http://", "https://"))


class _NoFTP(urllib.request.FTPHandler):
    """Refuses the one other protocol that urllib lets a redirect lead to."""

    def ftp_open(self, req: urllib.request.Request) -> NoReturn:
        raise urllib.error.URLError(f"unknown url type: {req.type}")


def fetch_image(url: str, *, max_bytes: int = MAX_DOWNLOAD) -> Image.Image:
    """Fetch and read an image."""
    if not is_url(url):
        raise ImageError(f"{url} is not an http(s) address.")
    try:
        with urllib.request.build_opener(_NoFTP).open(url, timeout=_FETCH_SECONDS) as response:
            content: bytes = response.read(max_bytes + 1)
    except (urllib.error.URLError, OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ImageError(f"{url} cannot be fetched: {reason}.") from error
    if len(content) > max_bytes:
        raise ImageError(f"{url} holds more than {max_bytes:,} bytes; download it and pass the file.")
    try:
        return read_image(content)
    except ImageError as error:
        raise ImageError(str(error).replace("The image", url, 1)) from error


def prefetch(
    decode: Callable[[T], R], items: Iterable[T], *, ahead: int = 64, workers: int = _WORKERS
) -> Generator[R, None, None]:
    """Yield `decode(item)` in order; up to `ahead` items are decoded before they are asked for.

    An error of `decode` is raised where its item's turn comes. What is pending when the caller stops is cancelled.

    >>> list(prefetch(len, ["a", "bc", "def"], ahead=2))
    [1, 2, 3]
    """
    with ThreadPoolExecutor(workers) as pool:
        pending: deque[Future[R]] = deque()
        try:
            for item in items:
                pending.append(pool.submit(decode, item))
                if len(pending) > ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def center_square(
    image: Image.Image, size: int | None, crop_pct: float = 1.0, interpolation: str = "bilinear"
) -> np.ndarray:
    """The image's centre as uint8, 3 x size x size, antialiased: the shorter side becomes ``size / crop_pct`` pixels.

    At the defaults the square lies in the very centre; otherwise on whole pixels of the resized image, as in timm.
    """
    image = to_rgb(image)
    filter = Image.Resampling[interpolation.upper()]
    if size is not None and (crop_pct, interpolation) != (1.0, "bilinear"):
        image = _resize_and_crop(image, size, math.floor(size / crop_pct), filter)
    elif size is not None and image.size != (size, size):
        # Only the centre square is resampled: the same image as resizing first and cropping then.
        side = min(image.size)
        left, top = (image.width - side) / 2, (image.height - side) / 2
        image = image.resize((size, size), filter, box=(left, top, left + side, top + side))
    return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))


def _resize_and_crop(image: Image.Image, size: int, shorter: int, filter: Image.Resampling) -> Image.Image:
    """The shorter side resized to ``shorter`` pixels, then the centre square: as torchvision's transforms do it."""
    width, height = (int(shorter * side / min(image.size)) for side in image.size)
    left, top = round((width - size) / 2), round((height - size) / 2)
    right, bottom = left + size, top + size
    if max(width, height) <= _MAX_RATIO * shorter:
        # The whole image, although only its centre is kept: Pillow chooses by sizes which direction it resamples and
        # rounds first.
        return image.resize((width, height), filter).crop((left, top, right, bottom))
    across, down = image.width / width, image.height / height
    return image.resize((size, size), filter, box=(left * across, top * down, right * across, bottom * down))


def make_thumbnail(image: Image.Image, side: int) -> bytes:
    """A small copy as JPEG."""
    small = image.copy()
    small.thumbnail((side, side))
    stream = io.BytesIO()
    small.save(stream, "JPEG", quality=82)
    return stream.getvalue()


@cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Pillow's warnings while any thread reads.

    ``warnings.catch_warnings`` alone is not safe in threads: two that overlap can restore each other's filters. The
    first reader in opens it, the last one out closes it.
    """
    with _readers_lock:
        _readers.append(None)
        if len(_readers) == 1:
            _silence.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", module=r"PIL\b")
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    try:
        yield
    finally:
        with _readers_lock:
            _readers.pop()
            if not _readers:
                _silence.close()


_readers_lock, _readers, _silence = threading.Lock(), list[None](), ExitStack()
_one_large = threading.Lock()
