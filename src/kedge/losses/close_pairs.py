"""Which of many points may lie close together, without holding all their distances."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["close_pairs"]

_ON_GPU = torch.float16, 2**27
_ELSEWHERE = torch.float32, 2**22
"""In which dtype to look, and at how many pairs at a time."""
_LARGEST = 128.0
"""Norms that float16 can square."""


def close_pairs(points: Tensor, reach: float, chosen: Tensor | None = None) -> Iterator[tuple[Tensor, slice, Tensor]]:
    """Every pair of rows of `points` that is closer than `reach`, and few others, as rows, columns and a mask.

    Each unordered pair comes once; with `chosen`, each pair of a chosen row and any other one.

    >>> points = torch.tensor([[0.0], [9.0], [1.0]])
    >>> [rows[mask.any(dim=1)].tolist() for rows, columns, mask in close_pairs(points, 2.0)]
    [[0]]
    """
    screen = _Screen(points, reach, chosen)
    tiles = list(screen.tiles())
    hits = torch.zeros(len(tiles), tiles[0][0].stop, dtype=torch.bool, device=points.device)
    for hit, (rows, columns) in zip(hits, tiles, strict=True):
        hit[: rows.stop - rows.start] = screen.hits(rows, columns)
    # Only here, with all tiles looked at, does the host wait for the device.
    counts = hits.sum(dim=1).tolist()
    places = torch.split(hits.nonzero()[:, 1], counts)
    for (rows, columns), inside in zip(tiles, places, strict=True):
        if len(inside):
            numbers = inside + rows.start
            yield (numbers if chosen is None else chosen[numbers]), columns, screen.mask(numbers, columns)


class _Screen:
    """−½‖a − b‖² as one matrix product in low precision, raised by all that its rounding may have cost."""

    def __init__(self, points: Tensor, reach: float, chosen: Tensor | None) -> None:
        dtype, self.area = _ON_GPU if points.device.type == "cuda" else _ELSEWHERE
        # Whoever allows sums in float16 gets coarser numbers instead: theirs are still added up in float32.
        if getattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", False):
            dtype = torch.bfloat16 if dtype == torch.float16 else dtype
        self.chosen = chosen
        count, dim = points.shape
        # Rounding costs a share of the norms, so these had better be small: distances know no origin.
        centred = points - points.mean(dim=0)
        norms = torch.linalg.vector_norm(centred, dim=1)
        scale = (_LARGEST / norms.max()).clamp_(max=1)
        norms = norms * scale
        # A share of the squares: eps for rounding both factors, eps for partial sums, the rest for adding dim terms
        # up. A share of the norms, for the smallest numbers: they are rounded to multiples of `step`.
        eps, step = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        share = 1 - 2 * eps - (dim + 8) * 2.0**-21
        halves = norms.square() * (share / 2) - norms * (math.sqrt(dim) * step) - 4 * step
        high = halves.to(dtype)
        # a·b − (|a|² + |b|²)/2: the norms are further coordinates, in two parts each; eights suit the GPU.
        self.right = torch.zeros(count, (dim + 4 + 7) // 8 * 8, dtype=dtype, device=points.device)
        self.right[:, :dim] = centred.mul_(scale)
        self.right[:, dim : dim + 2] = 1
        self.right[:, dim + 2] = -high
        self.right[:, dim + 3] = high - halves
        del centred
        self.left = self.right.clone() if chosen is None else self.right[chosen]
        self.left[:, dim : dim + 4] = self.left[:, dim : dim + 4].roll(2, dims=1)
        # Rounding keeps the order, so what was above the limit is not below the rounded one.
        self.limit = (scale.square() * (-(reach**2) / 2)).to(dtype)

    def tiles(self) -> Iterator[tuple[slice, slice]]:
        """Rows and columns; without chosen rows, on and above the diagonal."""
        side = math.isqrt(self.area)
        heights = _blocks(len(self.left), side)
        widths = heights
        if self.chosen is not None:
            widths = _blocks(len(self.right), max(side, self.area // heights[0].stop))
        for rows in heights:
            for columns in widths:
                if self.chosen is not None or columns.start >= rows.start:
                    yield rows, columns

    def hits(self, rows: slice, columns: slice) -> Tensor:
        """Which rows may have a close partner among the columns."""
        scores = self.left[rows] @ self.right[columns].T
        if self.chosen is not None:
            _forget_self(scores, self.chosen[rows] - columns.start)
        elif rows.start == columns.start:
            scores.fill_diagonal_(-torch.inf)
        # Not "above": what is not a number must be noticed.
        return torch.logical_not(scores.amax(dim=1) < self.limit)

    def mask(self, numbers: Tensor, columns: slice) -> Tensor:
        """Which pairs of these rows and columns may be close."""
        mask = ~(self.left[numbers] @ self.right[columns].T < self.limit)
        others = torch.arange(columns.start, columns.stop, device=mask.device)
        wanted = others > numbers[:, None] if self.chosen is None else others != self.chosen[numbers, None]
        return torch.logical_and(mask, wanted, out=mask)


def _blocks(length: int, at_most: int) -> list[slice]:
    """Equal parts, but for the last; in eights, which suit the GPU, where there are several."""
    size = length
    if length > at_most:
        size = math.ceil(length / math.ceil(length / at_most))
        size = max(1, min(at_most, (size + 7) // 8 * 8))
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _forget_self(scores: Tensor, places: Tensor) -> None:
    """No score for a point with itself, which stands in column `places`, if among the columns at all."""
    inside = (places >= 0) & (places < scores.shape[1])
    index = places.clamp(0, scores.shape[1] - 1)[:, None]
    scores.scatter_(1, index, scores.gather(1, index).masked_fill_(inside[:, None], -torch.inf))
