"""Labels that look wrong, and items that look like no other.

Each item gets the probabilities of all labels from a ridge classifier on the vectors, fitted to the labels of all *other*
items: leave-one-out, in closed form. A label is then wrong with a probability that follows from a mixture: with a share
ε of labels wrong, and these drawn from all others alike, an item x of the label y is wrong with odds
ε (1 − p(y|x)) / (C − 1) to (1 − ε) p(y|x). The temperature of the probabilities and ε are fitted by maximum likelihood,
so that what is hard to tell does not count as wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from kedge.audit.items import Items
from kedge.audit.neighbours import Neighbours
from kedge.audit.report import Finding

__all__ = ["find_outliers", "find_wrong_labels", "robust_spread", "typical_images"]

_MIN_ITEMS = 4
"""Labels with fewer items are not judged: left out, they leave too little of their label."""
_RIDGE = 1.0
"""Regularisation, as a share of the mean variance of the numbers of a vector."""
_FIT = 1 << 22
"""Probabilities by which temperature and ε are fitted."""
_TEMPERATURES = np.geomspace(0.01, 1, 40)
_SHARES = np.geomspace(1e-4, 0.4, 40)
_FAR = 3.5
"""Robust standard deviations from which an item counts as an outlier."""
_MIN_SPREAD = 10
"""Labels with fewer items have no outliers: their spread is not known."""
_TYPICAL = 3


@dataclass(frozen=True)
class _Classifier:
    """A ridge classifier in which all labels weigh alike, and which can leave out the item that it is asked about."""

    centre: np.ndarray
    inverse: np.ndarray
    """Of the regularised covariance."""
    weights: np.ndarray
    shares: np.ndarray
    """Of one item of each label in the fit."""

    @classmethod
    def fit(cls, items: Items, rows: np.ndarray, labels: np.ndarray) -> _Classifier:
        """Least squares to the labels, one pass over the vectors."""
        counts = np.bincount(labels)
        shares, width = 1 / (counts * len(counts)), items.anchors.vectors.shape[1]
        sums, products = np.zeros((len(counts), width)), np.zeros((width, width))
        for block, vectors in items.blocks(np.arange(len(rows)), rows):
            weighted = vectors.T.astype(np.float64) * shares[labels[block]]
            np.add.at(sums, labels[block], weighted.T)
            products += weighted @ vectors
        centre = sums.sum(axis=0)
        covariance = products - np.outer(centre, centre)
        ridge = max(_RIDGE * float(np.trace(covariance)) / width, 1e-12)
        inverse = np.linalg.inv(covariance + ridge * np.eye(width))
        return cls(centre, inverse, inverse @ (sums - centre / len(counts)).T, shares)

    def scores(self, vectors: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """The scores of all labels for each item, as if it had not been there."""
        centred = vectors - self.centre
        scores = centred @ self.weights + 1 / len(self.shares)
        leverage = self.shares[labels] * (1 + np.einsum("ij,ij->i", centred @ self.inverse, centred))
        own = np.arange(len(labels)), labels
        scores[own] -= leverage
        without: np.ndarray = scores / (1 - leverage)[:, None]
        return without


def find_wrong_labels(items: Items, rows: np.ndarray) -> Iterator[Finding]:
    """Items of which another label is more probable than their own; `rows` holds none twice."""
    codes = np.append(items.labels, -1)[rows]
    counts = np.bincount(codes[codes >= 0], minlength=len(items.label_names))
    judged = np.flatnonzero(counts >= _MIN_ITEMS)
    if len(judged) < 2:
        return
    rows, codes = rows[np.isin(codes, judged)], codes[np.isin(codes, judged)]
    labels = np.searchsorted(judged, codes)
    classifier = _Classifier.fit(items, rows, labels)
    rng = np.random.default_rng(0)
    sample = rng.permutation(len(rows))[: max(_BLOCK // 4, _FIT // len(judged))]
    temperature, share = _fit(classifier.scores(items.vectors(rows[sample]), labels[sample]), labels[sample])
    for block, vectors in items.blocks(np.arange(len(rows)), rows):
        probabilities = _softmax(classifier.scores(vectors, labels[block]) / temperature)
        own = probabilities[np.arange(len(block)), labels[block]]
        wrong = _wrong(own, share, len(judged))
        for row in np.flatnonzero(own < probabilities.max(axis=1)).tolist():
            suggestion = items.label_names[judged[probabilities[row].argmax()]]
            yield items.finding("wrong label", int(rows[block[row]]), wrong[row], ..., suggestion=suggestion)
