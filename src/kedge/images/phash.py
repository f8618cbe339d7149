"""A perceptual hash: images that look alike have hashes that differ in few bits, whatever their size or quality."""

from __future__ import annotations

import numpy as np
from PIL import Image

__all__ = ["BITS", "perceptual_hash"]

_SIDE, _LOW = 32, 8
BITS = _LOW * _LOW - 1
"""Bits of a hash."""
_k, _x = np.arange(_SIDE)[:, None], np.arange(_SIDE)[None]
_DCT = np.cos(np.pi * _k * (2 * _x + 1) / (2 * _SIDE))[:_LOW]
"""The lowest rows of the discrete cosine transform (DCT-II)."""


def perceptual_hash(image: Image.Image) -> int:
    """Which of the 63 lowest frequencies of the grey image, without the constant one, lie above their median."""
    grey = np.asarray(image.resize((_SIDE, _SIDE), Image.Resampling.BILINEAR, reducing_gap=3.0).convert("L"), float)
    # Rounded, so that the noise of floating point is no pattern in an image without one.
    frequencies = (_DCT @ grey @ _DCT.T).round(3).ravel()[1:]
    bits = frequencies > np.median(frequencies)
    return int("".join("1" if bit else "0" for bit in bits), 2)
