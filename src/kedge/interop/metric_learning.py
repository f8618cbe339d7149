"""CAMLoss as a loss of pytorch-metric-learning: for its miners, reducers and trainers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kedge.deps import missing_extra
from kedge.errors import ConfigError
from kedge.losses import CAMLoss as _CAMLoss
from kedge.losses.anchors import AnchorInit
from kedge.losses.base import in_full_precision

try:
    from pytorch_metric_learning import losses
    from pytorch_metric_learning.distances import LpDistance
    from pytorch_metric_learning.utils import common_functions as c_f
    from pytorch_metric_learning.utils import loss_and_miner_utils as lmu
except ImportError as _error:
    raise missing_extra("pytorch-metric-learning", extra="league", purpose="kedge.interop.metric_learning") from _error

__all__ = ["CAMLoss", "CrossBatchMemory"]


class CAMLoss(losses.BaseMetricLossFunction):  # type: ignore[misc]
    """`kedge.CAMLoss` as pytorch-metric-learning calls a loss: the same value, the same gradients.

    Its parts go to the reducer as `attractor` (one loss per embedding, weighted by how often a miner chose it, as the
    library's other losses with one proxy per class do), `repeller` and `minimum_norm`. Embeddings are compared as they
    are: a distance that normalises them is refused. `anchors` is a parameter, which wants an optimiser of its own
    (`metric_loss_optimizer` in the library's trainers).

    References (`ref_emb`, `ref_labels`), such as those of `CrossBatchMemory`, attract the anchors of their classes, as
    a further part; the batch itself does what it does without them.

    >>> loss = CAMLoss(num_classes=3, embedding_size=4)
    >>> round(loss(2 * loss.anchors.detach(), torch.tensor([0, 1, 2])).item(), 4)
    4.0
    """

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        margin: float = 2.0,
        min_norm: float = 1.0,
        init: AnchorInit = "base",
        repel: bool = True,
        keep_norm: bool = True,
        repel_sample: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        distance = self.distance
        if not isinstance(distance, LpDistance) or distance.normalize_embeddings or distance.p != 2:
            raise ConfigError("distance must be LpDistance(normalize_embeddings=False, p=2): anchors have lengths.")
        self.cam = _CAMLoss(num_classes, embedding_size, margin, min_norm, init, repel, keep_norm, repel_sample)
        self.num_classes, self.embedding_size = num_classes, embedding_size
        self.margin, self.min_norm = margin, min_norm
        names = ["num_classes", "embedding_size", "margin", "min_norm"]
        self.add_to_recordable_attributes(list_of_names=names, is_stat=False)

    @property
    def anchors(self) -> nn.Parameter:
        """One row per class."""
        return self.cam.anchors

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: tuple[Tensor, ...] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Any:
        """The loss, in at least float32, whatever the autocast dtype."""
        self.cam.anchors.data = c_f.to_device(self.cam.anchors.data, device=embeddings.device)
        with torch.autocast(embeddings.device.type, enabled=False):
            return super().forward(in_full_precision(embeddings), labels, indices_tuple, ref_emb, ref_labels)

    def compute_loss(
        self,
        embeddings: Tensor,
        labels: Tensor | None,
        indices_tuple: tuple[Tensor, ...] | None,
        ref_emb: Tensor,
        ref_labels: Tensor | None,
    ) -> dict[str, dict[str, Any]]:
        """The parts, before the reducer."""
        if labels is None or ref_labels is None:
            raise ConfigError("labels are required: an embedding is attracted to the anchor of its class.")
        has_references = ref_emb is not embeddings
        parts = self.cam.components(embeddings, labels)
        weights = lmu.convert_to_weights(indices_tuple, labels, dtype=embeddings.dtype, using_ref=has_references)
        difference = embeddings - nn.functional.embedding(labels.long(), in_full_precision(self.anchors))
        per_sample = difference.square().sum(dim=1) / 2 * weights
        rows = c_f.torch_arange_from_size(embeddings)
        components = {"attractor": {"losses": per_sample, "indices": rows, "reduction_type": "element"}}
        reduced = {name: parts[name] for name in ("repeller", "minimum_norm")}
        if has_references:
            reduced["references"] = self.cam.components(in_full_precision(ref_emb), ref_labels)["attractor"]
        for name, value in reduced.items():
            components[name] = {"losses": value, "indices": None, "reduction_type": "already_reduced"}
        return components

    def _sub_loss_names(self) -> list[str]:
        return ["attractor", "repeller", "minimum_norm"]

    def get_default_distance(self) -> Any:
        """Between points as they are."""
        return LpDistance(normalize_embeddings=False, p=2)

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """−½‖e − c‖² for each class, as the attractor sees it."""
        return torch.cdist(in_full_precision(embeddings), in_full_precision(self.anchors)).square() / -2

    def predict(self, embeddings: Tensor) -> Tensor:
        """The class of the nearest anchor, for each embedding."""
        return self.cam.predict(embeddings)


class CrossBatchMemory(losses.CrossBatchMemory):  # type: ignore[misc]
    """The library's memory of past embeddings, which also takes `CAMLoss`.

    With it, an anchor follows the last `memory_size` embeddings and not only the batch, where most of many classes
    are missing. A memory for pairs beside anchors needs none of this: put the library's own into `MultipleLosses`.
    """

    @staticmethod
    def supported_losses() -> list[str]:
        """Those of the library, and this one."""
        return [*losses.CrossBatchMemory.supported_losses(), CAMLoss.__name__]
