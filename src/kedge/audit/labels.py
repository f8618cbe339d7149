"""Distances of items to the anchors: wrong labels and outliers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kedge.audit.items import Items
from kedge.audit.report import Finding

__all__ = ["AnchorDistances", "find_outliers", "find_wrong_labels", "measure", "robust_spread"]

_CANDIDATES = 4
"""Anchors, nearest in float32, whose distances are then computed in float64 by differences."""
_FAR = 3.5
"""Robust standard deviations from which an item counts as an outlier."""
_MIN_ITEMS = 10
"""Classes with fewer items have no outliers: their spread is not known."""


@dataclass(frozen=True)
class AnchorDistances:
    """Distances of each item to its anchors."""

    cells: np.ndarray
    """The nearest anchor."""
    own: np.ndarray
    """Distance to the anchor of its label; to the nearest one without a label."""
    rival: np.ndarray
    """The nearest anchor of another label."""
    excess: np.ndarray
    """How much nearer the rival is than its own anchor, as a share of the distance between the two: at most 1."""


def measure(items: Items) -> AnchorDistances:
    """Measure every item against the anchors, one block of items at a time."""
    count = len(items)
    cells, rival = np.zeros(count, np.int64), np.zeros(count, np.int64)
    own, excess = np.zeros(count), np.full(count, -1.0)
    # Around their mean the numbers are small, so that fewer digits are lost.
    centre = items.anchors.vectors.mean(axis=0)
    centred = items.anchors.vectors - centre
    half_norms = np.einsum("ij,ij->i", centred, centred) / 2
    anchors = items.anchors.vectors.astype(np.float64)
    candidates = min(_CANDIDATES, len(anchors))
    for rows, vectors in items.blocks():
        scores = (vectors - centre) @ centred.T
        np.subtract(half_norms, scores, out=scores)
        near = np.sort(np.argpartition(scores, candidates - 1, axis=1)[:, :candidates], axis=1)
        exact = np.linalg.norm(anchors[near] - vectors[:, None], axis=2)
        order = np.argsort(exact, axis=1, kind="stable")
        near, exact = np.take_along_axis(near, order, 1), np.take_along_axis(exact, order, 1)
        cells[rows] = near[:, 0]
        classes = np.where(items.classes[rows] < 0, near[:, 0], items.classes[rows])
        own[rows] = np.linalg.norm(anchors[classes] - vectors, axis=1)
        if len(anchors) > 1:
            line, first = np.arange(len(rows)), (near[:, 0] == classes).astype(np.int64)
            rival[rows] = near[line, first]
            between = np.linalg.norm(anchors[classes] - anchors[rival[rows]], axis=1)
            excess[rows] = (own[rows] - exact[line, first]) / np.maximum(between, 1e-12)
    return AnchorDistances(cells, own, rival, np.minimum(excess, 1.0))


def find_wrong_labels(items: Items, measured: AnchorDistances) -> Iterator[Finding]:
    """Items nearer to the anchor of another label than to that of their own."""
    for row in np.flatnonzero((items.classes >= 0) & (measured.excess > 0)).tolist():
        suggestion = items.anchors.names[measured.rival[row]]
        yield items.finding("wrong label", row, measured.excess[row], measured.own[row], suggestion=suggestion)


def find_outliers(items: Items, measured: AnchorDistances) -> Iterator[Finding]:
    """Items far from their anchor as their class goes, and not nearer to another one.

    By logarithms of the distances, whose spread is nearly even on both sides of the median.
    """
    classes = np.where(items.classes < 0, measured.cells, items.classes)
    order = np.argsort(classes, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(classes[order])) + 1):
        if len(rows) < _MIN_ITEMS:
            continue
        logs = np.log(np.maximum(measured.own[rows], 1e-12))
        median, deviation = robust_spread(logs)
        for row, far in zip(rows.tolist(), ((logs - median) / max(deviation, 1e-6)).tolist(), strict=True):
            if far > _FAR and (items.classes[row] < 0 or measured.excess[row] <= 0):
                # At most a half: such an item is rare, which is not yet wrong.
                yield items.finding("outlier", row, 0.5 * (1 - _FAR / far), measured.own[row])


def robust_spread(values: np.ndarray) -> tuple[float, float]:
    """Median and robust standard deviation, by the median of the absolute deviations.

    >>> median, deviation = robust_spread(np.array([1.0, 2.0, 3.0, 4.0, 1000.0]))
    >>> median, round(deviation, 4)
    (3.0, 1.4826)
    """
    median = float(np.median(values))
    return median, 1.4826 * float(np.median(np.abs(values - median)))
