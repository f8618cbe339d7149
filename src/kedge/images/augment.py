"""Random augmentation of a batch: what is drawn, and in which order the changes come."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kedge.errors import ConfigError
from kedge.images import functional as F
from kedge.images.trivial_augment import choose, trivial_augment

__all__ = ["Augmentation"]


@dataclass(frozen=True)
class Augmentation:
    """Random changes of a batch, drawn per image from a generator; a part set to zero or False is skipped.

    ``crop_padding``: pixels of zero padding before a random crop. ``flip``: flip half of the images left to right.
    ``trivial``: one operation of TrivialAugmentWide. ``jitter``: brightness, contrast and saturation factors
    within 1 ± jitter. ``degrees``: rotation within ± degrees. ``translate``: shift within ± this fraction of the
    side, by whole pixels. ``cutout``: side of a black square in pixels. All but ``cutout`` are distributed as
    torchvision's transforms of the same parameters (RandomAffine with bilinear interpolation).
    """

    crop_padding: int = 4
    flip: bool = True
    jitter: float = 0.1
    degrees: float = 10.0
    translate: float = 0.05
    cutout: int = 0
    trivial: bool = False

    def __post_init__(self) -> None:
        for name, largest in {"jitter": 1, "translate": 1, "degrees": 180}.items():
            if not 0 <= getattr(self, name) <= largest:
                raise ConfigError(f"{name} must lie between 0 and {largest}, not {getattr(self, name)}.")
        for name in ("crop_padding", "cutout"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be 0 or a number of pixels, not {getattr(self, name)}.")

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Augment B x 3 x H x W images, uint8 or divided by 256 already; returns float32 up to 255/256."""
        return self.apply(images, self.draw(len(images), generator, images.device))

    def draw(self, count: int, generator: torch.Generator, device: torch.device) -> Tensor:
        """The uniform numbers that `apply` takes for so many images."""
        # Also those of parts that are off: it costs nothing to speak of, and switching one part off leaves what
        # the others do unchanged.
        return F.uniform(14 if self.trivial else 11, count, generator, device)

    def apply(self, images: Tensor, draws: Tensor) -> Tensor:
        """Augment with these numbers: no randomness, no device synchronisation, nothing torch.compile cannot trace."""
        if images.ndim != 4 or images.shape[1] != 3:
            raise ConfigError(f"images must be a batch B x 3 x H x W, not of shape {tuple(images.shape)}.")
        height, width = images.shape[-2:]
        flipped = draws[2] < 0.5 if self.flip else None
        if self.crop_padding:
            offsets_y, offsets_x = (draws[0:2] * (2 * self.crop_padding + 1)).long()
            images = F.crop(images, offsets_y, offsets_x, self.crop_padding, flipped)
        elif flipped is not None:
            images = F.flip(images, flipped)
        if self.trivial:
            # On the CPU there is nothing to wait for.
            sort = images.device.type == "cpu" and not torch.compiler.is_compiling()
            images = trivial_augment(_levels(images), *choose(draws[11:14]), sort=sort)
        images = _floats(images)
        if self.jitter:
            # In a fixed order: but for the clamping the three commute (all are linear, and the last two
            # keep the mean grey), so a drawn order would change next to nothing.
            factors = 1 + self.jitter * (2 * draws[3:6] - 1)
            images = F.adjust_brightness(images, factors[0])
            images = F.adjust_contrast(images, factors[1])
            images = F.adjust_saturation(images, factors[2])
        if self.degrees or self.translate:
            # Crop and flip moved whole pixels, so that this is the one time that pixels are interpolated.
            signed = 2 * draws[6:9] - 1
            shift_x = (signed[1] * (self.translate * width)).round_()
            shift_y = (signed[2] * (self.translate * height)).round_()
            images = F.affine(images, signed[0] * self.degrees, shift_x, shift_y)
        if self.cutout:
            centre_y, centre_x = (draws[9] * height).long(), (draws[10] * width).long()
            images = F.cutout(images, centre_y, centre_x, self.cutout)
        return images


def _floats(images: Tensor) -> Tensor:
    return images * (1 / 256) if images.dtype == torch.uint8 else images.float()


def _levels(images: Tensor) -> Tensor:
    return images if images.dtype == torch.uint8 else (images * 256).round().clamp(0, 255).to(torch.uint8)
