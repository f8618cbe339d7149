"""Ranking metrics as pure functions over embeddings and labels: exact, in bounded memory, on CPU or GPU."""

from __future__ import annotations

from kedge.metrics.ranking import Ranking, nearest, rank_relevant
from kedge.metrics.scores import (
    accuracy,
    knn_accuracy,
    map_at_r,
    mean_average_precision,
    precision_at_k,
    recall_at_k,
)

__all__ = [
    "Ranking",
    "accuracy",
    "knn_accuracy",
    "map_at_r",
    "mean_average_precision",
    "nearest",
    "precision_at_k",
    "rank_relevant",
    "recall_at_k",
]
