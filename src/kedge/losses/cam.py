"""The class anchor margin loss: an attractor to class anchors that repel each other and leave the origin."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from kedge.errors import ConfigError
from kedge.losses.anchors import AnchorStart, start_anchors
from kedge.losses.base import (
    RetrievalLoss,
    check_count,
    check_labels,
    check_number,
    check_switch,
    in_full_precision,
)
from kedge.losses.known import own_directions, with_gradient
from kedge.losses.repeller import few, repeller

__all__ = ["CAMLoss", "attractor", "minimum_norm", "mixed_attractor", "nearest", "repeller"]

_POINTS, _ANCHORS = 2048, 16384
"""So many by so many distances are held at a time."""


def attractor(embeddings: Tensor, labels: Tensor, anchors: Tensor) -> Tensor:
    """½‖e − c_y‖², mean over the batch: the only part that reaches the encoder."""
    return nn.functional.mse_loss(embeddings, _of(labels, anchors), reduction="sum") / (2 * len(labels))


def mixed_attractor(embeddings: Tensor, labels: Tensor, others: Tensor, weights: Tensor, anchors: Tensor) -> Tensor:
    """½(w‖e − c_y‖² + (1 − w)‖e − c_o‖²), mean over the batch: a mixed image is attracted to both, by their shares."""
    own, other = ((embeddings - _of(one, anchors)).square().sum(dim=1) for one in (labels, others))
    return torch.lerp(other, own, weights.to(own.dtype)).mean() / 2


def _of(labels: Tensor, anchors: Tensor) -> Tensor:
    """The anchor of each label."""
    if anchors.device.type == "cpu" or not few(anchors):
        # Not anchors[labels]: the backward of a lookup is one kernel, that of indexing a sort.
        return nn.functional.embedding(labels.long(), anchors)
    return in_one_order(labels, anchors)


def in_one_order(labels: Tensor, anchors: Tensor) -> Tensor:
    """The same as a product: on a GPU, the backward of a lookup adds up in another order each time."""
    classes = torch.arange(len(anchors), device=anchors.device)
    return (labels.unsqueeze(1) == classes).to(anchors.dtype) @ anchors


def minimum_norm(anchors: Tensor, min_norm: float) -> Tensor:
    """½ Σ max(0, min_norm − ‖c_y‖)² over the anchors."""
    with torch.no_grad():
        points = anchors.detach()
        norms = torch.linalg.vector_norm(points, dim=1, keepdim=True)
        shortfall = (min_norm - norms).clamp_(min=0)
        value = shortfall.square().sum() / 2
        # At the origin (or so near that the norm vanishes) the closed form is 0/0: such an anchor is pushed along a
        # direction of its own. Among few classes, all directions cost less than waiting to hear who is there.
        at_origin = norms == 0
        if few(points):
            points = torch.where(at_origin, own_directions(points).to(points.dtype), points)
        elif len(there := at_origin[:, 0].nonzero()[:, 0]):
            points = points.index_put((there,), own_directions(points, there).to(points.dtype))
        gradient = points * (shortfall / torch.linalg.vector_norm(points, dim=1, keepdim=True)).neg_()
    return with_gradient(anchors, value, gradient)


def nearest(points: Tensor, anchors: Tensor) -> Tensor:
    """The number of the anchor nearest to each point, of several the first, in bounded memory."""
    return torch.cat([_nearest(rows, anchors) for rows in torch.split(points, _POINTS)])


def _nearest(points: Tensor, anchors: Tensor) -> Tensor:
    start, best = 0, None
    for block in torch.split(anchors, _ANCHORS):
        distances, numbers = torch.cdist(points, block).min(dim=1)
        if best is None:
            best, found = distances, numbers
        else:
            found = torch.where(distances < best, numbers + start, found)
            best = torch.minimum(distances, best)
        start += len(block)
    return found


class CAMLoss(RetrievalLoss):
    """Attractor, repeller and minimum norm over learnable class anchors.

    L = mean ½‖e − c_y‖² + ½ Σ max(0, 2m − ‖c_y − c_y'‖)² + ½ Σ max(0, p − ‖c_y‖)²

    With `repel_sample`, the repeller is an unbiased estimate from so many anchors, drawn anew each time, against all:
    for hundreds of thousands of classes.

    `anchors` (num_classes × dim) is a parameter: give `loss.parameters()` to the optimiser, without weight decay.
    Computed in at least float32, whatever the autocast dtype.

    >>> loss = CAMLoss(num_classes=3, dim=4)
    >>> embeddings = loss.anchors.detach().clone()
    >>> round(loss(embeddings, torch.tensor([0, 1, 2])).item(), 6)
    0.0
    >>> loss.predict(embeddings).tolist()
    [0, 1, 2]
    """

    name = "cam"
    heads: ClassVar[tuple[str, ...]] = ("bounded", "linear", "none")
    compares: ClassVar[bool] = False

    def __init__(
        self,
        num_classes: int,
        dim: int,
        margin: float = 2.0,
        min_norm: float = 1.0,
        init: AnchorStart = "base",
        repel: bool = True,
        keep_norm: bool = True,
        repel_sample: int | None = None,
    ) -> None:
        super().__init__()
        check_number("margin", margin, above=True)
        check_number("min_norm", min_norm)
        check_switch("repel", repel)
        check_switch("keep_norm", keep_norm)
        if repel_sample is not None:
            check_count("repel_sample", repel_sample, otherwise="null for all anchors")
        self.margin = margin
        self.min_norm = min_norm
        self.repel = repel
        self.keep_norm = keep_norm
        self.repel_sample = repel_sample
        self.anchors = nn.Parameter(start_anchors(num_classes, dim, margin=margin, min_norm=min_norm, init=init))

    @property
    def compiles(self) -> bool:
        """With few anchors, and all of them compared."""
        return few(self.anchors) and self.repel_sample is None

    def components(self, embeddings: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """`attractor`, `repeller` and `minimum_norm`; a part that is switched off is zero."""
        return self._parts(embeddings, labels, attractor)

    def mixed_components(
        self, embeddings: Tensor, labels: Tensor, others: Tensor, weights: Tensor
    ) -> dict[str, Tensor]:
        """The same with a mixed image attracted to both anchors, by their shares."""

        def attract(points: Tensor, own: Tensor, anchors: Tensor) -> Tensor:
            return mixed_attractor(points, own, others, weights, anchors)

        return self._parts(embeddings, labels, attract)

    def _parts(
        self, embeddings: Tensor, labels: Tensor, attract: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> dict[str, Tensor]:
        num_classes, dim = self.anchors.shape
        if embeddings.ndim != 2 or embeddings.shape[1] != dim:
            raise ConfigError(f"embeddings must be batch × {dim}, found {' × '.join(map(str, embeddings.shape))}.")
        check_labels(labels, num_classes)
        with torch.autocast(embeddings.device.type, enabled=False):
            embeddings, anchors = in_full_precision(embeddings), in_full_precision(self.anchors)
            off = anchors.new_zeros
            return {
                "attractor": attract(embeddings, labels, anchors),
                "repeller": repeller(anchors, self.margin, self.repel_sample) if self.repel else off(()),
                "minimum_norm": minimum_norm(anchors, self.min_norm) if self.keep_norm else off(()),
            }

    @torch.no_grad()
    def predict(self, embeddings: Tensor) -> Tensor:
        """The class of the nearest anchor, for each embedding."""
        with torch.autocast(embeddings.device.type, enabled=False):
            return nearest(in_full_precision(embeddings), in_full_precision(self.anchors))

    def extra_repr(self) -> str:
        """The settings, for printing."""
        num_classes, dim = self.anchors.shape
        switches = f"repel={self.repel}, keep_norm={self.keep_norm}, repel_sample={self.repel_sample}"
        return f"num_classes={num_classes}, dim={dim}, margin={self.margin}, min_norm={self.min_norm}, {switches}"
