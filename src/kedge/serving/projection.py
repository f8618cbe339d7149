"""The gallery in two dimensions: t-SNE of the anchors and a sample of items, PCA where there are too many anchors.

t-SNE places only the points it was fitted on. Every other item, and every query, goes to the weighted mean of its
nearest fitted points, so that new items do not move the old ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from http import HTTPStatus

import numpy as np

from kedge.gallery.anchors import Anchors
from kedge.serving.catalogue import Catalogue
from kedge.serving.errors import Refused

__all__ = ["MAX_ANCHORS", "Projection", "ProjectionCache"]

MAX_ANCHORS = 10_000
"""A map of more cannot be read."""
_TSNE_POINTS = 1500
"""Anchors and items that t-SNE is fitted on: what takes a few seconds."""
_TSNE_STEPS = 500
_PERPLEXITY = 30
_NEIGHBOURS = 5
_SHARPNESS = 8
"""Weights fall with this power of the distance: beside a much nearer point the others do not count."""


class Projection:
    """A map from -1 to 1 both ways, fitted on anchors and some embeddings."""

    def __init__(self, anchors: np.ndarray, sample: np.ndarray) -> None:
        points = np.concatenate([anchors, sample]).astype(np.float64)
        self._centre = points.mean(axis=0)
        self._scale = float(np.abs(points - self._centre).max()) or 1.0
        points = (points - self._centre) / self._scale
        self._transform = _tsne(points) if len(anchors) <= _TSNE_POINTS else _pca(points)
        placed = self._transform(points)
        self._middle = (placed.max(axis=0) + placed.min(axis=0)) / 2
        self._reach = float(np.abs(placed - self._middle).max()) or 1.0
        self.anchors = self.place(anchors)

    def place(self, embeddings: np.ndarray) -> np.ndarray:
        """Coordinates of embeddings, one row each."""
        if not len(embeddings):
            return np.zeros((0, 2))
        placed = self._transform((embeddings.astype(np.float64) - self._centre) / self._scale)
        coordinates: np.ndarray = np.clip(0.95 * (placed - self._middle) / self._reach, -1, 1)
        return coordinates


def _pca(points: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Projection onto the first two principal components; zeros where there are fewer."""
    from sklearn.decomposition import PCA  # takes a second to import, which a server need not wait for

    if not np.ptp(points, axis=0).any():  # all of them are one
        return lambda rows: np.zeros((len(rows), 2))
    pca = PCA(min(2, *points.shape), random_state=0).fit(points)

    def transform(rows: np.ndarray) -> np.ndarray:
        columns = pca.transform(rows)
        return np.pad(columns, ((0, 0), (0, 2 - columns.shape[1])))

    return transform


def _tsne(points: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """t-SNE of the points; other rows go to the mean of their nearest points."""
    from sklearn.manifold import TSNE
    from sklearn.neighbors import KNeighborsRegressor

    start = _pca(points)(points)
    spread = start.std(axis=0)[0]
    if len(points) <= _NEIGHBOURS or spread == 0:  # nothing to lay out
        return _pca(points)
    tsne = TSNE(
        init=1e-4 * start / spread,
        perplexity=min(_PERPLEXITY, (len(points) - 1) / 3),
        max_iter=_TSNE_STEPS,
        random_state=0,
    )
    placed = tsne.fit_transform(points)
    nearest = KNeighborsRegressor(_NEIGHBOURS, weights=_weights, algorithm="brute").fit(points, placed)
    transform: Callable[[np.ndarray], np.ndarray] = nearest.predict
    return transform


def _weights(distances: np.ndarray) -> np.ndarray:
    """Of the nearest points, from distances in ascending order: 1 for the first, less for those farther away."""
    distances = np.maximum(distances, 1e-9)
    weights: np.ndarray = (distances.min(axis=1, keepdims=True) / distances) ** _SHARPNESS
    return weights


class ProjectionCache:
    """The projection of a gallery: fitted when first asked for, and kept while the anchors stay the same."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._projection: Projection | None = None
        self._anchors: Anchors | None = None

    def fitted(self, catalogue: Catalogue) -> Projection:
        """The projection for the anchors of this version."""
        anchors = catalogue.snapshot.anchors
        if len(anchors) > MAX_ANCHORS:
            raise Refused(
                HTTPStatus.UNPROCESSABLE_ENTITY,
                f"There is a map of up to {MAX_ANCHORS:,} anchors; this gallery has {len(anchors):,}.",
            )
        with self._mutex:
            if self._projection is None or self._anchors is None or not _same(self._anchors, anchors):
                sample = catalogue.spread(max(0, _TSNE_POINTS - len(anchors)))
                self._projection = Projection(anchors.vectors, catalogue.vectors(sample))
                self._anchors = anchors
            return self._projection

    def place(self, vector: np.ndarray) -> tuple[float, float] | None:
        """Coordinates of a query; None before there is a map."""
        if self._projection is None:
            return None
        x, y = self._projection.place(vector[None])[0].tolist()
        return x, y


def _same(before: Anchors, after: Anchors) -> bool:
    """Whether a map of one fits the other: named anchors may move a little, the others are nothing but their place."""
    if before.names != after.names:
        return False
    return None not in before.names or np.array_equal(before.vectors, after.vectors)
