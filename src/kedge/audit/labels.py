"""Labels that look wrong, and items that look like no other.

Each item gets the probabilities of all labels from a ridge classifier on the vectors, fitted to the labels of all
*other* items: leave-one-out, in closed form. In a share ε of the items another label was drawn, all alike: so an item x
of label y, of C, is wrong with the odds ε (1 − p(y|x)) / (C − 1) to (1 − ε) p(y|x). ε and the temperature of p are
fitted by maximum likelihood, so that what is hard to tell does not count as wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kedge.audit.items import Items, Neighbours
from kedge.audit.report import Finding

__all__ = ["RIDGE", "Classifier", "find_outliers", "find_wrong_labels", "robust_spread", "typical_images"]

_MIN_ITEMS = 4
"""Labels with fewer items are not judged: left out, they leave too little of their label."""
RIDGE = 1.0
"""Regularisation, as a share of the mean variance of the numbers of a vector."""
_FIT, _MIN_FIT = 1 << 22, 1024
"""Probabilities, and at least so many items, by which temperature and ε are fitted."""
_TEMPERATURES = np.geomspace(0.01, 1, 40)
_SHARES = np.geomspace(1e-4, 0.4, 40)
_FAR = 3.5
"""Robust standard deviations from which an item counts as an outlier."""
_MIN_SPREAD = 10
"""Labels with fewer items have no outliers: their spread is not known."""
_TYPICAL = 3
_MIN_SCORE = 0.005
"""A label is not listed where the probability that it is wrong would be shown as 0.00."""


@dataclass(frozen=True)
class Classifier:
    """A ridge classifier in which all labels weigh alike, and which can leave out the item that it is asked about."""

    centre: np.ndarray
    inverse: np.ndarray
    """Of the regularised covariance."""
    weights: np.ndarray
    shares: np.ndarray
    """Of one item of each label in the fit."""

    @classmethod
    def fit(cls, items: Items, rows: np.ndarray, labels: np.ndarray) -> Classifier:
        """Least squares to the labels, one pass over the vectors."""
        counts = np.bincount(labels)
        shares, width = 1 / (counts * len(counts)), items.anchors.vectors.shape[1]
        sums, products = np.zeros((len(counts), width)), np.zeros((width, width))
        for part, vectors in items.blocks(rows):
            weighted = vectors * shares[labels[part], None]
            np.add.at(sums, labels[part], weighted)
            products += weighted.T @ vectors
        centre = sums.sum(axis=0)
        covariance = products - np.outer(centre, centre)
        ridge = max(RIDGE * float(np.trace(covariance)) / width, 1e-12)
        inverse = np.linalg.inv(covariance + ridge * np.eye(width))
        return cls(centre, inverse, inverse @ (sums - centre / len(counts)).T, shares)

    def scores(self, vectors: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """The scores of all labels for each item, as if it had not been there."""
        centred = vectors - self.centre
        scores = centred @ self.weights + 1 / len(self.shares)
        leverage = self.shares[labels] * (1 + np.einsum("ij,ij->i", centred @ self.inverse, centred))
        scores[np.arange(len(labels)), labels] -= leverage
        without: np.ndarray = scores / (1 - leverage)[:, None]
        return without


def find_wrong_labels(items: Items, rows: np.ndarray, near: Neighbours) -> Iterator[Finding]:
    """Items of which another label is more probable than their own; `rows` holds no content twice."""
    codes = items.labels[rows]
    counts = np.bincount(codes[codes >= 0], minlength=1)
    judged = np.flatnonzero(counts >= _MIN_ITEMS)
    if len(judged) < 2:
        return
    rows = rows[np.isin(codes, judged)]
    labels = np.searchsorted(judged, items.labels[rows])
    classifier = Classifier.fit(items, rows, labels)
    sample = np.random.default_rng(0).permutation(len(rows))[: max(_MIN_FIT, _FIT // len(judged))]
    temperature, share = _fit(classifier.scores(items.vectors(rows[sample]), labels[sample]), labels[sample])
    for part, vectors in items.blocks(rows, len(judged)):
        probabilities = _softmax(classifier.scores(vectors, labels[part]) / temperature)
        own = probabilities[np.arange(len(vectors)), labels[part]]
        wrong, likeliest = _wrong(own, share, len(judged)), probabilities.argmax(axis=1)
        for number in np.flatnonzero((likeliest != labels[part]) & (wrong >= _MIN_SCORE)).tolist():
            row, suggestion = int(rows[part][number]), items.label_names[judged[likeliest[number]]]
            yield items.finding("wrong label", row, wrong[number], near.distances[row, 0], suggestion=suggestion)


def _fit(scores: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """The temperature of the probabilities and the share of wrong labels of the largest likelihood."""
    own, best = (np.arange(len(labels)), labels), (-np.inf, 1.0, 0.0)
    for temperature in _TEMPERATURES.tolist():
        right = _softmax(scores / temperature)[own][:, None]
        likelihoods = (1 - _SHARES) * right + _SHARES * (1 - right) / (scores.shape[1] - 1)
        means = np.log(np.maximum(likelihoods, 1e-300)).mean(axis=0)
        best = max(best, (float(means.max()), temperature, float(_SHARES[means.argmax()])))
    return best[1:]


def _wrong(right: np.ndarray, share: float, count: int) -> np.ndarray:
    """The probability that a label is wrong, from the probability of this label by looks."""
    wrong = share * (1 - right) / (count - 1)
    probability: np.ndarray = wrong / (wrong + (1 - share) * right)
    return probability


def _softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    softmax: np.ndarray = powers / powers.sum(axis=1, keepdims=True)
    return softmax


def find_outliers(items: Items, rows: np.ndarray, near: Neighbours) -> Iterator[Finding]:
    """Items far from their fifth neighbour as their label goes, by logarithms, whose spread is nearly even."""
    labels = items.labels[rows]
    for label in np.unique(labels).tolist():
        members = rows[labels == label]
        members = members[np.isfinite(near.distances[members, -1])]
        if len(members) < _MIN_SPREAD:
            continue
        logs = np.log(np.maximum(near.distances[members, -1], 1e-12))
        median, deviation = robust_spread(logs)
        for row, far in zip(members.tolist(), ((logs - median) / max(deviation, 1e-6)).tolist(), strict=True):
            if far > _FAR:
                # At most a half: such an item is rare, which is not yet wrong.
                yield items.finding("outlier", row, 0.5 * (1 - _FAR / far), near.distances[row, 0])


def typical_images(items: Items, rows: np.ndarray, findings: Sequence[Finding]) -> dict[str, list[str]]:
    """Paths of the images nearest to the mean of each label that a wrong label names; none of them is doubtful."""
    doubtful = [finding for finding in findings if finding.kind == "wrong label"]
    named = {name for finding in doubtful for name in (finding.label, finding.suggestion)}
    rows = rows[~np.isin(items.ids[rows], [finding.id for finding in doubtful])]
    typical: dict[str, list[str]] = {}
    for code, name in enumerate(items.label_names):
        members = rows[items.labels[rows] == code] if name in named else rows[:0]
        if not len(members):
            continue
        mean = sum(vectors.sum(axis=0, dtype=np.float64) for _, vectors in items.blocks(members)) / len(members)
        parts = [np.linalg.norm(vectors - mean, axis=1) for _, vectors in items.blocks(members)]
        nearest = members[np.argsort(np.concatenate(parts), kind="stable")[:_TYPICAL]]
        typical[name] = [path for row in nearest.tolist() if (path := items.describe(row)[0]) is not None]
    return typical


def robust_spread(values: np.ndarray) -> tuple[float, float]:
    """Median and robust standard deviation, by the median of the absolute deviations.

    >>> median, deviation = robust_spread(np.array([1.0, 2.0, 3.0, 4.0, 1000.0]))
    >>> median, round(deviation, 4)
    (3.0, 1.4826)
    """
    median = float(np.median(values))
    return median, 1.4826 * float(np.median(np.abs(values - median)))
