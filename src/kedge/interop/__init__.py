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
_LAZY = {
    "exporter": ("export_gallery",),
    "importer": ("import_gallery",),
    "onnx": ("export_onnx", "export_program"),
    "sklearn": ("KedgeClassifier", "KedgeRetriever"),
}


def __getattr__(name: str) -> Any:
    for module, names in _LAZY.items():
        if name in names:
            return getattr(import_module(f"kedge.interop.{module}"), name)
    raise AttributeError(f"module 'kedge.interop' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
