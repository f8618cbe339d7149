"""Augmentations as pure functions over whole batches, on any device, with another parameter for every image.

Coordinates are computed pixel by pixel and not with matrix products, which would lose digits to the reduced precision
that training allows for those.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "WHITE",
    "adjust_brightness",
    "adjust_contrast",
    "adjust_saturation",
    "affine",
    "box_mask",
    "crop",
    "cutout",
    "flip",
    "from_center",
    "grayscale",
    "sample_nearest",
    "uniform",
]

WHITE = 255 / 256
"""The value of a white pixel: pixels are divided by 256."""
_NUDGE = 1e-4


def uniform(rows: int, count: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Rows of ``count`` numbers from [0, 1), drawn on the generator's device, without synchronisation."""
    pinned = device.type == "cuda" and generator.device.type == "cpu"
    draws = torch.rand(rows, count, generator=generator, device=generator.device, pin_memory=pinned)
    return draws.to(device, non_blocking=True)


def crop(images: Tensor, offsets_y: Tensor, offsets_x: Tensor, padding: int, flipped: Tensor | None = None) -> Tensor:
    """Pad with zeros and cut the original size out again, image i from row and column offsets[i].

    Where ``flipped`` is true, what was cut out is flipped.
    """
    height, width = images.shape[-2:]
    rows = torch.arange(height, device=images.device)[:, None]
    columns = torch.arange(width, device=images.device)
    if flipped is not None:
        columns = torch.where(flipped[:, None, None], columns.flip(0), columns)
    return _take(_pad(images, padding), rows + offsets_y[:, None, None], columns + offsets_x[:, None, None])


def flip(images: Tensor, mask: Tensor) -> Tensor:
    """Flip left to right the images where ``mask`` is true."""
    return torch.where(mask[:, None, None, None], images.flip(-1), images)


def affine(images: Tensor, degrees: Tensor, shift_x: Tensor, shift_y: Tensor) -> Tensor:
    """Rotate clockwise about the centre, then shift (in pixels), in one bilinear resampling over zeros."""
    height, width = images.shape[-2:]
    x, y = from_center(images)
    x, y = x - shift_x[:, None, None], y - shift_y[:, None, None]
    radians = (degrees * (math.pi / 180))[:, None, None]
    cos, sin = radians.cos(), radians.sin()
    # Where each output pixel comes from, in grid_sample's coordinates: -1 to 1 across either side.
    from_x, from_y = (cos * x + sin * y) * (2 / width), (cos * y - sin * x) * (2 / height)
    grid = torch.stack([from_x, from_y], dim=-1).to(images.dtype)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def sample_nearest(images: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Every output pixel takes the pixel nearest to (x, y), in pixels from the centre; zero outside."""
    height, width = images.shape[-2:]
    # One pixel of zeros around the image stands for all that lies outside. Half way between two pixels (a diagonal
    # of a square turned by 45 degrees, say) the nudge decides, and not how the device rounds.
    rows = (y + (height / 2 + 1 + _NUDGE)).clamp_(0, height + 1).long()
    columns = (x + (width / 2 + 1 + _NUDGE)).clamp_(0, width + 1).long()
    return _take(_pad(images, 1), rows, columns)


def from_center(images: Tensor) -> tuple[Tensor, Tensor]:
    """The columns (W) and rows (H x 1) of the pixels, counted from the centre of the image."""
    height, width = images.shape[-2:]
    x = torch.arange(width, device=images.device, dtype=torch.float32) - (width - 1) / 2
    y = torch.arange(height, device=images.device, dtype=torch.float32) - (height - 1) / 2
    return x, y[:, None]


def _take(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Image i's pixels at rows[i] and columns[i], which broadcast to the output's H x W."""
    count, channels, _, width = images.shape
    places = rows * width + columns
    index = places.flatten(1)[:, None].expand(count, channels, -1)
    return images.flatten(2).gather(2, index).view(count, channels, *places.shape[1:])


def _pad(images: Tensor, pixels: int) -> Tensor:
    return F.pad(images, (pixels, pixels, pixels, pixels))


def box_mask(size: tuple[int, int], top: Tensor, bottom: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """B x 1 x H x W: true from row ``top`` and column ``left`` up to, not including, ``bottom`` and ``right``."""
    rows = torch.arange(size[0], device=top.device)
    columns = torch.arange(size[1], device=top.device)
    in_rows = (rows >= top[:, None]) & (rows < bottom[:, None])
    in_columns = (columns >= left[:, None]) & (columns < right[:, None])
    return (in_rows[:, :, None] & in_columns[:, None, :])[:, None]


def cutout(images: Tensor, centre_y: Tensor, centre_x: Tensor, size: int) -> Tensor:
    """Blacken a square of ``size`` pixels around a centre, the part of it that lies inside the image."""
    top, left = centre_y - size // 2, centre_x - size // 2
    hole = box_mask((images.shape[-2], images.shape[-1]), top, top + size, left, left + size)
    return images * ~hole


def adjust_brightness(images: Tensor, factors: Tensor, white: float = WHITE) -> Tensor:
    """Blend with black: 0 is black, 1 the same, 2 twice as bright (up to ``white``)."""
    return (images * factors[:, None, None, None]).clamp_(0, white)


def adjust_contrast(images: Tensor, factors: Tensor, white: float = WHITE) -> Tensor:
    """Blend with the image's mean grey: 0 is that grey, 1 the same, 2 twice the contrast."""
    return _blend(grayscale(images).mean(dim=(-2, -1), keepdim=True), images, factors, white)


def adjust_saturation(images: Tensor, factors: Tensor, white: float = WHITE) -> Tensor:
    """Blend with the grey image: 0 is grey, 1 the same, 2 twice the saturation."""
    return _blend(grayscale(images), images, factors, white)


def grayscale(images: Tensor) -> Tensor:
    """How bright each pixel looks, as one channel of floats."""
    red, green, blue = images.unbind(dim=1)
    return (0.2989 * red).add_(green, alpha=0.587).add_(blue, alpha=0.114)[:, None]


def _blend(other: Tensor, images: Tensor, factors: Tensor, white: float) -> Tensor:
    return torch.lerp(other, images, factors[:, None, None, None]).clamp_(0, white)
