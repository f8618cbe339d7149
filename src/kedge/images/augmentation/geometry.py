"""Where pixels go: crop, flip, rotation, shift; another place for every image.

Coordinates are computed pixel by pixel and not with matrix products, which would lose digits to the reduced
precision that training allows for those.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["affine", "crop", "flip", "from_centre", "nearest"]

_NUDGE = 1e-4


def crop(images: Tensor, offsets_y: Tensor, offsets_x: Tensor, padding: int, mirrored: Tensor | None = None) -> Tensor:
    """Pad with zeros and cut the original size out again, image i from row and column offsets[i].

    Where ``mirrored`` is true, what was cut out is flipped.
    """
    height, width = images.shape[-2:]
    rows = torch.arange(height, device=images.device)[:, None]
    columns = torch.arange(width, device=images.device)
    if mirrored is not None:
        columns = torch.where(mirrored[:, None, None], columns.flip(0), columns)
    return _take(_pad(images, padding), rows + offsets_y[:, None, None], columns + offsets_x[:, None, None])


def flip(images: Tensor, mask: Tensor) -> Tensor:
    """Mirror left and right the images where ``mask`` is true."""
    return torch.where(mask[:, None, None, None], images.flip(-1), images)


def affine(images: Tensor, degrees: Tensor, shift_x: Tensor, shift_y: Tensor) -> Tensor:
    """Rotate clockwise about the centre, then shift (in pixels), in one bilinear resampling over zeros."""
    height, width = images.shape[-2:]
    x, y = from_centre(images)
    x, y = x - shift_x[:, None, None], y - shift_y[:, None, None]
    radians = (degrees * (math.pi / 180))[:, None, None]
    cos, sin = radians.cos(), radians.sin()
    # Where each output pixel comes from, in grid_sample's coordinates: -1 to 1 across either side.
    from_x, from_y = (cos * x + sin * y) * (2 / width), (cos * y - sin * x) * (2 / height)
    grid = torch.stack([from_x, from_y], dim=-1).to(images.dtype)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def nearest(images: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Every output pixel takes the pixel nearest to (x, y), in pixels from the centre; zero outside."""
    height, width = images.shape[-2:]
    # One pixel of zeros around the image stands for all that lies outside. Half way between two pixels (a diagonal
    # of a square turned by 45 degrees, say) the nudge decides, and not how the device rounds.
    rows = (y + (height / 2 + 1 + _NUDGE)).clamp_(0, height + 1).long()
    columns = (x + (width / 2 + 1 + _NUDGE)).clamp_(0, width + 1).long()
    return _take(_pad(images, 1), rows, columns)


def from_centre(images: Tensor) -> tuple[Tensor, Tensor]:
    """The columns (W) and rows (H x 1) of the pixels, counted from the centre of the image."""
    height, width = images.shape[-2:]
    x = torch.arange(width, device=images.device, dtype=torch.float32) - (width - 1) / 2
    y = torch.arange(height, device=images.device, dtype=torch.float32) - (height - 1) / 2
    return x, y[:, None]


def _take(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Image i's pixels at rows[i] and columns[i], which broadcast to the output's H x W."""
    count, channels, _, width = images.shape
    places = rows * width + columns
    wanted = places.flatten(1)[:, None].expand(count, channels, -1)
    return images.flatten(2).gather(2, wanted).view(count, channels, *places.shape[1:])


def _pad(images: Tensor, pixels: int) -> Tensor:
    return F.pad(images, (pixels, pixels, pixels, pixels))
