"""The center loss: cross-entropy, with embeddings drawn to the center of their class."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from kedge.losses.base import check_number, in_full_precision
from kedge.losses.cam import attractor, mixed_attractor
from kedge.losses.cross_entropy import CrossEntropyLoss
from kedge.losses.custom_grad import with_gradient

__all__ = ["CenterLoss", "follow"]


class CenterLoss(CrossEntropyLoss):
    """−log softmax(W e + b)_y + weight · ½‖e − c_y‖², mean over the batch (Wen et al., 2016).

    `centers` (num_classes × dim) start at zero and follow their classes by the paper's rule, whatever the weight:
    as their gradient the optimiser sees Σ (c_y − e) / (1 + n), over the n images of class y in the batch. The
    derivative of the value would shrink with weight and batch until, at a paper's weight, no center moved.
    """

    name = "center"
    uses_other_samples: ClassVar[bool] = True  # a center follows by how many of its class the batch holds

    def __init__(self, num_classes: int, dim: int, weight: float = 0.003, label_smoothing: float = 0.0) -> None:
        super().__init__(num_classes, dim, label_smoothing)
        check_number("weight", weight)
        self.weight = weight
        self.centers = nn.Parameter(torch.zeros(num_classes, dim))

    def components(self, embeddings: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """`cross_entropy` and `center`."""
        parts = super().components(embeddings, labels)
        with torch.autocast(embeddings.device.type, enabled=False):
            points, centers = in_full_precision(embeddings), in_full_precision(self.centers)
            pull = attractor(points, labels, centers.detach())
            moved = follow(centers, points, _shares(labels, len(centers), points.dtype))
            return {**parts, "center": self.weight * pull + moved}

    def mixed_components(
        self, embeddings: Tensor, labels: Tensor, others: Tensor, weights: Tensor
    ) -> dict[str, Tensor]:
        """The same with both classes, by their shares."""
        parts = super().mixed_components(embeddings, labels, others, weights)
        with torch.autocast(embeddings.device.type, enabled=False):
            points, centers = in_full_precision(embeddings), in_full_precision(self.centers)
            pull = mixed_attractor(points, labels, others, weights, centers.detach())
            own, other = (_shares(one, len(centers), points.dtype) for one in (labels, others))
            moved = follow(centers, points, torch.lerp(other, own, weights.to(points.dtype).unsqueeze(1)))
            return {**parts, "center": self.weight * pull + moved}

    def extra_repr(self) -> str:
        """The settings, for printing."""
        return f"weight={self.weight}, label_smoothing={self.label_smoothing}"


def follow(centers: Tensor, embeddings: Tensor, shares: Tensor) -> Tensor:
    """Zero, as a function of the centers with the gradient Σ s (c − e) / (1 + Σ s), for shares s (batch × classes)."""
    with torch.no_grad():
        counts = shares.sum(dim=0).unsqueeze(1)
        gradient = (counts * centers - shares.T @ embeddings) / (1 + counts)
    return with_gradient(centers, centers.new_zeros(()), gradient)


def _shares(labels: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """1 where a row's image is of a column's class. As large as the logits, and a product adds up in one order."""
    return (labels.unsqueeze(1) == torch.arange(classes, device=labels.device)).to(dtype)
