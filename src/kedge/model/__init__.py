"""The model: encoder, anchors, classes and preprocessing, kept together in one folder."""

from __future__ import annotations

from kedge.model.embedding import embed_pictures
from kedge.model.model import Model, Prediction
from kedge.model.pictures import Picture

__all__ = ["Model", "Picture", "Prediction", "embed_pictures"]
