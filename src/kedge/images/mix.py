"""CutMix and mixup: mixing two images of a batch, and how much of its own each image keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kedge.errors import ConfigError
from kedge.images.augment import box_mask, uniform

__all__ = ["Mixed", "Mixing", "cutmix", "mixup"]


class Mixed(NamedTuple):
    """Images, for each the index of the image that was mixed in, and the share that is still its own."""

    images: Tensor
    partners: Tensor
    weights: Tensor


def cutmix(images: Tensor, others: Tensor, shares: Tensor, center_y: Tensor, center_x: Tensor) -> tuple[Tensor, Tensor]:
    """Put a rectangle of ``others[i]`` into each image, around a centre and cut off at the edge; the share that stays.

    The rectangle has the image's proportions and, uncut, shares[i] of its area, rounded down to whole pixels.
    """
    height, width = images.shape[-2:]
    side = shares.sqrt() / 2
    half_y, half_x = (side * height).long(), (side * width).long()
    top, bottom = (center_y - half_y).clamp(min=0), (center_y + half_y).clamp(max=height)
    left, right = (center_x - half_x).clamp(min=0), (center_x + half_x).clamp(max=width)
    mixed = torch.where(box_mask(images, top, bottom, left, right), others, images)
    return mixed, 1 - (bottom - top) * (right - left) / (height * width)


def mixup(images: Tensor, others: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Blend each image with ``others[i]``, of which it gets shares[i]; the share that stays."""
    return torch.lerp(images, others, shares[:, None, None, None].to(images.dtype)), 1 - shares


@dataclass(frozen=True)
class Mixing:
    """Random pairs of a batch, drawn per image from a generator.

    ``cutmix``: share of the images that get a rectangle of another one. ``mixup``: share of the images that are
    blended with another one. How much of the other is drawn evenly from nothing to all.
    """

    cutmix: float = 0.0
    mixup: float = 0.0

    def __post_init__(self) -> None:
        for name in ("cutmix", "mixup"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must lie between 0 and 1, not {getattr(self, name)}.")
        if self.cutmix + self.mixup > 1:
            raise ConfigError(f"cutmix and mixup must not exceed 1 together, not {self.cutmix} and {self.mixup}.")

    def __call__(self, images: Tensor, generator: torch.Generator) -> Mixed:
        """Mix B x C x H x W images; with nothing to mix they come back as they are, and nothing is drawn."""
        return self.apply(images, self.draw(len(images), generator, images.device))

    def draw(self, count: int, generator: torch.Generator, device: torch.device) -> Tensor:
        """The uniform numbers that `apply` takes for so many images."""
        return uniform(5 if self.cutmix or self.mixup else 0, count, generator, device)

    def apply(self, images: Tensor, draws: Tensor) -> Mixed:
        """Mix with these numbers: no randomness, no device synchronisation, nothing torch.compile cannot trace."""
        if images.ndim != 4 or not images.is_floating_point():
            raise ConfigError(
                f"images must be floats B x C x H x W, not {images.dtype} of shape {tuple(images.shape)}."
            )
        count, _, height, width = images.shape
        own = torch.arange(count, device=images.device)
        weights = torch.ones(count, device=images.device)
        if not (self.cutmix or self.mixup):
            return Mixed(images, own, weights)
        kind, partner, shares, y, x = draws
        cut, both = kind < self.cutmix, kind < self.cutmix + self.mixup
        # Any of the others, each as likely; an image that is alone is its own partner.
        partners = torch.where(both, (own + 1 + (partner * (count - 1)).long()) % count, own)
        others = images[partners]
        if self.mixup:
            images, weights = mixup(images, others, torch.where(both & ~cut, shares, 0))
        if self.cutmix:
            center_y, center_x = (y * height).long(), (x * width).long()
            images, left = cutmix(images, others, torch.where(cut, shares, 0), center_y, center_x)
            weights = weights * left
        return Mixed(images, partners, weights)
