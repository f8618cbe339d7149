"""The repeller and the minimum norm of class anchors: gradients in closed form, in bounded memory."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["minimum_norm", "repeller", "with_gradient"]

_PAIRS = {"cpu": 2**22}
_PAIRS_ELSEWHERE = 2**26
"""At most so many pairs (rows × classes) are held at a time."""
_WIDE = 128
"""Up to so many classes, float64 costs nothing."""
_GOLDEN = (math.sqrt(5) - 1) / 2


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


def minimum_norm(anchors: Tensor, min_norm: float) -> Tensor:
    """½ Σ max(0, min_norm − ‖c_y‖)² over the anchors."""
    with torch.no_grad():
        points = anchors.detach()
        norms = torch.linalg.vector_norm(points, dim=1, keepdim=True)
        shortfall = (min_norm - norms).clamp_(min=0)
        value = shortfall.square().sum() / 2
        # At the origin (or so near that the norm vanishes) the closed form is 0/0: such an anchor is pushed along a
        # direction of its own.
        points = torch.where(norms == 0, _class_directions(points).to(points.dtype), points)
        gradient = points * (shortfall / torch.linalg.vector_norm(points, dim=1, keepdim=True)).neg_()
    return with_gradient(anchors, value, gradient)


def with_gradient(anchors: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
    """The value, as a function of the anchors that has this gradient.

    >>> anchors = torch.zeros(2, requires_grad=True)
    >>> (3 * with_gradient(anchors, torch.tensor(5.0), torch.tensor([1.0, 2.0]))).backward()
    >>> anchors.grad
    tensor([3., 6.])
    """
    result: Tensor = _WithGradient.apply(anchors, value, gradient)
    return result


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchors: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.to(anchors.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradients[0] * gradient, None, None


def _class_directions(anchors: Tensor) -> Tensor:
    """A fixed vector for each class, no two alike: numbers in ±½, in the widest dtype."""
    numbers = torch.arange(anchors.numel(), dtype=_widest(anchors), device=anchors.device).view(anchors.shape)
    # Multiples of an irrational number never meet again, and those of this one keep the most distance.
    return numbers.mul_(_GOLDEN).frac_().sub_(0.5)


def _widest(like: Tensor) -> torch.dtype:
    """float64, in which a difference of sums keeps its digits; Apple's GPUs have none."""
    return torch.float32 if like.device.type == "mps" else torch.float64


def _value_and_gradient(anchors: Tensor, margin: float, drawn: Tensor | None) -> tuple[Tensor, Tensor]:
    """Over row blocks of the matrix of pairs (all rows, or those drawn), without a host sync."""
    dtype = _widest(anchors) if len(anchors) <= _WIDE else anchors.dtype
    # Around their centre, so that squares keep their digits.
    points = (anchors - anchors.mean(dim=0, dtype=_widest(anchors))).to(dtype)
    directions = _class_directions(anchors).to(dtype)
    # The difference of two class directions becomes about as long as two margins.
    parting = 2 * margin / math.sqrt(points.shape[1] / 6)
    squares = points.square().sum(dim=1)
    classes = torch.arange(len(anchors), device=anchors.device)
    value, gradient = points.new_zeros(()), torch.zeros_like(points)

    def forces(apart: Tensor, together: Tensor, rows: tuple[Tensor, Tensor], columns: tuple[Tensor, Tensor]) -> Tensor:
        """−Σ (2m − d)/d · (c_y − c_y') for each row; for coinciding points along their class directions."""
        force = torch.addmm(apart.sum(dim=1, keepdim=True) * rows[0], apart, columns[0], beta=-1)
        if not torch.compiler.is_compiling() and force.device.type == "cpu" and not together.any():
            return force  # on a GPU, to look would mean to wait
        force.addcmul_(together.sum(dim=1, keepdim=True), rows[1], value=-parting)
        return force.addmm_(together, columns[1], alpha=parting)

    pairs = _PAIRS.get(anchors.device.type, _PAIRS_ELSEWHERE)
    for block in torch.split(classes if drawn is None else drawn, max(1, pairs // len(anchors))):
        whole = drawn is None and len(block) == len(anchors)
        columns = points, directions
        rows = columns if whole else (points[block], directions[block])
        sums = squares + rows[0].square().sum(dim=1).unsqueeze(1)
        squared = torch.addmm(sums, rows[0], points.T, alpha=-2)
        # What a sum of dim squares may be off by: nearer points count as one.
        nothing = sums.mul_(8 * math.sqrt(points.shape[1]) * torch.finfo(dtype).eps)
        # An anchor and itself are no pair.
        squared = (
            squared.fill_diagonal_(math.inf) if whole else squared.masked_fill_(block[:, None] == classes, math.inf)
        )
        coincide = squared <= nothing
        distances = squared.masked_fill_(coincide, 0).sqrt_()
        shortfall = (2 * margin - distances).clamp_(min=0)
        value += shortfall.square().sum() / 2
        apart, together = shortfall.div_(distances).masked_fill_(coincide, 0), coincide.to(dtype)
        force = forces(apart, together, rows, columns)
        gradient = force if whole else gradient.index_add_(0, block, force)
        if drawn is not None:
            gradient += forces(apart.T, together.T, columns, rows)
    if drawn is None:
        # Every pair is there twice, and each of its anchors as a row once.
        return value / 2, gradient
    # An anchor is drawn with probability k/t, and a pair can be met from both its ends.
    scale = len(anchors) / (2 * len(drawn))
    return value * scale, gradient * scale
