"""The gallery in two dimensions: the anchors by t-SNE (PCA where they are too many), items around their anchors.

An item or a query goes to its nearest anchor, or between the two nearest, and from there along the two principal
components of what is left of it. So its place depends on its embedding alone: new items do not move the old ones.
"""

from __future__ import annotations

import numpy as np

__all__ = ["MAX_ANCHORS", "SAMPLE", "Projection"]

MAX_ANCHORS = 2000
"""A map of more cannot be read."""
_TSNE_ANCHORS = 1000
"""The most that t-SNE lays out: what takes some two seconds."""
_TSNE_STEPS = 500
_PERPLEXITY = 10
SAMPLE = 2000
"""Items that say how far, and in which directions, items lie around their anchors."""
_REACH = 0.45
"""How far items get from their anchor at most, as a share of the distance between neighbouring anchors."""
_SHARPNESS = 8
"""Weights fall with this power of the distance: beside a much nearer anchor the other one does not count."""


class Projection:
    """A map from -1 to 1 both ways, fitted on anchors and some embeddings."""

    def __init__(self, anchors: np.ndarray, sample: np.ndarray) -> None:
        from sklearn.neighbors import NearestNeighbors  # takes a second to import, which a server need not wait for

        self._centre = anchors.mean(axis=0, dtype=np.float64)
        self._scale = float(np.abs(anchors - self._centre).max()) or 1.0
        self._points = (anchors - self._centre) / self._scale
        placed = _layout(self._points)
        placed -= (placed.max(axis=0) + placed.min(axis=0)) / 2
        self.anchors = 0.9 * placed / (np.abs(placed).max() or 1.0)
        gaps = NearestNeighbors(n_neighbors=1).fit(self.anchors).kneighbors()[0] if len(anchors) > 1 else np.zeros(1)
        self._reach = _REACH * float(np.median(gaps)) or 0.9
        self._nearest = NearestNeighbors(n_neighbors=min(2, len(anchors)), algorithm="brute").fit(self._points)
        residuals = self._residuals(sample)[1] if len(sample) else self._points
        self._directions = _principal_components(residuals)
        lengths = np.linalg.norm(residuals @ self._directions.T, axis=1)
        self._usual = float(np.median(lengths)) or 1.0

    def place(self, embeddings: np.ndarray) -> np.ndarray:
        """Coordinates of embeddings, one row each."""
        if not len(embeddings):
            return np.zeros((0, 2))
        middles, residuals = self._residuals(embeddings)
        offsets = residuals @ self._directions.T / self._usual
        offsets *= self._reach / (1 + np.linalg.norm(offsets, axis=1, keepdims=True))
        coordinates: np.ndarray = np.clip(middles + offsets, -1, 1)
        return coordinates

    def _residuals(self, embeddings: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """On the map, the weighted mean of the nearest anchors; and how rows differ from the nearest one."""
        rows = (embeddings - self._centre) / self._scale
        distances, near = self._nearest.kneighbors(rows)
        distances = np.maximum(distances, 1e-9)
        weights = (distances[:, :1] / distances) ** _SHARPNESS
        weights /= weights.sum(axis=1, keepdims=True)
        return np.einsum("ij,ijk->ik", weights, self.anchors[near]), rows - self._points[near[:, 0]]


def _layout(points: np.ndarray) -> np.ndarray:
    """The anchors in two dimensions."""
    plane: np.ndarray = points @ _principal_components(points).T
    spread = plane.std(axis=0)[0]
    if not 3 < len(points) <= _TSNE_ANCHORS or spread == 0:
        return plane
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    perplexity = min(_PERPLEXITY, (len(points) - 1) / 3)
    tsne = TSNE(init=1e-4 * plane / spread, perplexity=perplexity, max_iter=_TSNE_STEPS, random_state=0)
    with threadpool_limits(1):  # the other cores are for those who search
        placed: np.ndarray = tsne.fit_transform(points).astype(np.float64)
    return placed


def _principal_components(rows: np.ndarray) -> np.ndarray:
    """The two directions in which rows differ most, 2 × d; zeros where there are fewer."""
    from sklearn.decomposition import PCA

    directions = np.zeros((2, rows.shape[1]))
    if np.ptp(rows, axis=0).any():
        components = PCA(min(2, *rows.shape), random_state=0).fit(rows).components_
        directions[: len(components)] = components
    return directions
