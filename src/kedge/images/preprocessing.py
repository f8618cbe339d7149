"""From an image to the encoder's input; stored with the model, so that search sees what training saw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from kedge.errors import ConfigError
from kedge.images.io import center_square

__all__ = ["IMAGENET_MEAN", "IMAGENET_STD", "Preprocessing"]

MAX_SIDE = 2048
"""The largest input of an encoder: memory grows with its square, and a model's folder may come from a stranger."""
INTERPOLATIONS = ("bilinear", "bicubic")
_MIN_CROP = 0.1
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Preprocessing:
    """Resize and centre crop (``to_pixels``), then scale and normalize (``to_input``).

    ``size`` is the output's side; None leaves images as they are. Pixels are multiplied by ``scale``; ``mean`` and
    ``std``, given together, normalize the scaled values per channel. ``flip_tta`` is test-time augmentation: the mean
    of the features of an image and its mirror image, at twice the work. ``crop_pct`` is the share of the shorter side
    that the crop keeps, and ``interpolation`` (bilinear, bicubic) resizes it, both as in timm's `pretrained_cfg`.
    """

    size: int | None = 224
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    scale: float = 1 / 256
    flip_tta: bool = False
    crop_pct: float = 1.0
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        if self.size is not None and not 1 <= self.size <= MAX_SIDE:
            raise ConfigError(f"size must be a number of pixels from 1 to {MAX_SIDE}, or None, not {self.size}.")
        if self.scale <= 0:
            raise ConfigError(f"scale must be positive, not {self.scale}.")
        if not _MIN_CROP <= self.crop_pct <= 1:
            raise ConfigError(f"crop_pct must lie between {_MIN_CROP} and 1, not {self.crop_pct}.")
        if self.interpolation not in INTERPOLATIONS:
            raise ConfigError(f"interpolation must be {' or '.join(INTERPOLATIONS)}, not {self.interpolation!r}.")
        if self.mean is None and self.std is None:
            return
        mean, std = (tuple(map(float, values or ())) for values in (self.mean, self.std))
        if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
            raise ConfigError(
                f"mean and std must hold 3 values each, std positive, or be None; found {mean} and {std}."
            )
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "std", std)

    def to_pixels(self, image: Image.Image) -> np.ndarray:
        """The image's centre as uint8, 3 x size x size: resized and cropped, antialiased."""
        return center_square(image, self.size, self.crop_pct, self.interpolation)

    def to_input(self, pixels: Tensor) -> Tensor:
        """Pixels 0 to 255, B x 3 x H x W of any dtype, as float32: times scale, at ``size``, normalized."""
        return self.normalize(self.resize(pixels.to(torch.float32) * self.scale))

    def resize(self, images: Tensor) -> Tensor:
        """The centre square of float images at ``size``, resampled on their device: for batches that are no files.

        Nothing more is cropped: ``to_pixels`` has done that where it was to be done.
        """
        height, width = images.shape[-2:]
        if self.size is None or height == width == self.size:
            return images
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        images = images[..., top : top + side, left : left + side]
        if side == self.size:
            return images
        shape = (self.size, self.size)
        return F.interpolate(images, shape, mode=self.interpolation, align_corners=False, antialias=True)

    def normalize(self, images: Tensor) -> Tensor:
        """``(x - mean) / std`` of images that are scaled already, such as those ``Augmentation`` returns."""
        if self.mean is None or self.std is None:
            return images
        # Plain numbers per channel: tensors of them would cost a host synchronisation on every batch.
        channels = zip(images.unbind(-3), self.mean, self.std, strict=True)
        return torch.stack([(channel - mean) / std for channel, mean, std in channels], dim=-3)

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values; ``from_json`` reads it."""
        values = asdict(self)
        # Only what 0.1 did not do otherwise, and that as `mirror`: they are part of a model's fingerprint.
        for name in ("crop_pct", "interpolation"):
            if values[name] == type(self).__dataclass_fields__[name].default:
                del values[name]
        return values | {"mirror": True} if values.pop("flip_tta") else values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Preprocessing:
        """The Preprocessing that ``to_json`` wrote."""
        settings: dict[str, Any] = {
            "flip_tta" if name == "mirror" else name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        unknown = sorted(set(settings) - set(cls.__dataclass_fields__))
        if unknown:
            raise ConfigError(f"Unknown preprocessing setting {unknown[0]!r}: a newer Kedge wrote it, so upgrade.")
        return cls(**settings)
