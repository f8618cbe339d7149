"""The gallery: a collection of images in a folder, searched in two stages."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kedge.gallery.gallery import Gallery, Item
    from kedge.gallery.ingest import Added
    from kedge.gallery.result import Hit, Result, results_to_pandas

__all__ = ["Added", "Gallery", "Hit", "Item", "Result", "results_to_pandas"]

# Imported on first use: the table is read without torch.
_LAZY = {"gallery": ("Gallery", "Item"), "ingest": ("Added",), "result": ("Hit", "Result", "results_to_pandas")}


def __getattr__(name: str) -> Any:
    for module, names in _LAZY.items():
        if name in names:
            return getattr(import_module(f"kedge.gallery.{module}"), name)
    raise AttributeError(f"module 'kedge.gallery' has no attribute {name!r}")
