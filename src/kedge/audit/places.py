"""Where items lie among the anchors: wrong labels and outliers, one block of items at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kedge.audit.findings import Finding
from kedge.audit.items import Items

__all__ = ["Places", "find_outliers", "find_wrong_labels", "place", "spread"]

_FAR = 3.5
"""Robust standard deviations from which an item counts as an outlier."""
_FEW = 10
"""Classes with fewer items have no outliers: their spread is not known."""


@dataclass(frozen=True)
class Places:
    """Distances of each item to its anchors."""

    cells: np.ndarray
    """The nearest anchor."""
    own: np.ndarray
    """Distance to the anchor of its label; to the nearest one without a label."""
    rival: np.ndarray
    """The nearest anchor of another label."""
    excess: np.ndarray
    """How much nearer the rival is than its own anchor, as a share of the distance between the two: at most 1."""


def place(items: Items) -> Places:
    """Measure every item against every anchor."""
    count = len(items)
    cells, rival = np.zeros(count, np.int64), np.zeros(count, np.int64)
    own, excess = np.zeros(count), np.full(count, -1.0)
    anchors = items.anchors.vectors.astype(np.float64)
    for rows, vectors in items.blocks():
        distances = np.sqrt(items.anchors.distances(vectors.astype(np.float64)))
        cells[rows] = distances.argmin(1)
        classes = np.where(items.classes[rows] < 0, cells[rows], items.classes[rows])
        line = np.arange(len(rows))
        own[rows] = distances[line, classes]
        if len(anchors) > 1:
            distances[line, classes] = np.inf
            rival[rows] = distances.argmin(1)
            between = np.linalg.norm(anchors[classes] - anchors[rival[rows]], axis=1)
            excess[rows] = (own[rows] - distances.min(1)) / np.maximum(between, 1e-12)
    return Places(cells, own, rival, np.minimum(excess, 1.0))


def find_wrong_labels(items: Items, places: Places) -> Iterator[Finding]:
    """Items nearer to the anchor of another label than to that of their own."""
    for row in np.flatnonzero((items.classes >= 0) & (places.excess > 0)).tolist():
        path, label = items.describe(row)
        yield Finding(
            kind="wrong label",
            id=int(items.ids[row]),
            path=path,
            label=label,
            score=float(places.excess[row]),
            distance=float(places.own[row]),
            suggestion=items.anchors.names[places.rival[row]],
        )


def find_outliers(items: Items, places: Places) -> Iterator[Finding]:
    """Items far from their anchor as their class goes, and not nearer to another one.

    By logarithms of the distances, whose spread is nearly even on both sides of the median.
    """
    classes = np.where(items.classes < 0, places.cells, items.classes)
    order = np.argsort(classes, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(classes[order])) + 1):
        if len(rows) < _FEW:
            continue
        logs = np.log(np.maximum(places.own[rows], 1e-12))
        middle, deviation = spread(logs)
        far = (logs - middle) / max(deviation, 1e-6)
        for row, score in zip(rows.tolist(), far.tolist(), strict=True):
            if score > _FAR and (items.classes[row] < 0 or places.excess[row] <= 0):
                path, label = items.describe(row)
                yield Finding(
                    kind="outlier",
                    id=int(items.ids[row]),
                    path=path,
                    label=label,
                    # At most a half: such an item is rare, which is not yet wrong.
                    score=0.5 * (1 - _FAR / score),
                    distance=float(places.own[row]),
                )


def spread(values: np.ndarray) -> tuple[float, float]:
    """Median and robust standard deviation, by the median of the absolute deviations.

    >>> middle, deviation = spread(np.array([1.0, 2.0, 3.0, 4.0, 1000.0]))
    >>> middle, round(deviation, 4)
    (3.0, 1.4826)
    """
    middle = float(np.median(values))
    return middle, 1.4826 * float(np.median(np.abs(values - middle)))
