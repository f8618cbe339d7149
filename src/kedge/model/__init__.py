"""The model: encoder, anchors, classes and preprocessing, kept together in one folder."""

from __future__ import annotations

from kedge.model.calibration import Calibration
from kedge.model.inputs import ImageInput, embed_split
from kedge.model.model import Classification, Model, Prediction, Vectors

__all__ = ["Calibration", "Classification", "ImageInput", "Model", "Prediction", "Vectors", "embed_split"]
