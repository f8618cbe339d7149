"""Models and vectors for other tools: ONNX, torch.export, vector files, scikit-learn."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kedge.interop.exporter import export_gallery
    from kedge.interop.importer import import_gallery
    from kedge.interop.onnx import export_onnx, export_program
    from kedge.interop.sklearn import KedgeClassifier, KedgeRetriever

__all__ = [
    "KedgeClassifier",
    "KedgeRetriever",
    "export_gallery",
    "export_onnx",
    "export_program",
    "import_gallery",
]

# Imported on first use: each adapter needs a library of its own.
_HOMES = {
    "KedgeClassifier": "kedge.interop.sklearn",
    "KedgeRetriever": "kedge.interop.sklearn",
    "export_gallery": "kedge.interop.exporter",
    "export_onnx": "kedge.interop.onnx",
    "export_program": "kedge.interop.onnx",
    "import_gallery": "kedge.interop.importer",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'kedge.interop' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
