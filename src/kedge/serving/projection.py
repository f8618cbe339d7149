"""The gallery in two dimensions: t-SNE of the anchors and a sample of items, PCA where there are too many anchors.

t-SNE places only the points it was fitted on. Every other item, and every query, goes between the two fitted items that
are nearest to it, so that new items do not move the old ones.
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
_TSNE_POINTS = 1000
"""Anchors and items that t-SNE is fitted on: what takes some two seconds."""
_TSNE_STEPS = 500
_PERPLEXITY = 15
_NEIGHBOURS = 2
_SHARPNESS = 8
"""Weights fall with this power of the distance: beside a much nearer point the other does not count."""


class Projection:
    """A map from -1 to 1 both ways, fitted on anchors and some embeddings."""

    def __init__(self, anchors: np.ndarray, sample: np.ndarray, lists: np.ndarray) -> None:
        """`lists` names the anchor in whose list each row of `sample` is."""
        points = np.concatenate([anchors, sample]).astype(np.float64)
        self._centre = points.mean(axis=0)
        self._scale = float(np.abs(points - self._centre).max()) or 1.0
        points = (points - self._centre) / self._scale
        if len(anchors) > _TSNE_POINTS or len(points) <= _PERPLEXITY or not points.any():
            self._transform = _pca(points)
            placed = self._transform(points)
        else:
            placed = _tsne(points)
            # In high dimensions an anchor is nearer to each of its items than they are to one another: items would
            # all go to their anchors. So only those without an item stand for themselves.
            fitted = np.concatenate(
                [np.setdiff1d(np.arange(len(anchors)), lists), np.arange(len(anchors), len(points))]
            )
            self._transform = _interpolation(points[fitted], placed[fitted])
        self._middle = (placed.max(axis=0) + placed.min(axis=0)) / 2
        self._reach = float(np.abs(placed - self._middle).max()) or 1.0
        self.anchors = self._on_map(placed[: len(anchors)])

    def place(self, embeddings: np.ndarray) -> np.ndarray:
        """Coordinates of embeddings, one row each."""
        if not len(embeddings):
            return np.zeros((0, 2))
        return self._on_map(self._transform((embeddings.astype(np.float64) - self._centre) / self._scale))

    def _on_map(self, placed: np.ndarray) -> np.ndarray:
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


def _tsne(points: np.ndarray) -> np.ndarray:
    """The points in two dimensions, by t-SNE from their principal components."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    start = _pca(points)(points)
    tsne = TSNE(
        init=1e-4 * start / start.std(axis=0)[0],
        perplexity=_PERPLEXITY,
        max_iter=_TSNE_STEPS,
        random_state=0,
    )
    with threadpool_limits(1):  # the other cores are for those who search
        placed: np.ndarray = tsne.fit_transform(points)
    return placed


def _interpolation(points: np.ndarray, placed: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Every row goes to the weighted mean of its nearest points."""
    from sklearn.neighbors import KNeighborsRegressor

    neighbours = min(_NEIGHBOURS, len(points))
    transform: Callable[[np.ndarray], np.ndarray]
    transform = KNeighborsRegressor(neighbours, weights=_weights, algorithm="brute").fit(points, placed).predict
    return transform


def _weights(distances: np.ndarray) -> np.ndarray:
    """Of the nearest points: 1 for the first, less for those farther away."""
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
                self._projection = Projection(anchors.vectors, catalogue.vectors(sample), catalogue.lists[sample])
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
