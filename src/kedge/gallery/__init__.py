"""The gallery: a picture collection in a folder, searched in two stages."""

from kedge.gallery.adding import Added
from kedge.gallery.gallery import Gallery, Item
from kedge.gallery.search import Hit, Result

__all__ = ["Added", "Gallery", "Hit", "Item", "Result"]
