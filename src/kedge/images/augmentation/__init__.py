"""Augmentation of whole batches, on whatever device they are on, with other parameters for every image.

Each change is a pure function with explicit parameters; ``Augmentation`` and ``Mixing`` draw them.
"""

from __future__ import annotations

from kedge.images.augmentation.augmentation import Augmentation
from kedge.images.augmentation.boxes import cutout
from kedge.images.augmentation.colour import WHITE, adjust_brightness, adjust_contrast, adjust_saturation
from kedge.images.augmentation.geometry import affine, crop, flip
from kedge.images.augmentation.mixing import Mixed, Mixing, cutmix, mixup
from kedge.images.augmentation.trivial import BINS, OPERATIONS, trivial_augment

__all__ = [
    "BINS",
    "OPERATIONS",
    "WHITE",
    "Augmentation",
    "Mixed",
    "Mixing",
    "adjust_brightness",
    "adjust_contrast",
    "adjust_saturation",
    "affine",
    "crop",
    "cutmix",
    "cutout",
    "flip",
    "mixup",
    "trivial_augment",
]
