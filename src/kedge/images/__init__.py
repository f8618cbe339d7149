"""Pictures: reading them safely, walking folders, preprocessing and augmentation."""

from __future__ import annotations

from kedge.images.augmentation import Augmentation, Mixed, Mixing
from kedge.images.fetching import fetch_picture, is_url
from kedge.images.folder import EXTENSIONS, list_classes, list_pictures
from kedge.images.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from kedge.images.reading import MAX_PIXELS, read_picture, to_rgb, upright

__all__ = [
    "EXTENSIONS",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "MAX_PIXELS",
    "Augmentation",
    "Mixed",
    "Mixing",
    "Preprocessing",
    "fetch_picture",
    "is_url",
    "list_classes",
    "list_pictures",
    "read_picture",
    "to_rgb",
    "upright",
]
