"""Augmentation of whole batches, on whatever device they are on, with other parameters for every image.

Each change is a pure function with explicit parameters; ``Augmentation`` draws them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kedge.errors import ConfigError

__all__ = [
    "WHITE",
    "Augmentation",
    "adjust_brightness",
    "adjust_contrast",
    "adjust_saturation",
    "affine",
    "crop",
    "cutout",
    "flip",
]

WHITE = 255 / 256
"""The value of a white pixel: pixels are divided by 256."""


def crop(images: Tensor, offsets_y: Tensor, offsets_x: Tensor, padding: int) -> Tensor:
    """Pad with zeros and cut the original size out again, image i from row and column offsets[i]."""
    count, channels, height, width = images.shape
    padded = F.pad(images, (padding, padding, padding, padding))
    device = images.device
    rows = offsets_y[:, None] + torch.arange(height, device=device)
    columns = offsets_x[:, None] + torch.arange(width, device=device)
    return padded[
        torch.arange(count, device=device)[:, None, None, None],
        torch.arange(channels, device=device)[:, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]


def flip(images: Tensor, mask: Tensor) -> Tensor:
    """Mirror left and right the images where ``mask`` is true."""
    return torch.where(mask[:, None, None, None], images.flip(-1), images)


def affine(images: Tensor, degrees: Tensor, shift_x: Tensor, shift_y: Tensor) -> Tensor:
    """Rotate clockwise about the centre, then shift (in pixels), in one bilinear resampling over zeros."""
    height, width = images.shape[-2:]
    radians = degrees * (math.pi / 180)
    cos, sin = radians.cos(), radians.sin()
    # Where each output pixel comes from, in affine_grid's coordinates: -1 to 1 across either side.
    from_x = torch.stack([cos, sin * (height / width), -(cos * shift_x + sin * shift_y) * (2 / width)], dim=1)
    from_y = torch.stack([-sin * (width / height), cos, (sin * shift_x - cos * shift_y) * (2 / height)], dim=1)
    matrices = torch.stack([from_x, from_y], dim=1).to(images.dtype)
    grid = F.affine_grid(matrices, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def adjust_brightness(images: Tensor, factors: Tensor, white: float = WHITE) -> Tensor:
    """Blend with black: 0 is black, 1 the same, 2 twice as bright (up to ``white``)."""
    return (images * factors[:, None, None, None]).clamp_(0, white)


def adjust_contrast(images: Tensor, factors: Tensor, white: float = WHITE) -> Tensor:
    """Blend with the image's mean grey: 0 is that grey, 1 the same, 2 twice the contrast."""
    return _blend(_grey(images).mean(dim=(-2, -1), keepdim=True), images, factors, white)


def adjust_saturation(images: Tensor, factors: Tensor, white: float = WHITE) -> Tensor:
    """Blend with the grey image: 0 is grey, 1 the same, 2 twice the saturation."""
    return _blend(_grey(images), images, factors, white)


def cutout(images: Tensor, centre_y: Tensor, centre_x: Tensor, size: int) -> Tensor:
    """Blacken a square of ``size`` pixels around a centre, the part of it that lies inside the image."""
    height, width = images.shape[-2:]
    rows = torch.arange(height, device=images.device) - (centre_y - size // 2)[:, None]
    columns = torch.arange(width, device=images.device) - (centre_x - size // 2)[:, None]
    inside_rows, inside_columns = (rows >= 0) & (rows < size), (columns >= 0) & (columns < size)
    return images.masked_fill((inside_rows[:, :, None] & inside_columns[:, None, :])[:, None], 0)


@dataclass(frozen=True)
class Augmentation:
    """Random changes of a batch, drawn per image from a generator; a part set to zero or False is skipped.

    ``crop_padding``: pixels of zero padding before a random crop. ``flip``: mirror half of the images.
    ``jitter``: brightness, contrast and saturation factors within 1 ± jitter. ``degrees``: rotation within
    ± degrees. ``translate``: shift within ± this fraction of the side. ``cutout``: side of a black square
    in pixels. ``trivial``: torchvision's TrivialAugmentWide, image by image.
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
        if images.ndim != 4 or images.shape[1] != 3:
            raise ConfigError(f"images must be a batch B x 3 x H x W, not of shape {tuple(images.shape)}.")
        height, width = images.shape[-2:]
        # All numbers in one draw and one transfer, also those of parts that are off: it costs nothing
        # to speak of, and switching one part off leaves what the others do unchanged.
        draws = torch.rand(11, len(images), generator=generator, device=generator.device)
        draws = draws.to(images.device, non_blocking=True)
        crop_draws, flip_draw, jitter_draws = draws[0:2], draws[2], draws[3:6]
        angle_draw, shift_draws, cutout_draws = draws[6], draws[7:9], draws[9:11]

        if self.crop_padding:
            offsets = (crop_draws * (2 * self.crop_padding + 1)).long()
            images = crop(images, offsets[0], offsets[1], self.crop_padding)
        if self.flip:
            images = flip(images, flip_draw < 0.5)
        if self.trivial:
            images = _trivial(images, generator)
        images = images.float() / 256 if images.dtype == torch.uint8 else images.float()
        if self.jitter:
            # In a fixed order: but for the clamping the three commute (all are linear, and the last two
            # keep the mean grey), so a drawn order would change next to nothing.
            factors = 1 + self.jitter * (2 * jitter_draws - 1)
            images = adjust_brightness(images, factors[0])
            images = adjust_contrast(images, factors[1])
            images = adjust_saturation(images, factors[2])
        if self.degrees or self.translate:
            shifts = self.translate * (2 * shift_draws - 1)
            images = affine(images, self.degrees * (2 * angle_draw - 1), shifts[0] * width, shifts[1] * height)
        if self.cutout:
            centre_y, centre_x = (cutout_draws[0] * height).long(), (cutout_draws[1] * width).long()
            images = cutout(images, centre_y, centre_x, self.cutout)
        return images


def _grey(images: Tensor) -> Tensor:
    red, green, blue = images.unbind(dim=1)
    return (0.2989 * red + 0.587 * green + 0.114 * blue)[:, None]


def _blend(other: Tensor, images: Tensor, factors: Tensor, white: float) -> Tensor:
    return torch.lerp(other, images, factors[:, None, None, None]).clamp_(0, white)


def _trivial(images: Tensor, generator: torch.Generator) -> Tensor:
    from torchvision.transforms import v2  # takes a second to import, and little needs it

    if images.dtype != torch.uint8:
        images = (images * 256).round().clamp(0, 255).to(torch.uint8)
    seed = int(torch.randint(2**31, (1,), generator=generator, device=generator.device))
    transform = v2.TrivialAugmentWide()
    # torchvision draws from the CPU's global generator, so that one alone is borrowed and put back.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return torch.stack([transform(image) for image in images])
