"""The class anchor margin loss: an attractor to class anchors that repel each other and leave the origin."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge.errors import ConfigError
from kedge.losses.anchors import AnchorInit, init_anchors
from kedge.losses.base import (
    RetrievalLoss,
    check_count,
    check_labels,
    check_number,
    check_switch,
    in_full_precision,
)
from kedge.losses.custom_grad import class_directions, with_gradient
from kedge.losses.posterior import by_rows, posterior_mean
from kedge.losses.repeller import repeller

__all__ = ["CAMLoss", "attractor", "minimum_norm", "mixed_attractor", "nearest", "repeller"]

_CLASSES_AT_ONE, _MOST = 10, 4.0
"""The classifier learns at cross-entropy's own rate up to so many classes, and so many times that with more of them."""
_POINTS, _ANCHORS = 2048, 16384
"""So many by so many distances are held at a time."""
_DENSE = 4096
"""Up to so many classes, a product over all of them replaces a lookup that would wait for, or be random on, a GPU."""


def attractor(embeddings: Tensor, labels: Tensor, anchors: Tensor) -> Tensor:
    """½‖e − c_y‖², mean over the batch: the only part that reaches the encoder."""
    return nn.functional.mse_loss(embeddings, gather_anchors(labels, anchors), reduction="sum") / (2 * len(labels))


def mixed_attractor(embeddings: Tensor, labels: Tensor, others: Tensor, weights: Tensor, anchors: Tensor) -> Tensor:
    """½(w‖e − c_y‖² + (1 − w)‖e − c_o‖²), mean over the batch: a mixed image is attracted to both, by their shares."""
    own, other = ((embeddings - gather_anchors(classes, anchors)).square().sum(dim=1) for classes in (labels, others))
    return torch.lerp(other, own, weights.to(own.dtype)).mean() / 2


def gather_anchors(labels: Tensor, anchors: Tensor) -> Tensor:
    """The anchor of each label."""
    if anchors.device.type == "cpu" or not use_dense(anchors):
        # Not anchors[labels]: the backward of a lookup is one kernel, that of indexing a sort.
        return nn.functional.embedding(labels.long(), anchors)
    return deterministic_gather(labels, anchors)


def use_dense(anchors: Tensor) -> bool:
    """Whether to compute with all anchors rather than look first which ones matter."""
    return len(anchors) <= _DENSE


def deterministic_gather(labels: Tensor, anchors: Tensor) -> Tensor:
    """A lookup as a product: on a GPU, the backward of a lookup adds up in another order each time."""
    classes = torch.arange(len(anchors), device=anchors.device)
    return (labels.unsqueeze(1) == classes).to(anchors.dtype) @ anchors


