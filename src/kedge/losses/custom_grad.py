"""Values whose gradient is known in closed form, and where to go where that form is 0/0."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["class_directions", "widest", "with_gradient"]

_GOLDEN = (math.sqrt(5) - 1) / 2


def with_gradient(anchors: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
    """The value, as a function of the anchors that has this gradient.

    >>> anchors = torch.zeros(2, requires_grad=True)
    >>> (3 * with_gradient(anchors, torch.tensor(5.0), torch.tensor([1.0, 2.0]))).backward()
    >>> anchors.grad
    tensor([3., 6.])
    """
    known: Tensor = _Known.apply(anchors, value, gradient)
    return known


def class_directions(anchors: Tensor, classes: Tensor | None = None) -> Tensor:
    """A fixed vector for each class, or for these, no two alike: numbers in ±½, in the widest dtype."""
    count, dim = anchors.shape
    if classes is None:
        numbers = torch.arange(count * dim, dtype=widest(anchors), device=anchors.device).view(count, dim)
    else:
        steps = torch.arange(dim, dtype=widest(anchors), device=anchors.device)
        numbers = classes.to(steps.dtype).mul_(dim).unsqueeze(1) + steps
    # Multiples of an irrational number never meet again, and those of this one keep the most distance.
    return numbers.mul_(_GOLDEN).frac_().sub_(0.5)


def widest(like: Tensor) -> torch.dtype:
    """float64, in which a difference of sums keeps its digits; Apple's GPUs have none."""
    return torch.float32 if like.device.type == "mps" else torch.float64


class _Known(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchors: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.to(anchors.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradients[0] * gradient, None, None
