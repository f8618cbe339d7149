"""Rectangles in images: which pixels lie inside, and blackening them."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["cutout", "inside"]


def inside(size: tuple[int, int], top: Tensor, bottom: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """B x 1 x H x W: true from row ``top`` and column ``left`` up to, not including, ``bottom`` and ``right``."""
    rows = torch.arange(size[0], device=top.device)
    columns = torch.arange(size[1], device=top.device)
    in_rows = (rows >= top[:, None]) & (rows < bottom[:, None])
    in_columns = (columns >= left[:, None]) & (columns < right[:, None])
    return (in_rows[:, :, None] & in_columns[:, None, :])[:, None]


def cutout(images: Tensor, centre_y: Tensor, centre_x: Tensor, size: int) -> Tensor:
    """Blacken a square of ``size`` pixels around a centre, the part of it that lies inside the image."""
    top, left = centre_y - size // 2, centre_x - size // 2
    hole = inside((images.shape[-2], images.shape[-1]), top, top + size, left, left + size)
    return images * ~hole
