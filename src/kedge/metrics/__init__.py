"""Ranking metrics as pure functions over embeddings and labels: exact, in bounded memory, on CPU or GPU."""

from __future__ import annotations

from kedge.metrics.open_set import auroc, fpr_at_tpr, oscr
from kedge.metrics.ranking import Ranking, nearest, rank_relevant
from kedge.metrics.scores import (
    accuracy,
    knn_accuracy,
    map_at_r,
    mean_average_precision,
    normalized_mutual_information,
    precision_at_k,
    r_precision,
    recall_at_k,
)

__all__ = [
    "Ranking",
    "accuracy",
    "auroc",
    "fpr_at_tpr",
    "knn_accuracy",
    "map_at_r",
    "mean_average_precision",
    "nearest",
    "normalized_mutual_information",
    "oscr",
    "precision_at_k",
    "r_precision",
    "rank_relevant",
    "recall_at_k",
]
