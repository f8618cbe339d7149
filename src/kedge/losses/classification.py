"""Cross-entropy with its classifier, and the center loss beside it; the embedding is what enters the classifier."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from kedge.losses.base import RetrievalLoss, check_labels, check_number, in_full_precision
from kedge.losses.cam import attractor, log_loss
from kedge.losses.repeller import with_gradient

__all__ = ["CenterLoss", "CrossEntropyLoss"]


class CrossEntropyLoss(RetrievalLoss):
    """−log softmax(W e + b)_y, mean over the batch; `classifier` holds W and b."""

    name = "cross_entropy"
    heads = ("none", "batchnorm", "linear", "bounded")
    uses_other_samples: ClassVar[bool] = False
    compiles = True

    def __init__(self, num_classes: int, dim: int, label_smoothing: float = 0.0) -> None:
        super().__init__()
        check_number("label_smoothing", label_smoothing, below=1.0)
        self.classifier = nn.Linear(dim, num_classes)
        self.label_smoothing = label_smoothing

    def components(self, embeddings: Tensor, labels: Tensor, *mixed: Tensor) -> dict[str, Tensor]:
        """`cross_entropy`, the only part; of mixed images that of both classes, by their shares."""
        check_labels(labels, self.classifier.out_features)
        with torch.autocast(embeddings.device.type, enabled=False):
            logits = self.classifier(in_full_precision(embeddings))
            return {"cross_entropy": log_loss(logits, labels, *mixed, smoothing=self.label_smoothing)}

    def mixed_components(
        self, embeddings: Tensor, labels: Tensor, others: Tensor, weights: Tensor
    ) -> dict[str, Tensor]:
        """The same with both classes, by their shares."""
        return self.components(embeddings, labels, others, weights)

    @torch.no_grad()
    def predict(self, embeddings: Tensor) -> Tensor:
        """The class with the highest logit, for each embedding."""
        with torch.autocast(embeddings.device.type, enabled=False):
            predicted: Tensor = self.classifier(in_full_precision(embeddings)).argmax(dim=1)
        return predicted


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

    def components(self, embeddings: Tensor, labels: Tensor, *mixed: Tensor) -> dict[str, Tensor]:
        """`cross_entropy` and `center`."""
        parts = super().components(embeddings, labels, *mixed)
        with torch.autocast(embeddings.device.type, enabled=False):
            points, centers = in_full_precision(embeddings), in_full_precision(self.centers)
            pull = attractor(points, labels, centers.detach(), *mixed)
            shares = self._shares(labels, points.dtype)
            if mixed:
                others, weights = mixed
                shares = torch.lerp(self._shares(others, points.dtype), shares, weights.to(points.dtype).unsqueeze(1))
            with torch.no_grad():
                counts = shares.sum(dim=0).unsqueeze(1)
                gradient = (counts * centers - shares.T @ points) / (1 + counts)
            return {**parts, "center": self.weight * pull + with_gradient(centers, centers.new_zeros(()), gradient)}

    def _shares(self, labels: Tensor, dtype: torch.dtype) -> Tensor:
        """1 where a row's image is of a column's class. As large as the logits, and a product adds up in one order."""
        return (labels.unsqueeze(1) == torch.arange(len(self.centers), device=labels.device)).to(dtype)
