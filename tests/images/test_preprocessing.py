from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as TF

from kedge.errors import ConfigError
from kedge.images import IMAGENET_MEAN, IMAGENET_STD, Preprocessing


def smooth(width: int, height: int) -> Image.Image:
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(noise).filter(ImageFilter.GaussianBlur(3))


@pytest.mark.parametrize(("width", "height"), [(300, 200), (200, 300), (640, 480), (64, 64), (50, 90), (224, 224)])
def test_same_picture_as_resize_then_centre_crop(width: int, height: int) -> None:
    image = smooth(width, height)
    expected = v2.Compose([v2.Resize(96), v2.CenterCrop(96), v2.PILToTensor()])(image)
    pixels = Preprocessing(size=96).to_pixels(image)
    assert pixels.dtype == np.uint8
    assert pixels.shape == (3, 96, 96)
    # torchvision rounds the longer side and the crop to whole pixels: half a pixel on a smooth picture.
    assert np.abs(pixels.astype(int) - expected.numpy()).mean() < 1.5


def test_squares_are_resized_exactly_as_pillow_does() -> None:
    image = smooth(130, 130)
    expected = np.asarray(image.resize((64, 64), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    assert np.array_equal(Preprocessing(size=64).to_pixels(image), expected)


def test_without_a_size_nothing_is_resized() -> None:
    image = smooth(31, 17)
    assert np.array_equal(Preprocessing(size=None).to_pixels(image), np.asarray(image).transpose(2, 0, 1))
    assert Preprocessing(size=None).to_pixels(image.convert("L")).shape == (3, 17, 31)


@pytest.mark.parametrize("size", [(1, 60000), (60000, 1), (1, 1)])
@pytest.mark.parametrize("options", [{}, {"crop_pct": 0.9, "interpolation": "bicubic"}])
def test_extreme_shapes(size: tuple[int, int], options: dict[str, Any]) -> None:
    assert Preprocessing(size=224, **options).to_pixels(Image.new("RGB", size, "red"))[0].min() == 255


def test_to_input_scales_and_normalizes() -> None:
    pixels = torch.randint(0, 256, (4, 3, 5, 6), dtype=torch.uint8)
    assert torch.equal(Preprocessing(size=None).to_input(pixels), pixels.float() / 256)
    standard = Preprocessing(size=None, mean=IMAGENET_MEAN, std=IMAGENET_STD)
    expected = TF.normalize(pixels.float() / 256, list(IMAGENET_MEAN), list(IMAGENET_STD))
    for given in (pixels, pixels.float(), pixels.double(), pixels.half()):
        result = standard.to_input(given)
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, expected)
    torch.testing.assert_close(standard.normalize(pixels.float() / 256), expected)


@pytest.mark.parametrize("side", [8, 32, 50])
def test_fit_resizes_as_torchvision_does(side: int) -> None:
    images = torch.rand(2, 3, 32, 32)
    expected = TF.resize(images, [side, side], antialias=True)
    torch.testing.assert_close(Preprocessing(size=side).resize(images), expected)
    torch.testing.assert_close(Preprocessing(size=side).to_input(images * 256), expected)


def test_normalise_leaves_its_input_alone() -> None:
    pixels = torch.full((1, 3, 2, 2), 128.0)
    Preprocessing(mean=IMAGENET_MEAN, std=IMAGENET_STD).to_input(pixels)
    assert pixels.eq(128).all()


@pytest.mark.parametrize(
    "given",
    [
        Preprocessing(),
        Preprocessing(None, IMAGENET_MEAN, IMAGENET_STD, 1 / 255, flip_tta=True),
        Preprocessing(crop_pct=0.875, interpolation="bicubic"),
    ],
)
def test_json_round_trip(given: Preprocessing) -> None:
    assert Preprocessing.from_json(json.loads(json.dumps(given.to_json()))) == given


def test_settings_that_0_1_did_not_have_are_written_only_where_they_differ() -> None:
    """They are part of a model's fingerprint."""
    assert set(Preprocessing().to_json()) == {"size", "mean", "std", "scale"}


@pytest.mark.parametrize(
    "bad",
    [
        {"size": 0},
        {"scale": 0.0},
        {"mean": IMAGENET_MEAN},
        {"std": IMAGENET_STD},
        {"mean": (0.5,), "std": (0.5,)},
        {"mean": IMAGENET_MEAN, "std": (1.0, 0.0, 1.0)},
        {"crop_pct": 0.0},
        {"crop_pct": 1.5},
        {"interpolation": "nearest"},
    ],
)
def test_bad_settings(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Preprocessing(**bad)


def test_unknown_setting_in_json() -> None:
    with pytest.raises(ConfigError, match="'crop'"):
        Preprocessing.from_json({"crop": 1})


@pytest.mark.parametrize("shape", [(20, 12), (12, 20), (13, 20)])
def test_batches_and_pictures_lose_the_same_borders(shape: tuple[int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    side = min(shape)
    preprocessing = Preprocessing(size=side)
    one = preprocessing.to_pixels(Image.fromarray(pixels))
    batch = torch.from_numpy(pixels.transpose(2, 0, 1)[None].copy()).float()
    assert preprocessing.resize(batch).shape == (1, 3, side, side)
    if (max(shape) - side) % 2 == 0:  # otherwise one of them cuts half a pixel
        assert np.array_equal(preprocessing.resize(batch)[0].numpy(), one)
