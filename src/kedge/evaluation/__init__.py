"""How well a model retrieves: the protocol over embeddings, its report, and pictures of what was found."""

from __future__ import annotations

from kedge.evaluation.figures import retrieval_grid, top_hits
from kedge.evaluation.protocol import evaluate, evaluate_embeddings
from kedge.evaluation.report import METHODS, METRICS, Report
from kedge.evaluation.routing import route
from kedge.evaluation.tables import compare

__all__ = [
    "METHODS",
    "METRICS",
    "Report",
    "compare",
    "evaluate",
    "evaluate_embeddings",
    "retrieval_grid",
    "route",
    "top_hits",
]
