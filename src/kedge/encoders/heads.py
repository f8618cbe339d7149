"""Heads: from the pooled features of a backbone (B x width) to embeddings (B x dim)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge.errors import ConfigError

__all__ = ["GAIN", "HEADS", "BatchNormHead", "BoundedHead", "L2NormHead", "build_head"]

HEADS = ("none", "linear", "bounded", "batchnorm", "unit")

GAIN = 3.0

_MIN_LENGTH = 1e-6
"""Shorter than that, a vector has no direction."""


class BatchNormHead(nn.Module):
    """Batch normalisation without affine parameters, times ``GAIN / sqrt(width)``: features of one scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width, affine=False)
        self.scale = GAIN / math.sqrt(width)

    def forward(self, features: Tensor) -> Tensor:
        """Normalise ``features``."""
        if self.training and features.shape[0] == 1:
            # One image has no variance: batch statistics would erase it, so the running ones serve.
            norm = self.norm
            normed = F.batch_norm(features, norm.running_mean, norm.running_var, training=False, eps=norm.eps)
        else:
            normed = self.norm(features)
        return normed * self.scale


class BoundedHead(BatchNormHead):
    """A linear layer whose input is bounded: no eigenvalue of that input's second moment exceeds ``GAIN**2``.

    The attractor is a squared loss, so that second moment is the curvature in the layer's weights, and an
    optimizer is stable only while rate times largest eigenvalue stays small. Batch normalisation without
    affine parameters gives each of the ``width`` features variance 1 at most; times ``GAIN / sqrt(width)``
    the trace, and with it every eigenvalue, is at most ``GAIN**2``. Weight and bias start at zero.
    """

    def __init__(self, width: int, dim: int) -> None:
        super().__init__(width)
        self.linear = nn.Linear(width, dim)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, features: Tensor) -> Tensor:
        """Embed ``features``."""
        return self.linear(super().forward(features))  # type: ignore[no-any-return]


class L2NormHead(nn.Module):
    """A linear layer, then L2 normalization: embeddings on the unit sphere.

    There squared distance is 2 - 2 cos, so that what a loss of cosines brings together is also near. Divided in at
    least float32, whatever the autocast dtype. A vector without a direction stays zero and gives no gradient.
    """

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, dim)

    def forward(self, features: Tensor) -> Tensor:
        """Embed ``features``."""
        points: Tensor = self.linear(features)
        with torch.autocast(points.device.type, enabled=False):
            points = points if points.dtype == torch.float64 else points.float()
            lengths: Tensor = torch.linalg.vector_norm(points, dim=1, keepdim=True)
            # Not clamped to some epsilon: the gradient would be divided by it. A NaN stays.
            zero = lengths <= _MIN_LENGTH
            return (points / lengths.masked_fill(zero, 1)).masked_fill(zero, 0)


def build_head(kind: str, width: int, dim: int) -> nn.Module:
    """The head called ``kind``; where ``dim`` is not the width, ``none`` and ``batchnorm`` get a linear layer."""
    if kind not in HEADS:
        raise ConfigError(f"head must be one of {', '.join(HEADS)}; found {kind!r}.")
    if kind == "bounded":
        return BoundedHead(width, dim)
    if kind == "batchnorm":
        norm = BatchNormHead(width)
        return norm if dim == width else nn.Sequential(norm, nn.Linear(width, dim))
    if kind == "unit":
        return L2NormHead(width, dim)
    if kind == "none" and dim == width:
        return nn.Identity()
    return nn.Linear(width, dim)