def _log_loss(logits: Tensor, labels: Tensor, others: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
    """−log softmax at the label, mean over the batch; of a mixed image that of both its labels, by their shares."""
    if others is None or weights is None:
        return F.cross_entropy(logits, labels.long())
    own, other = (F.cross_entropy(logits, one.long(), reduction="none") for one in (labels, others))
    return torch.lerp(other, own, weights.to(own.dtype)).mean()


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
        if use_dense(points):
            points = torch.where(at_origin, class_directions(points).to(points.dtype), points)
        elif len(there := at_origin[:, 0].nonzero()[:, 0]):
            points = points.index_put((there,), class_directions(points, there).to(points.dtype))
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

    With `discriminate=λ` (off in the paper) a linear classifier reads the encoder's output f, p = softmax(W f + b), and

    e = Σ_j p_j c_j        is the embedding: the expected anchor, a point in the anchors' convex hull (`embed`);
    λ · mean −log p_y      is added to the loss, the other half of class anchor clustering (Miller et al. 2021).

    The attractor's gradient fades with p_y, the log loss's does not: see `docs/explanation/loss.md`. The anchors are
    moved by the paper's three parts alone. `normalize` says that a model should divide embeddings by their length.

    With `learn_anchors=False` they stay where `init` puts them, and the parts that only move them are left out.

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
    uses_other_samples: ClassVar[bool] = False

    def __init__(
        self,
        num_classes: int,
        dim: int,
        margin: float = 2.0,
        min_norm: float = 1.0,
        init: AnchorInit = "base",
        repel: bool = True,
        keep_norm: bool = True,
        repel_sample: int | None = None,
        discriminate: float = 0.0,
        normalize: bool = False,
        learn_anchors: bool = True,
    ) -> None:
        super().__init__()
        check_number("margin", margin, above=True)
        check_number("min_norm", min_norm)
        check_switch("repel", repel)
        check_switch("keep_norm", keep_norm)
        check_number("discriminate", discriminate)
        check_switch("normalize", normalize)
        check_switch("learn_anchors", learn_anchors)
        if repel_sample is not None:
            check_count("repel_sample", repel_sample, otherwise="null for all anchors")
        self.margin = margin
        self.min_norm = min_norm
        self.repel = repel
        self.keep_norm = keep_norm
        self.repel_sample = repel_sample
        self.discriminate = discriminate
        self.normalize = normalize
        self.classifier = nn.Linear(dim, num_classes) if discriminate else None
        if self.classifier is not None:
            nn.init.zeros_(self.classifier.weight)
            nn.init.zeros_(self.classifier.bias)
        anchors = init_anchors(num_classes, dim, margin=margin, min_norm=min_norm, init=init)
        self.anchors = nn.Parameter(anchors, requires_grad=learn_anchors)

    @classmethod
    def heads_for(cls, make: Callable[..., RetrievalLoss]) -> tuple[str, ...]:
        """A classifier reads the features themselves; without one, the embedding comes from a bounded linear layer."""
        small = make(num_classes=2, dim=2)
        # Not "bounded": that layer starts at zero as the classifier does, and neither would give the other a gradient.
        reads_features = isinstance(small, CAMLoss) and small.classifier is not None
        return ("none", "batchnorm", "linear") if reads_features else cls.heads

    @property
    def lr_mult(self) -> float:
        """With `discriminate=λ`, c/λ: the classifier, whose loss counts λ times, learns c times as fast as another.

        The curvature of a log loss in its classifier's weights is E[p(1 − p) f fᵀ], which falls with the number of
        classes t as 1/t: what is stable among a hundred is four times too fast among ten. So c is 1 up to ten classes
        and 4 from forty on; but the anchors, which have the same rate, never learn faster than the encoder.
        """
        if self.classifier is None:
            return 1.0
        return min(1.0, min(_MOST, max(1.0, len(self.anchors) / _CLASSES_AT_ONE)) / self.discriminate)

    @property
    def encoder_scale(self) -> float:
        """With `discriminate=λ`, 1/(1 + λ): the encoder sees a mean of attractor and log loss, whatever λ is."""
        return 1 / (1 + self.discriminate)

    @property
    def compiles(self) -> bool:
        """With few anchors, and all of them compared."""
        return use_dense(self.anchors) and self.repel_sample is None

    def components(self, embeddings: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """`attractor`, `repeller` and `minimum_norm`, zero where switched off; with it, `discriminate`."""
        return self._parts(embeddings, labels)

    def mixed_components(
        self, embeddings: Tensor, labels: Tensor, others: Tensor, weights: Tensor
    ) -> dict[str, Tensor]:
        """The same with a mixed image attracted to, and taken for, both its classes, by their shares."""
        return self._parts(embeddings, labels, others, weights)

    def embed(self, outputs: Tensor) -> Tensor:
        """The embeddings of the encoder's outputs: the same or, with `discriminate`, the expected anchors."""
        if self.classifier is None:
            return outputs
        with torch.autocast(outputs.device.type, enabled=False):
            weight, bias = self.classifier.weight, self.classifier.bias
            return posterior_mean(in_full_precision(outputs), weight, bias, self.anchors)

    def _parts(self, embeddings: Tensor, labels: Tensor, *mixed: Tensor) -> dict[str, Tensor]:
        num_classes, dim = self.anchors.shape
        if embeddings.ndim != 2 or embeddings.shape[1] != dim:
            raise ConfigError(f"embeddings must be batch × {dim}, found {' × '.join(map(str, embeddings.shape))}.")
        check_labels(labels, num_classes)
        with torch.autocast(embeddings.device.type, enabled=False):
            embeddings, anchors = in_full_precision(embeddings), in_full_precision(self.anchors)
            learned, off = self.anchors.requires_grad, anchors.new_zeros
            return {
                **self._attract(embeddings, labels, mixed, anchors),
                "repeller": repeller(anchors, self.margin, self.repel_sample) if self.repel and learned else off(()),
                "minimum_norm": minimum_norm(anchors, self.min_norm) if self.keep_norm and learned else off(()),
            }

    def _attract(
        self, outputs: Tensor, labels: Tensor, mixed: tuple[Tensor, ...], anchors: Tensor
    ) -> dict[str, Tensor]:
        """The parts that reach the encoder."""
        attract: Callable[..., Tensor] = mixed_attractor if mixed else attractor
        classifier = self.classifier
        if classifier is None:
            return {"attractor": attract(outputs, labels, *mixed, anchors)}

        def summed(points: Tensor, *labelled: Tensor) -> Tensor:
            logits = classifier(points)
            expected = logits.softmax(dim=1) @ anchors.detach()
            return torch.stack([attract(expected, *labelled, anchors), _log_loss(logits, *labelled)]) * len(points)

        pulled, told = by_rows(summed, (outputs, labels, *mixed), len(anchors)).unbind()
        return {"attractor": pulled / len(labels), "discriminate": told * (self.discriminate / len(labels))}

    @torch.no_grad()
    def predict(self, embeddings: Tensor) -> Tensor:
        """The class of the nearest anchor, for each embedding (of `embed`); with `normalize`, both of length 1."""
        with torch.autocast(embeddings.device.type, enabled=False):
            points, anchors = in_full_precision(embeddings), in_full_precision(self.anchors)
            if self.normalize:
                points, anchors = F.normalize(points, dim=1), F.normalize(anchors, dim=1)
            return nearest(points, anchors)

    def extra_repr(self) -> str:
        """The settings, for printing."""
        num_classes, dim = self.anchors.shape
        switches = f"repel={self.repel}, keep_norm={self.keep_norm}, repel_sample={self.repel_sample}"
        beyond = f"discriminate={self.discriminate:g}, normalize={self.normalize}"
        sizes = f"num_classes={num_classes}, dim={dim}, margin={self.margin}, min_norm={self.min_norm}"
        return f"{sizes}, {switches}, {beyond}, learn_anchors={self.anchors.requires_grad}"
