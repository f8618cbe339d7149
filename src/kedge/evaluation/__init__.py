"""How well a model retrieves: the evaluation protocol over embeddings, its report, and plots of hits."""

from __future__ import annotations

from kedge.evaluation.classes import ClassScores
from kedge.evaluation.gallery import GalleryReport, evaluate_gallery
from kedge.evaluation.plots import retrieval_grid, top_hits
from kedge.evaluation.protocol import evaluate, evaluate_embeddings, evaluate_unseen, route
from kedge.evaluation.report import METHODS, METRICS, Report, compare

__all__ = [
    "METHODS",
    "METRICS",
    "ClassScores",
    "GalleryReport",
    "Report",
    "compare",
    "evaluate",
    "evaluate_embeddings",
    "evaluate_gallery",
    "evaluate_unseen",
    "retrieval_grid",
    "route",
    "top_hits",
]
