"""The model: encoder, anchors, classes and preprocessing, kept together in one folder."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kedge.model.calibration import Calibration

if TYPE_CHECKING:
    from kedge.model.inputs import ImageInput, embed_split
    from kedge.model.model import Classification, Model, Prediction, Vectors

__all__ = ["Calibration", "Classification", "ImageInput", "Model", "Prediction", "Vectors", "embed_split"]

# Imported on first use: a gallery's table is read without torch.
_LAZY = {"inputs": ("ImageInput", "embed_split"), "model": ("Classification", "Model", "Prediction", "Vectors")}


def __getattr__(name: str) -> Any:
    for module, names in _LAZY.items():
        if name in names:
            return getattr(import_module(f"kedge.model.{module}"), name)
    raise AttributeError(f"module 'kedge.model' has no attribute {name!r}")
