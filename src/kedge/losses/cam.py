"""The class anchor margin loss: an attractor to class anchors that repel each other and leave the origin."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kedge.errors import ConfigError
from kedge.losses.anchors import AnchorInit, init_anchors
from kedge.losses.base import RetrievalLoss, check_count, check_labels, check_number, check_switch, in_full_precision
from kedge.losses.repeller import minimum_norm, repeller

__all__ = ["CAMLoss", "attractor", "log_loss", "minimum_norm", "nearest", "posterior_mean", "repeller"]

_POINTS, _DISTANCES = 2048, 2048 * 16384
"""Block sizes of `nearest`: points per block, and point-anchor distances per block."""
_DENSE = 4096
"""Up to so many classes, a product over all of them replaces a lookup that would be random on a GPU."""
_ENTRIES = 2**24
"""Of a matrix of outputs × classes, so many are held at a time (64 MiB in float32)."""


def attractor(
    embeddings: Tensor, labels: Tensor, anchors: Tensor, others: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """½‖e − c_y‖², mean over the batch: the only part that reaches the encoder.

    A mixed image is attracted to both its classes, by their shares: ½(w‖e − c_y‖² + (1 − w)‖e − c_o‖²).
    """
    if others is None or weights is None:
        return F.mse_loss(embeddings, gather_anchors(labels, anchors), reduction="sum") / (2 * len(labels))
    own, other = ((embeddings - gather_anchors(classes, anchors)).square().sum(dim=1) for classes in (labels, others))
    return torch.lerp(other, own, weights.to(own.dtype)).mean() / 2


def log_loss(
    logits: Tensor,
    labels: Tensor,
    others: Tensor | None = None,
    weights: Tensor | None = None,
    *,
    smoothing: float = 0.0,
) -> Tensor:
    """−log softmax at the label, mean over the batch; of a mixed image that of both its labels, by their shares."""
    if others is None or weights is None:
        return F.cross_entropy(logits, labels.long(), label_smoothing=smoothing)
    own, other = (
        F.cross_entropy(logits, classes.long(), label_smoothing=smoothing, reduction="none")
        for classes in (labels, others)
    )
    return torch.lerp(other, own, weights.to(own.dtype)).mean()


def gather_anchors(labels: Tensor, anchors: Tensor) -> Tensor:
    """The anchor of each label."""
    if anchors.device.type == "cpu" or len(anchors) > _DENSE:
        # Not anchors[labels]: the backward of a lookup is one kernel, that of indexing a sort.
        return F.embedding(labels.long(), anchors)
    return deterministic_gather(labels, anchors)


def deterministic_gather(labels: Tensor, anchors: Tensor) -> Tensor:
    """A lookup as a product: on a GPU, the backward of a lookup adds up in another order each time."""
    classes = torch.arange(len(anchors), device=anchors.device)
    return (labels.unsqueeze(1) == classes).to(anchors.dtype) @ anchors


def nearest(points: Tensor, anchors: Tensor) -> Tensor:
    """The number of the anchor nearest to each point, of several the first, in bounded memory."""
    rows = max(1, min(_POINTS, _DISTANCES // len(anchors)))
    return torch.cat([torch.cdist(block, anchors).argmin(dim=1) for block in torch.split(points, rows)])


def posterior_mean(outputs: Tensor, weight: Tensor, bias: Tensor, anchors: Tensor) -> Tensor:
    """Σ_j p_j c_j with p = softmax(W f + b): the expected anchor, in bounded memory without gradients.

    >>> posterior_mean(torch.zeros(1, 2), torch.eye(2), torch.zeros(2), torch.tensor([[1.0, 0.0], [0.0, 1.0]])).tolist()
    [[0.5, 0.5]]
    """
    rows = max(1, _ENTRIES // len(anchors))
    parts = torch.split(outputs, rows) if len(outputs) > rows else (outputs,)
    means = [F.linear(part, weight, bias).softmax(dim=1) @ anchors for part in parts]
    return torch.cat(means) if len(means) > 1 else means[0]


def _by_rows(function: Callable[..., Tensor], rows: tuple[Tensor, ...], classes: int) -> Tensor:
    """The sum of `function(*block)` over blocks of rows, each computed again for its gradients.

    So that a matrix of rows × classes never exists as a whole; where it is small enough, `function` is called once.
    """
    at_once = max(1, _ENTRIES // classes)
    if len(rows[0]) <= at_once:
        return function(*rows)
    blocks = zip(*(torch.split(part, at_once) for part in rows), strict=True)
    return torch.stack([checkpoint(function, *block, use_reentrant=False) for block in blocks]).sum(dim=0)


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
    heads = ("bounded", "linear", "none")
    probe: ClassVar[dict[str, int] | None] = {"num_classes": 2, "dim": 2}
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
        check_number("discriminate", discriminate)
        switches = {"repel": repel, "keep_norm": keep_norm, "normalize": normalize, "learn_anchors": learn_anchors}
        for name, value in switches.items():
            check_switch(name, value)
        if repel_sample is not None:
            check_count("repel_sample", repel_sample, otherwise="null for all anchors")
        self.margin, self.min_norm, self.discriminate, self.normalize = margin, min_norm, discriminate, normalize
        self.repel, self.keep_norm, self.repel_sample = repel, keep_norm, repel_sample
        self.classifier = nn.Linear(dim, num_classes) if discriminate else None
        if self.classifier is not None:
            nn.init.zeros_(self.classifier.weight)
            nn.init.zeros_(self.classifier.bias)
        anchors = init_anchors(num_classes, dim, margin=margin, min_norm=min_norm, init=init)
        self.anchors = nn.Parameter(anchors, requires_grad=learn_anchors)
        self.compiles = num_classes <= _DENSE and repel_sample is None
        # The encoder sees a mean of attractor and log loss, whatever λ is.
        self.encoder_scale = 1 / (1 + discriminate)
        if discriminate:
            # The classifier reads the features themselves. Not "bounded": that layer starts at zero as the classifier
            # does, and neither would give the other a gradient.
            self.heads = ("none", "batchnorm", "linear")
            # The classifier, whose loss counts λ times, learns as fast as that of cross-entropy. The anchors have the
            # same rate, and never learn faster than the encoder.
            self.lr_mult = min(1.0, 1 / discriminate)

    def components(self, embeddings: Tensor, labels: Tensor, *mixed: Tensor) -> dict[str, Tensor]:
        """`attractor`, `repeller` and `minimum_norm`, zero where switched off; with it, `discriminate`."""
        num_classes, dim = self.anchors.shape
        if embeddings.ndim != 2 or embeddings.shape[1] != dim:
            raise ConfigError(f"embeddings must be batch × {dim}, found {' × '.join(map(str, embeddings.shape))}.")
        check_labels(labels, num_classes)
        with torch.autocast(embeddings.device.type, enabled=False):
            embeddings, anchors = in_full_precision(embeddings), in_full_precision(self.anchors)
            learned, off = self.anchors.requires_grad, anchors.new_zeros
            return {
                **self._attract(embeddings, anchors, labels, *mixed),
                "repeller": repeller(anchors, self.margin, self.repel_sample) if self.repel and learned else off(()),
                "minimum_norm": minimum_norm(anchors, self.min_norm) if self.keep_norm and learned else off(()),
            }

    def mixed_components(
        self, embeddings: Tensor, labels: Tensor, others: Tensor, weights: Tensor
    ) -> dict[str, Tensor]:
        """The same with a mixed image attracted to, and taken for, both its classes, by their shares."""
        return self.components(embeddings, labels, others, weights)

    def _attract(self, outputs: Tensor, anchors: Tensor, labels: Tensor, *mixed: Tensor) -> dict[str, Tensor]:
        """The parts that reach the encoder."""
        classifier = self.classifier
        if classifier is None:
            return {"attractor": attractor(outputs, labels, anchors, *mixed)}

        def summed(points: Tensor, labels: Tensor, *mixed: Tensor) -> Tensor:
            logits = classifier(points)
            expected = logits.softmax(dim=1) @ anchors.detach()
            parts = attractor(expected, labels, anchors, *mixed), log_loss(logits, labels, *mixed)
            return torch.stack(parts) * len(points)

        pull, log = _by_rows(summed, (outputs, labels, *mixed), len(anchors)).unbind()
        return {"attractor": pull / len(labels), "discriminate": log * (self.discriminate / len(labels))}

    def embed(self, outputs: Tensor) -> Tensor:
        """The embeddings of the encoder's outputs: the same or, with `discriminate`, the expected anchors."""
        if self.classifier is None:
            return outputs
        with torch.autocast(outputs.device.type, enabled=False):
            weight, bias = self.classifier.weight, self.classifier.bias
            return posterior_mean(in_full_precision(outputs), weight, bias, self.anchors)

    @torch.no_grad()
    def predict(self, embeddings: Tensor) -> Tensor:
        """The class of the nearest anchor, for each embedding (of `embed`); with `normalize`, both of length 1."""
        with torch.autocast(embeddings.device.type, enabled=False):
            points, anchors = in_full_precision(embeddings), in_full_precision(self.anchors)
            if self.normalize:
                points, anchors = F.normalize(points, dim=1), F.normalize(anchors, dim=1)
            return nearest(points, anchors)
