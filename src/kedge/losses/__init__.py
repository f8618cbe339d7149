"""Losses over embeddings and labels: class anchor margin, its rivals, and any of pytorch-metric-learning by name."""

from kedge.losses.anchors import init_anchors
from kedge.losses.base import RetrievalLoss
from kedge.losses.cam import CAMLoss
from kedge.losses.classification import CenterLoss, CrossEntropyLoss
from kedge.losses.contrastive import ContrastiveLoss
from kedge.losses.metric_learning import MetricLearningLoss

__all__ = [
    "CAMLoss",
    "CenterLoss",
    "ContrastiveLoss",
    "CrossEntropyLoss",
    "MetricLearningLoss",
    "RetrievalLoss",
    "init_anchors",
]
