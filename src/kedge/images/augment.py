"""Random augmentation of a batch on any device, with other parameters for every image.

Coordinates are computed pixel by pixel and not with matrix products, which would lose digits to the reduced precision
that training allows for those.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kedge.errors import ConfigError
from kedge.images.trivial_augment import choose, from_center, gather_pixels, grayscale, trivial_augment

__all__ = ["Augmentation", "adjust_colors", "affine", "box_mask", "crop", "cutout", "uniform"]

WHITE = 255 / 256
"""The value of a white pixel: pixels are divided by 256."""
_LARGEST = {"jitter": 1, "translate": 1, "degrees": 180, "crop_padding": math.inf, "cutout": math.inf}


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
        for name, largest in _LARGEST.items():
            if not 0 <= getattr(self, name) <= largest:
                allowed = "not be negative" if largest == math.inf else f"lie between 0 and {largest}"
                raise ConfigError(f"{name} must {allowed}, found {getattr(self, name)}.")

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Augment B x 3 x H x W images, uint8 or divided by 256 already; returns float32 up to 255/256."""
        return self.apply(images, self.draw(len(images), generator, images.device))

    def draw(self, count: int, generator: torch.Generator, device: torch.device) -> Tensor:
        """The uniform numbers that `apply` takes for so many images."""
        # Also those of parts that are off: it costs nothing to speak of, and switching one part off leaves what
        # the others do unchanged.
        return uniform(14 if self.trivial else 11, count, generator, device)

    def apply(self, images: Tensor, draws: Tensor) -> Tensor:
        """Augment with these numbers: no randomness, no device synchronisation, nothing torch.compile cannot trace."""
        if images.ndim != 4 or images.shape[1] != 3:
            raise ConfigError(f"images must be a batch B x 3 x H x W, not of shape {tuple(images.shape)}.")
        height, width = images.shape[-2:]
        if self.crop_padding or self.flip:
            offsets_y, offsets_x = (draws[0:2] * (2 * self.crop_padding + 1)).long()
            images = crop(images, offsets_y, offsets_x, self.crop_padding, draws[2] < 0.5 if self.flip else None)
        if self.trivial:
            if images.dtype != torch.uint8:
                images = (images * 256).round().clamp(0, 255).to(torch.uint8)
            images = trivial_augment(images, *choose(draws[11:14]))
        images = images * (1 / 256) if images.dtype == torch.uint8 else images.float()
        if self.jitter:
            images = adjust_colors(images, *(1 + self.jitter * (2 * draws[3:6] - 1)))
        if self.degrees or self.translate:
            # Crop and flip moved whole pixels, so that this is the one time that pixels are interpolated.
            signed = 2 * draws[6:9] - 1
            shift_x = (signed[1] * (self.translate * width)).round_()
            shift_y = (signed[2] * (self.translate * height)).round_()
            images = affine(images, signed[0] * self.degrees, shift_x, shift_y)
        if self.cutout:
            images = cutout(images, (draws[9] * height).long(), (draws[10] * width).long(), self.cutout)
        return images


def uniform(rows: int, count: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Rows of ``count`` numbers from [0, 1), drawn on the generator's device, without synchronisation."""
    pinned = device.type == "cuda" and generator.device.type == "cpu"
    draws = torch.rand(rows, count, generator=generator, device=generator.device, pin_memory=pinned)
    return draws.to(device, non_blocking=True)


def crop(images: Tensor, offsets_y: Tensor, offsets_x: Tensor, padding: int, flipped: Tensor | None = None) -> Tensor:
    """Pad with zeros and cut the original size out again, image i from row and column offsets[i].

    Where ``flipped`` is true, what was cut out is flipped left to right.
    """
    height, width = images.shape[-2:]
    rows = torch.arange(height, device=images.device)[:, None]
    columns = torch.arange(width, device=images.device)
    if flipped is not None:
        columns = torch.where(flipped[:, None, None], columns.flip(0), columns)
    return gather_pixels(images, rows + offsets_y[:, None, None], columns + offsets_x[:, None, None], padding)


def affine(images: Tensor, degrees: Tensor, shift_x: Tensor, shift_y: Tensor) -> Tensor:
    """Rotate clockwise about the centre, then shift (in pixels), in one bilinear resampling over zeros."""
    height, width = images.shape[-2:]
    x, y = from_center(images)
    x, y = x - shift_x[:, None, None], y - shift_y[:, None, None]
    radians = (degrees * (math.pi / 180))[:, None, None]
    cos, sin = radians.cos(), radians.sin()
    # Where each output pixel comes from, in grid_sample's coordinates: -1 to 1 across either side.
    from_x, from_y = (cos * x + sin * y) * (2 / width), (cos * y - sin * x) * (2 / height)
    grid = torch.stack([from_x, from_y], dim=-1).to(images.dtype)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def adjust_colors(images: Tensor, brightness: Tensor, contrast: Tensor, saturation: Tensor) -> Tensor:
    """Multiply the pixels, then blend with the image's mean grey, then with the grey image; a factor of 1 is neutral.

    In a fixed order: but for the clamping the three commute (all are linear, and the last two keep the mean grey), so
    that a drawn order would change next to nothing.
    """
    images = (images * brightness[:, None, None, None]).clamp_(0, WHITE)
    mean_grey = grayscale(images).mean(dim=(-2, -1), keepdim=True)
    images = torch.lerp(mean_grey, images, contrast[:, None, None, None]).clamp_(0, WHITE)
    return torch.lerp(grayscale(images), images, saturation[:, None, None, None]).clamp_(0, WHITE)


def cutout(images: Tensor, center_y: Tensor, center_x: Tensor, size: int) -> Tensor:
    """Blacken a square of ``size`` pixels around a centre, the part of it that lies inside the image."""
    top, left = center_y - size // 2, center_x - size // 2
    return images * ~box_mask(images, top, top + size, left, left + size)


def box_mask(images: Tensor, top: Tensor, bottom: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """B x 1 x H x W: true from row ``top`` and column ``left`` up to, not including, ``bottom`` and ``right``."""
    rows, columns = (torch.arange(side, device=images.device) for side in images.shape[-2:])
    in_rows = (rows >= top[:, None]) & (rows < bottom[:, None])
    in_columns = (columns >= left[:, None]) & (columns < right[:, None])
    return (in_rows[:, :, None] & in_columns[:, None, :])[:, None]
