"""From which distance on an image is unknown: a threshold calibrated on held-out images."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kedge.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["NEIGHBOURS", "SHARES", "Calibration", "familiarity", "familiarity_with"]

NEIGHBOURS = 3
"""Images of a class whose looks tell whether a query is one of it."""
SHARES = 32
"""So many nearest anchors share what is certain about a query."""
_CERTAINTY_WEIGHT, _MIN_COSINE = 0.1, 1e-4
_BLOCK = 1024
"""Queries that are compared with all training images at a time."""


def familiarity(own: np.ndarray, nearest: np.ndarray, cosines: np.ndarray) -> np.ndarray:
    """How much queries look like what was trained on: the higher, the more surely they are known.

    The cosine of their features to the `nearest` image of all and the mean cosine to the nearest ones of their
    predicted class, `own`, in the mean; and a tenth of log p, where p is the share of the largest of the `cosines` of
    their embedding with the nearest anchors (queries x anchors) in all of these: the highest posterior, where an
    embedding is the expected anchor. Chosen on held-out photos of three datasets, of many classes and of twelve.
    """
    shares = np.maximum(cosines, _MIN_COSINE)
    certainty = np.log(shares.max(axis=1) / shares.sum(axis=1))
    return np.asarray((own + nearest) / 2 + _CERTAINTY_WEIGHT * certainty)


def familiarity_with(
    gallery: Tensor, labels: Tensor, features: Tensor, embeddings: Tensor, anchors: Tensor
) -> np.ndarray:
    """The `familiarity` of queries, by their features and embeddings, with the features of labelled training images."""
    import torch  # a gallery's table is read without it
    from torch.nn.functional import normalize

    # A frozen encoder's features are kept on the host, where the head is on the GPU.
    classes = torch.cdist(embeddings, anchors).argmin(dim=1).to(features.device)
    queries, gallery = normalize(features, dim=1), normalize(gallery, dim=1)
    own = torch.zeros(len(queries))
    nearest = torch.cat([(part @ gallery.T).amax(dim=1).cpu() for part in torch.split(queries, _BLOCK)])
    for label in set(classes.tolist()):
        asking, images = classes == label, gallery[labels == label]
        if count := min(NEIGHBOURS, len(images)):
            own[asking.cpu()] = (queries[asking] @ images.T).topk(count, dim=1).values.mean(1).cpu()
    cosines = (normalize(embeddings, dim=1) @ normalize(anchors, dim=1).T).topk(min(SHARES, len(anchors)), dim=1).values
    return familiarity(own.numpy(), nearest.numpy(), cosines.cpu().numpy())


@dataclass(frozen=True)
class Calibration:
    """Images farther than `threshold` from the nearest one that is known are unknown.

    A gallery's threshold is the Euclidean distance of an embedding to its nearest anchor; a model's is minus the
    `familiarity` of an image with the training images.
    """

    threshold: float
    accept: float
    """The share of images like the held-out ones that count as known."""
    items: int
    """Held-out images that it was calibrated on."""
    familiarity: float | None = None
    """In a gallery with features, queries of a smaller familiarity are unknown."""

    @classmethod
    def from_distances(cls, distances: np.ndarray, accept: float) -> Calibration:
        """The smallest threshold that accepts a share `accept` of items like these, which were not trained on.

        The rank is raised by one item (split conformal prediction), so that the share holds for items to come and
        not only for the ones at hand.
        """
        if not 0 < accept < 1:
            raise ConfigError(f"accept must lie between 0 and 1, found {accept}.")
        count = len(distances)
        rank = math.ceil((count + 1) * accept)
        if rank > count:
            needed = math.ceil(accept / (1 - accept))
            raise ConfigError(f"To accept {accept:g} of the items, at least {needed} are needed, found {count}.")
        return cls(float(np.sort(distances)[rank - 1]), accept, count)

    def with_familiarity(self, values: np.ndarray) -> Calibration:
        """The same with the largest familiarity that accepts that share of items with these."""
        return replace(self, familiarity=-self.from_distances(-values, self.accept).threshold)

    def to_json(self) -> dict[str, float]:
        """Its values; without a familiarity, those that earlier releases read."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, values: Any) -> Calibration | None:
        """The calibration that `to_json` made plain; None where there is none."""
        if values is None:
            return None
        calibration = cls(float(values["threshold"]), float(values["accept"]), int(values["items"]))
        if not math.isfinite(calibration.threshold):
            raise ValueError(f"the calibration's threshold is {calibration.threshold}")
        return calibration
