"""The expected anchor under a softmax classifier, and sums over many classes in bounded memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

__all__ = ["by_rows", "posterior_mean"]

_ENTRIES = 2**24
"""Of a matrix of outputs × classes, so many are held at a time (64 MiB in float32)."""


def posterior_mean(outputs: Tensor, weight: Tensor, bias: Tensor, anchors: Tensor) -> Tensor:
    """Σ_j p_j c_j with p = softmax(W f + b): the expected anchor, in bounded memory without gradients.

    >>> posterior_mean(torch.zeros(1, 2), torch.eye(2), torch.zeros(2), torch.tensor([[1.0, 0.0], [0.0, 1.0]])).tolist()
    [[0.5, 0.5]]
    """
    rows = max(1, _ENTRIES // len(anchors))
    parts = torch.split(outputs, rows) if len(outputs) > rows else (outputs,)
    means = [F.linear(part, weight, bias).softmax(dim=1) @ anchors for part in parts]
    return torch.cat(means) if len(means) > 1 else means[0]


def by_rows(function: Callable[..., Tensor], rows: tuple[Tensor, ...], classes: int) -> Tensor:
    """The sum of `function(*block)` over blocks of rows, each computed again for its gradients.

    So that a matrix of rows × classes never exists as a whole; where it is small enough, `function` is called once.
    """
    at_once = max(1, _ENTRIES // classes)
    if len(rows[0]) <= at_once:
        return function(*rows)
    blocks = zip(*(torch.split(part, at_once) for part in rows), strict=True)
    return torch.stack([checkpoint(function, *block, use_reentrant=False) for block in blocks]).sum(dim=0)
