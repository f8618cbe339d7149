"""Images: reading them safely, listing folders, prefetch, preprocessing and augmentation."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kedge.images.folder import EXTENSIONS, list_classes, list_images
from kedge.images.io import MAX_PIXELS, fetch_image, is_url, make_thumbnail, prefetch, read_image, to_rgb, upright

if TYPE_CHECKING:
    from kedge.images.augment import Augmentation
    from kedge.images.mix import Mixed, Mixing
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
    "fetch_image",
    "is_url",
    "list_classes",
    "list_images",
    "make_thumbnail",
    "prefetch",
    "read_image",
    "to_rgb",
    "upright",
]

# Imported on first use: processes that only decode start without torch.
_LAZY = {
    "augment": ("Augmentation",),
    "mix": ("Mixed", "Mixing"),
    "preprocessing": ("IMAGENET_MEAN", "IMAGENET_STD", "Preprocessing"),
}
# Old names, accepted until the next release.
_RENAMED = {"fetch_picture": fetch_image, "list_pictures": list_images, "read_picture": read_image}


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        new = _RENAMED[name]
        warnings.warn(f"kedge.images.{name} is now {new.__name__}.", DeprecationWarning, stacklevel=2)
        return new
    for module, names in _LAZY.items():
        if name in names:
            return getattr(import_module(f"kedge.images.{module}"), name)
    raise AttributeError(f"module 'kedge.images' has no attribute {name!r}")
