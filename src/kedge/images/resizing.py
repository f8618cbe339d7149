"""From an image of any size to the square that an encoder sees, or to a thumbnail; without torch."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from kedge.images.reading import to_rgb

__all__ = ["centre_square", "thumbnail_of"]


def centre_square(image: Image.Image, size: int | None) -> np.ndarray:
    """The image's centre as uint8, 3 x size x size: the shorter side fills the output, antialiased."""
    image = to_rgb(image)
    if size is not None and image.size != (size, size):
        # Only the centre square is resampled: the same picture as resizing first and cropping then,
        # without the huge image in between that a very long and narrow one would become.
        side = min(image.size)
        left, top = (image.width - side) / 2, (image.height - side) / 2
        box = (left, top, left + side, top + side)
        image = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
    return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))


def thumbnail_of(image: Image.Image, side: int) -> bytes:
    """A small copy as JPEG."""
    small = image.copy()
    small.thumbnail((side, side))
    stream = io.BytesIO()
    small.save(stream, "JPEG", quality=82)
    return stream.getvalue()
