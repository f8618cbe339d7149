"""The gallery: a collection of images in a folder, searched in two stages."""

from kedge.gallery.gallery import Gallery, Item
from kedge.gallery.ingest import Added
from kedge.gallery.result import Hit, Result, results_to_pandas

__all__ = ["Added", "Gallery", "Hit", "Item", "Result", "results_to_pandas"]
