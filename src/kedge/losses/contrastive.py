"""The contrastive loss over pairs of a batch, with three ways to choose them."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from kedge.errors import ConfigError
from kedge.losses.base import RetrievalLoss, check_number, in_full_precision

__all__ = ["ContrastiveLoss", "Mining"]

Mining = Literal["online", "hard", "semi-hard"]


class ContrastiveLoss(RetrievalLoss):
    """½d² for pairs of one class, ½ max(0, margin − d)² for pairs of two, over Euclidean distances d.

    Embeddings are not normalised. Each side is averaged over the pairs that contribute, so that the many
    negatives beyond the margin do not drown the few within. No parameters of its own.

    - `online`: all pairs of the batch.
    - `hard`: for each example, its farthest positive and its nearest negative.
    - `semi-hard`: all positives; for each of them, the nearest negative that is farther than the positive and
      still inside the margin.

    >>> loss = ContrastiveLoss(margin=1.0)
    >>> float(loss(torch.tensor([[0.0], [0.5], [0.75]]), torch.tensor([0, 0, 1])))
    0.28125
    """

    name = "contrastive"
    # Not the bounded head: it starts at zero, where all distances are zero and none has a gradient.
    heads = ("linear", "none")

    def __init__(self, margin: float = 1.0, mining: Mining = "online") -> None:
        super().__init__()
        check_number("margin", margin, above=True)
        if mining not in get_args(Mining):
            raise ConfigError(f"mining must be one of {', '.join(get_args(Mining))}, found {mining!r}.")
        self.margin = margin
        self.mining = mining

    def components(self, embeddings: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """`positive` and `negative`."""
        with torch.autocast(embeddings.device.type, enabled=False):
            embeddings = in_full_precision(embeddings)
            distances = torch.cdist(embeddings, embeddings, compute_mode="donot_use_mm_for_euclid_dist")
            same = labels[:, None] == labels[None, :]
            other = ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
            positive, negative = self._choose(distances.detach(), same & other, ~same)
            return {
                "positive": _mean_of_contributing(0.5 * distances.square(), positive),
                "negative": _mean_of_contributing(0.5 * (self.margin - distances).clamp(min=0).square(), negative),
            }

    def _choose(self, distances: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        """How often each pair counts, for both sides."""
        if self.mining == "online":
            return positive.float(), negative.float()
        if self.mining == "hard":
            return _extreme(distances, positive, farthest=True), _extreme(distances, negative, farthest=False)
        return positive.float(), self._semi_hard(distances, positive, negative)

    def _semi_hard(self, distances: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        order = distances.masked_fill(~negative, math.inf).sort(dim=1)
        place = torch.searchsorted(order.values, distances.contiguous(), right=True).clamp(max=len(distances) - 1)
        found = order.values.gather(1, place)
        usable = positive & (found > distances) & (found < self.margin)
        counts = torch.zeros_like(distances)
        return counts.scatter_add_(1, order.indices.gather(1, place), usable.to(distances.dtype))


def _extreme(distances: Tensor, allowed: Tensor, *, farthest: bool) -> Tensor:
    """One pair per row: the farthest or the nearest of those allowed, if there is any."""
    filled = distances.masked_fill(~allowed, -math.inf if farthest else math.inf)
    chosen = filled.argmax(dim=1) if farthest else filled.argmin(dim=1)
    picked = torch.zeros_like(distances).scatter_(1, chosen[:, None], 1.0)
    return picked * allowed


def _mean_of_contributing(values: Tensor, counts: Tensor) -> Tensor:
    contributing = counts * (values.detach() > 0)
    return (values * contributing).sum() / contributing.sum().clamp(min=1)
