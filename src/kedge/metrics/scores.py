"""The usual scores, one number each."""

from __future__ import annotations

import torch

from kedge.errors import DataError
from kedge.metrics.inputs import Array, check_integers
from kedge.metrics.ranking import rank_relevant


def mean_average_precision(
    queries: Array,
    query_labels: Array,
    gallery: Array,
    gallery_labels: Array,
    *,
    self_index: Array | None = None,
) -> float:
    """Mean AP of brute-force search; see :func:`kedge.metrics.rank_relevant` for more.

    >>> import numpy as np
    >>> gallery = np.array([[0.0], [1.0], [2.0], [3.0]])
    >>> mean_average_precision(gallery, [0, 0, 1, 1], gallery, [0, 0, 1, 1], self_index=range(4))
    0.875
    """
    ranking = rank_relevant(queries, query_labels, gallery, gallery_labels, ks=(), self_index=self_index)
    return ranking.mean()["mAP"]


def precision_at_k(
    queries: Array,
    query_labels: Array,
    gallery: Array,
    gallery_labels: Array,
    *,
    k: int = 20,
    self_index: Array | None = None,
) -> float:
    """The share of relevant items among the first k, over queries that have a relevant item."""
    ranking = rank_relevant(queries, query_labels, gallery, gallery_labels, ks=(k,), self_index=self_index)
    return ranking.mean()[f"P@{k}"]


def recall_at_k(
    queries: Array,
    query_labels: Array,
    gallery: Array,
    gallery_labels: Array,
    *,
    k: int = 1,
    self_index: Array | None = None,
) -> float:
    """The share of queries with a relevant item among the first k (R@k), over queries that have a relevant item.

    >>> import numpy as np
    >>> gallery = np.array([[0.0], [1.0], [3.0], [4.5]])
    >>> recall_at_k(gallery, [0, 1, 0, 1], gallery, [0, 1, 0, 1], k=2, self_index=range(4))
    0.5
    """
    ranking = rank_relevant(queries, query_labels, gallery, gallery_labels, ks=(k,), self_index=self_index)
    return ranking.retrieval()[f"R@{k}"]


def map_at_r(
    queries: Array,
    query_labels: Array,
    gallery: Array,
    gallery_labels: Array,
    *,
    self_index: Array | None = None,
) -> float:
    """MAP@R (Musgrave et al., 2020): mean AP of the first R items, where R is the number of a query's relevant items.

    Over queries that have a relevant item.
    """
    ranking = rank_relevant(queries, query_labels, gallery, gallery_labels, ks=(), self_index=self_index)
    return ranking.retrieval()["MAP@R"]


def r_precision(
    queries: Array,
    query_labels: Array,
    gallery: Array,
    gallery_labels: Array,
    *,
    self_index: Array | None = None,
) -> float:
    """The share of relevant items among the first R, where R is the number of a query's relevant items.

    Over queries that have a relevant item.
    """
    ranking = rank_relevant(queries, query_labels, gallery, gallery_labels, ks=(), self_index=self_index)
    return ranking.retrieval()["R-precision"]


def normalized_mutual_information(labels: Array, clusters: Array) -> float:
    """Mutual information of labels and clusters, divided by the mean of their entropies (NMI); 1 where both are one.

    >>> normalized_mutual_information([0, 0, 1, 1], [5, 5, 7, 7]), normalized_mutual_information([0, 1], [0, 0])
    (1.0, 0.0)
    """
    length = len(labels)
    if length == 0:
        raise DataError("labels are empty; give at least one.")
    parts = (check_integers(name, part, length).cpu() for name, part in (("labels", labels), ("clusters", clusters)))
    rows, columns = (torch.unique(part, return_inverse=True)[1] for part in parts)
    width = int(columns.max()) + 1
    pairs, counts = torch.unique(rows * width + columns, return_counts=True)
    joint = counts.double() / length
    own, other = (torch.bincount(part).double() / length for part in (rows, columns))
    entropies = [-float((part * part.log()).sum()) for part in (own, other)]
    if sum(entropies) == 0:
        return 1.0
    information = float((joint * (joint / (own[pairs // width] * other[pairs % width])).log()).sum())
    return max(0.0, information / (sum(entropies) / 2))


def knn_accuracy(
    queries: Array,
    query_labels: Array,
    gallery: Array,
    gallery_labels: Array,
    *,
    self_index: Array | None = None,
) -> float:
    """The share of all queries whose nearest gallery item has their label (1-NN accuracy)."""
    ranking = rank_relevant(queries, query_labels, gallery, gallery_labels, ks=(1,), self_index=self_index)
    return float(ranking.precision[1].mean())


def accuracy(predictions: Array, labels: Array) -> float:
    """The share of predictions that equal their label.

    >>> accuracy([0, 1, 1, 2], [0, 1, 2, 2])
    0.75
    """
    length = len(predictions)
    if length == 0:
        raise DataError("predictions are empty; give at least one.")
    predicted = check_integers("predictions", predictions, length)
    truth = check_integers("labels", labels, length, predicted.device)
    return float((predicted == truth).double().mean())
