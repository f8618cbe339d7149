from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torchvision.transforms import v2

from kedge.images.trivial_augment import BINS, OPERATIONS, choose, trivial_augment

WIDE = v2.TrivialAugmentWide()


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def magnitude(name: str, bin_: int, negative: bool) -> float:
    magnitudes, signed = WIDE._AUGMENTATION_SPACE[name]
    values = magnitudes(BINS, 0, 0)
    return 0.0 if values is None else float(values[bin_]) * (-1 if signed and negative else 1)


def by_torchvision(image: Tensor, name: str, size: float) -> Tensor:
    return WIDE._apply_image_or_video_transform(image, name, size, WIDE.interpolation, WIDE._fill)


def pictures(count: int, height: int, width: int) -> Tensor:
    """Noise of all levels, of some, of one, and smooth pictures."""
    noise = torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8, generator=generator(1))
    noise[1::4] = noise[1::4] // 3 + 60
    noise[2::4] = noise[2::4, :, :1, :1]
    noise[3::4] = torch.arange(height)[:, None] * 3 + torch.arange(width) * 4
    return noise


def undecided(height: int, width: int, degrees: float) -> Tensor:
    """Pixels of a rotated image that come from half way between two others."""
    angle = math.radians(degrees)
    y = torch.arange(height, dtype=torch.float64)[:, None] - (height - 1) / 2
    x = torch.arange(width, dtype=torch.float64) - (width - 1) / 2
    from_x = math.cos(angle) * x - math.sin(angle) * y + (width - 1) / 2
    from_y = math.sin(angle) * x + math.cos(angle) * y + (height - 1) / 2
    return ((from_x % 1 - 0.5).abs() < 1e-3) | ((from_y % 1 - 0.5).abs() < 1e-3)


def test_the_operations_are_torchvisions() -> None:
    assert sorted(OPERATIONS) == sorted(WIDE._AUGMENTATION_SPACE)
    assert WIDE.num_magnitude_bins == BINS


@pytest.mark.parametrize("size", [(32, 32), (17, 24), (40, 33), (2, 5)])
def test_every_operation_bin_and_sign(size: tuple[int, int]) -> None:
    rows = torch.randperm(len(OPERATIONS) * BINS * 2, generator=generator(2))
    operations, bins, negative = rows // (2 * BINS), rows // 2 % BINS, rows % 2 == 1
    images = pictures(len(rows), *size)
    before = images.clone()
    found = trivial_augment(images, operations, bins, negative)
    assert torch.equal(images, before)
    assert found.dtype == torch.uint8
    off, pixels = dict.fromkeys(OPERATIONS, 0), 0
    for image, result, operation, bin_, sign in zip(
        images, found, operations.tolist(), bins.tolist(), negative.tolist(), strict=True
    ):
        name = OPERATIONS[operation]
        wanted = magnitude(name, bin_, sign)
        difference = (result.int() - by_torchvision(image, name, wanted).int()).abs()
        if name == "Rotate":
            difference = difference.masked_fill(undecided(*size, wanted), 0)
        off[name] += int((difference > 0).sum())
        pixels += difference.numel()
        assert difference.max() <= (1 if name in ("Color", "Contrast", "Sharpness") else 0), (name, wanted)
    assert sum(off.values()) < 1e-3 * pixels, off


def test_images_do_not_depend_on_each_other() -> None:
    images = pictures(28, 16, 16)
    choices = torch.arange(28) % 14, torch.arange(28) + 2, torch.arange(28) % 3 == 0
    together = trivial_augment(images, *choices)
    alone = [trivial_augment(images[i : i + 1], *(values[i : i + 1] for values in choices)) for i in range(28)]
    assert torch.equal(together, torch.cat(alone))


def test_choices_are_uniform_and_independent() -> None:
    count = 200_000
    operations, bins, negative = choose(torch.rand(3, count, generator=generator()))
    cells = len(OPERATIONS) * BINS * 2
    counts = torch.bincount((operations * BINS + bins) * 2 + negative, minlength=cells)
    assert len(counts) == cells
    expected = count / cells
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - (cells - 1)) < 5 * math.sqrt(2 * (cells - 1))
