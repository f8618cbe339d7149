"""Brightness, contrast and saturation of float images, another factor for every image."""

from __future__ import annotations

from torch import Tensor, lerp

__all__ = ["WHITE", "adjust_brightness", "adjust_contrast", "adjust_saturation", "grey"]

WHITE = 255 / 256
"""The value of a white pixel: pixels are divided by 256."""


def adjust_brightness(images: Tensor, factors: Tensor, white: float = WHITE) -> Tensor:
    """Blend with black: 0 is black, 1 the same, 2 twice as bright (up to ``white``)."""
    return (images * factors[:, None, None, None]).clamp_(0, white)


def adjust_contrast(images: Tensor, factors: Tensor, white: float = WHITE) -> Tensor:
    """Blend with the image's mean grey: 0 is that grey, 1 the same, 2 twice the contrast."""
    return _blend(grey(images).mean(dim=(-2, -1), keepdim=True), images, factors, white)


def adjust_saturation(images: Tensor, factors: Tensor, white: float = WHITE) -> Tensor:
    """Blend with the grey image: 0 is grey, 1 the same, 2 twice the saturation."""
    return _blend(grey(images), images, factors, white)


def grey(images: Tensor) -> Tensor:
    """How bright each pixel looks, as one channel of floats."""
    red, green, blue = images.unbind(dim=1)
    return (0.2989 * red).add_(green, alpha=0.587).add_(blue, alpha=0.114)[:, None]


def _blend(other: Tensor, images: Tensor, factors: Tensor, white: float) -> Tensor:
    return lerp(other, images, factors[:, None, None, None]).clamp_(0, white)
