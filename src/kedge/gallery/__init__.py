"""The gallery: a picture collection in a folder, searched in two stages."""

from kedge.gallery.gallery import Gallery
from kedge.gallery.pictures import Added
from kedge.gallery.search import Hit, Result

__all__ = ["Added", "Gallery", "Hit", "Result"]
