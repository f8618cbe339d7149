"""The class anchor margin loss: an attractor to class anchors that repel each other and leave the origin."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kedge.errors import ConfigError
from kedge.losses.anchors import AnchorStart, start_anchors
from kedge.losses.base import RetrievalLoss, check_labels, check_number, check_switch, in_full_precision

__all__ = ["CAMLoss", "attractor", "minimum_norm", "repeller"]


def attractor(embeddings: Tensor, labels: Tensor, anchors: Tensor) -> Tensor:
    """½‖e − c_y‖², mean over the batch: the only part that reaches the encoder."""
    return 0.5 * (embeddings - anchors[labels]).square().sum(dim=1).mean()


def repeller(anchors: Tensor, margin: float) -> Tensor:
    """½ Σ max(0, 2·margin − ‖c_y − c_y'‖)² over unordered pairs of anchors."""
    value: Tensor = _Repeller.apply(anchors, margin)[0]
    return value


def minimum_norm(anchors: Tensor, min_norm: float) -> Tensor:
    """½ Σ max(0, min_norm − ‖c_y‖)² over the anchors."""
    # At the origin (or so near that the norm vanishes) the derivative is 0/0: such an anchor is pushed along a
    # direction of its own.
    at_origin = anchors.detach().norm(dim=1, keepdim=True) == 0
    nudge = _own_directions(anchors) * torch.finfo(anchors.dtype).tiny ** 0.25
    norms = torch.where(at_origin, anchors + nudge, anchors).norm(dim=1)
    value: Tensor = 0.5 * (min_norm - norms).clamp(min=0).square().sum()
    return value


class CAMLoss(RetrievalLoss):
    """Attractor, repeller and minimum norm over learnable class anchors.

    L = mean ½‖e − c_y‖² + ½ Σ max(0, 2m − ‖c_y − c_y'‖)² + ½ Σ max(0, p − ‖c_y‖)²

    `anchors` (num_classes × dim) is a parameter: give `loss.parameters()` to the optimiser, without weight decay.
    Computed in at least float32, whatever the autocast dtype.

    >>> loss = CAMLoss(num_classes=3, dim=4)
    >>> embeddings = loss.anchors.detach().clone()
    >>> round(loss(embeddings, torch.tensor([0, 1, 2])).item(), 6)
    0.0
    >>> loss.predict(embeddings).tolist()
    [0, 1, 2]
    """

    name: ClassVar[str] = "cam"
    heads: ClassVar[tuple[str, ...]] = ("bounded", "linear", "none")

    def __init__(
        self,
        num_classes: int,
        dim: int,
        margin: float = 2.0,
        min_norm: float = 1.0,
        init: AnchorStart = "base",
        repel: bool = True,
        keep_norm: bool = True,
    ) -> None:
        super().__init__()
        check_number("margin", margin, above=True)
        check_number("min_norm", min_norm)
        check_switch("repel", repel)
        check_switch("keep_norm", keep_norm)
        self.margin = margin
        self.min_norm = min_norm
        self.repel = repel
        self.keep_norm = keep_norm
        self.anchors = nn.Parameter(start_anchors(num_classes, dim, margin=margin, min_norm=min_norm, init=init))

    def components(self, embeddings: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """`attractor`, `repeller` and `minimum_norm`; a part that is switched off is zero."""
        num_classes, dim = self.anchors.shape
        if embeddings.ndim != 2 or embeddings.shape[1] != dim:
            raise ConfigError(f"embeddings must be batch × {dim}, found {' × '.join(map(str, embeddings.shape))}.")
        check_labels(labels, num_classes)
        with torch.autocast(embeddings.device.type, enabled=False):
            embeddings, anchors = in_full_precision(embeddings), in_full_precision(self.anchors)
            zero = anchors.new_zeros(())
            return {
                "attractor": attractor(embeddings, labels, anchors),
                "repeller": repeller(anchors, self.margin) if self.repel else zero,
                "minimum_norm": minimum_norm(anchors, self.min_norm) if self.keep_norm else zero,
            }

    @torch.no_grad()
    def predict(self, embeddings: Tensor) -> Tensor:
        """The class of the nearest anchor, for each embedding."""
        with torch.autocast(embeddings.device.type, enabled=False):
            return torch.cdist(in_full_precision(embeddings), in_full_precision(self.anchors)).argmin(dim=1)

    def extra_repr(self) -> str:
        """The settings, for printing."""
        num_classes, dim = self.anchors.shape
        switches = f"repel={self.repel}, keep_norm={self.keep_norm}"
        return f"num_classes={num_classes}, dim={dim}, margin={self.margin}, min_norm={self.min_norm}, {switches}"


class _Repeller(torch.autograd.Function):
    """The repeller with its closed-form gradient: no pairs × dim differences are ever held."""

    @staticmethod
    def forward(anchors: Tensor, margin: float) -> tuple[Tensor, Tensor]:
        # By differences, not by a matrix product: coinciding anchors must come out at exactly zero.
        distances = torch.cdist(anchors, anchors, compute_mode="donot_use_mm_for_euclid_dist")
        # The diagonal holds each anchor's distance to itself, which is no pair.
        shortfall = (2 * margin - distances).clamp(min=0).fill_diagonal_(0)
        return 0.25 * shortfall.square().sum(), distances

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: tuple[Tensor, Tensor]) -> None:
        anchors, ctx.margin = inputs
        ctx.save_for_backward(anchors, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        given, distances = ctx.saved_tensors
        # The difference of two near anchors, as a difference of sums, would lose its digits in float32.
        wide = given.dtype if given.device.type == "mps" else torch.float64
        anchors, distances = given.to(wide), distances.to(wide)
        shortfall = (2 * ctx.margin - distances).clamp(min=0).fill_diagonal_(0)
        together = (distances == 0).to(anchors.dtype).fill_diagonal_(0)
        weights = torch.where(distances > 0, shortfall / distances, 0.0)
        # ∂/∂c_y = −Σ (2m − d)/d · (c_y − c_y'); where d = 0, the pair parts along its own directions instead.
        parting = _own_directions(anchors)
        push = weights.sum(1, keepdim=True) * anchors - weights @ anchors
        push = push + 2 * ctx.margin * (together.sum(1, keepdim=True) * parting - together @ parting) / math.sqrt(2)
        return (-gradients[0] * push).to(given.dtype), None


def _own_directions(anchors: Tensor) -> Tensor:
    """A fixed unit direction for every class, no two alike."""
    num_classes, dim = anchors.shape
    classes = torch.arange(num_classes, device=anchors.device, dtype=anchors.dtype) + 1
    axes = torch.arange(dim, device=anchors.device, dtype=anchors.dtype) + 1
    # Irrational steps never meet again, so the directions of any two classes differ in any dimension.
    waves = torch.cos(torch.outer(classes, axes.sqrt()) + axes) + (1 / (1 + classes)).unsqueeze(1)
    return nn.functional.normalize(waves, dim=1) if dim > 1 else waves
