"""Kedge: image retrieval with learnable class anchors."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from kedge.errors import KedgeError

if TYPE_CHECKING:
    from kedge import metrics
    from kedge.evaluation import Report, evaluate
    from kedge.gallery import Gallery
    from kedge.losses import CAMLoss, ContrastiveLoss, CrossEntropyLoss
    from kedge.model import Model
    from kedge.serving.client import Client
    from kedge.training import train

__all__ = [
    "CAMLoss",
    "Client",
    "ContrastiveLoss",
    "CrossEntropyLoss",
    "Gallery",
    "KedgeError",
    "Model",
    "Report",
    "evaluate",
    "metrics",
    "train",
]

try:
    __version__ = version("kedge")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0"

# Public names are imported on first use: `import kedge` and `kedge --help` load none of the heavy libraries.
_LAZY = {
    "kedge.evaluation": ("Report", "evaluate"),
    "kedge.gallery": ("Gallery",),
    "kedge.losses": ("CAMLoss", "ContrastiveLoss", "CrossEntropyLoss"),
    "kedge.model": ("Model",),
    "kedge.serving.client": ("Client",),
    "kedge.training": ("train",),
}


def __getattr__(name: str) -> Any:
    if name == "metrics":
        return import_module("kedge.metrics")
    for module, names in _LAZY.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'kedge' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
