"""Pictures: reading them safely, walking folders, preprocessing and augmentation."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kedge.images.fetching import fetch_picture, is_url
from kedge.images.folder import EXTENSIONS, list_classes, list_pictures
from kedge.images.reading import MAX_PIXELS, read_picture, to_rgb, upright

if TYPE_CHECKING:
    from kedge.images.augmentation import Augmentation, Mixed, Mixing
    from kedge.images.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing

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

# Imported on first use: processes that only decode start without torch.
_HOMES = {
    "Augmentation": "kedge.images.augmentation",
    "IMAGENET_MEAN": "kedge.images.preprocessing",
    "IMAGENET_STD": "kedge.images.preprocessing",
    "Mixed": "kedge.images.augmentation",
    "Mixing": "kedge.images.augmentation",
    "Preprocessing": "kedge.images.preprocessing",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'kedge.images' has no attribute {name!r}")
