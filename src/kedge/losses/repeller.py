"""The repeller among class anchors: exact in bounded memory, or estimated from a sample of the anchors."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kedge.losses.custom_grad import class_directions, widest, with_gradient

__all__ = ["repeller"]

_PAIRS = {"cpu": 2**22}
_PAIRS_ELSEWHERE = 2**26
"""At most so many pairs (rows × classes) are held at a time."""
_WIDE = 128
"""Up to so many classes, float64 costs nothing."""


def repeller(anchors: Tensor, margin: float, sample: int | None = None) -> Tensor:
    """½ Σ max(0, 2·margin − ‖c_y − c_y'‖)² over unordered pairs of anchors.

    With `sample`, so many anchors, drawn anew in each call from the device's generator, are compared with all:
    value and gradient are then unbiased estimates.

    >>> repeller(torch.tensor([[0.0], [3.0], [9.0]]), margin=2.0).item()
    0.5
    """
    with torch.no_grad():
        points, drawn = anchors.detach(), None
        if sample is not None and sample < len(points):
            drawn = torch.randperm(len(points), device=points.device)[:sample]
        value, gradient = _value_and_gradient(points, margin, drawn)
    return with_gradient(anchors, value, gradient.to(anchors.dtype))


def _value_and_gradient(anchors: Tensor, margin: float, drawn: Tensor | None) -> tuple[Tensor, Tensor]:
    """Over row blocks of the matrix of pairs (all rows, or those drawn), without a host sync."""
    dtype = widest(anchors) if len(anchors) <= _WIDE else anchors.dtype
    centre = anchors.mean(dim=0, dtype=widest(anchors))
    columns = _Side((anchors - centre).to(dtype), class_directions(anchors).to(dtype))
    classes = torch.arange(len(anchors), device=anchors.device)
    rows = classes if drawn is None else drawn
    value, gradient = columns.points.new_zeros(()), torch.zeros_like(columns.points)
    pairs = _PAIRS.get(anchors.device.type, _PAIRS_ELSEWHERE)
    for block in torch.split(rows, max(1, pairs // len(anchors))):
        whole = len(block) == len(anchors) and drawn is None
        side = columns if whole else _Side(columns.points[block], columns.own[block])
        block_value, forces = _weigh(side, columns, margin, itself=None if whole else block[:, None] == classes)
        value += block_value
        if whole:
            gradient = forces.gradient(side, columns)
        else:
            gradient.index_add_(0, block, forces.gradient(side, columns))
        if drawn is not None:
            gradient += forces.transpose().gradient(columns, side)
    if drawn is None:
        # Every pair is there twice, and each of its anchors as a row once.
        return value / 2, gradient
    # An anchor is drawn with probability k/t, and a pair can be met from both its ends.
    scale = len(anchors) / (2 * len(drawn))
    return value * scale, gradient * scale


class _Side(NamedTuple):
    """The rows or the columns of a block of pairs: around their centre, so that squares keep their digits."""

    points: Tensor
    own: Tensor


class _Forces(NamedTuple):
    """How strongly each pair repels along its difference or, where that is 0, along its class directions."""

    apart: Tensor
    together: Tensor
    parting: float

    def transpose(self) -> _Forces:
        """The same pairs, seen from the columns."""
        return _Forces(self.apart.T, self.together.T, self.parting)

    def gradient(self, rows: _Side, columns: _Side) -> Tensor:
        """−Σ (2m − d)/d · (c_y − c_y') for each row."""
        gradient = torch.addmm(self.apart.sum(dim=1, keepdim=True) * rows.points, self.apart, columns.points, beta=-1)
        if not torch.compiler.is_compiling() and gradient.device.type == "cpu" and not self.together.any():
            return gradient  # on a GPU, to look would mean to wait
        gradient.addcmul_(self.together.sum(dim=1, keepdim=True), rows.own, value=-self.parting)
        return gradient.addmm_(self.together, columns.own, alpha=self.parting)


def _weigh(rows: _Side, columns: _Side, margin: float, itself: Tensor | None) -> tuple[Tensor, _Forces]:
    """½ Σ (2m − d)² and the forces, over all pairs but those of a point with itself (by default the diagonal)."""
    first, second = rows.points, columns.points
    squares = second.square().sum(dim=1)
    sums = squares + (squares if rows is columns else first.square().sum(dim=1)).unsqueeze(1)
    squared = torch.addmm(sums, first, second.T, alpha=-2)
    # What a sum of dim squares may be off by: nearer points count as one.
    nothing = sums.mul_(8 * math.sqrt(first.shape[1]) * torch.finfo(first.dtype).eps)
    squared = squared.fill_diagonal_(math.inf) if itself is None else squared.masked_fill_(itself, math.inf)
    together = squared <= nothing
    distances = squared.masked_fill_(together, 0).sqrt_()
    shortfall = (2 * margin - distances).clamp_(min=0)
    value = shortfall.square().sum() / 2
    apart = shortfall.div_(distances).masked_fill_(together, 0)
    # The difference of two class directions becomes about as long as two margins.
    return value, _Forces(apart, together.to(apart.dtype), 2 * margin / math.sqrt(first.shape[1] / 6))
