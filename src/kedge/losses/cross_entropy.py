"""Cross-entropy with its classifier; the embedding is what enters the classifier."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from kedge.losses.base import RetrievalLoss, check_labels, check_number, in_full_precision

__all__ = ["CrossEntropyLoss"]


class CrossEntropyLoss(RetrievalLoss):
    """−log softmax(W e + b)_y, mean over the batch; `classifier` holds W and b."""

    name = "cross_entropy"
    heads: ClassVar[tuple[str, ...]] = ("none", "batchnorm", "linear", "bounded")
    uses_other_samples: ClassVar[bool] = False

    def __init__(self, num_classes: int, dim: int, label_smoothing: float = 0.0) -> None:
        super().__init__()
        check_number("label_smoothing", label_smoothing, below=1.0)
        self.classifier = nn.Linear(dim, num_classes)
        self.label_smoothing = label_smoothing

    @property
    def compiles(self) -> bool:
        """Always."""
        return True

    def components(self, embeddings: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """`cross_entropy`, the only part."""
        check_labels(labels, self.classifier.out_features)
        with torch.autocast(embeddings.device.type, enabled=False):
            logits = self.classifier(in_full_precision(embeddings))
            value = nn.functional.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)
        return {"cross_entropy": value}

    def mixed_components(
        self, embeddings: Tensor, labels: Tensor, others: Tensor, weights: Tensor
    ) -> dict[str, Tensor]:
        """`cross_entropy` with both classes, by their shares."""
        check_labels(labels, self.classifier.out_features)
        with torch.autocast(embeddings.device.type, enabled=False):
            logits = self.classifier(in_full_precision(embeddings))
            own, other = (
                nn.functional.cross_entropy(logits, one, label_smoothing=self.label_smoothing, reduction="none")
                for one in (labels, others)
            )
        return {"cross_entropy": torch.lerp(other, own, weights.to(own.dtype)).mean()}

    @torch.no_grad()
    def predict(self, embeddings: Tensor) -> Tensor:
        """The class with the highest logit, for each embedding."""
        with torch.autocast(embeddings.device.type, enabled=False):
            predicted: Tensor = self.classifier(in_full_precision(embeddings)).argmax(dim=1)
        return predicted
