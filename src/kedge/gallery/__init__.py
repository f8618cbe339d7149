"""The gallery: a collection of images in a folder, searched in two stages."""

from kedge.gallery.gallery import Gallery, Item
from kedge.gallery.ingest import Added
from kedge.gallery.search import Hit, Result

__all__ = ["Added", "Gallery", "Hit", "Item", "Result"]
