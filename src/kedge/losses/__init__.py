"""Losses over embeddings and labels: class anchor margin, contrastive, cross-entropy."""

from kedge.losses.anchors import start_anchors
from kedge.losses.base import RetrievalLoss
from kedge.losses.cam import CAMLoss
from kedge.losses.contrastive import ContrastiveLoss
from kedge.losses.cross_entropy import CrossEntropyLoss

__all__ = ["CAMLoss", "ContrastiveLoss", "CrossEntropyLoss", "RetrievalLoss", "start_anchors"]
