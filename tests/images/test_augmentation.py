from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torchvision.transforms import functional as TF1
from torchvision.transforms.v2 import functional as TF

from kedge.errors import ConfigError
from kedge.images import Augmentation
from kedge.images import augmentation as A

NOTHING = Augmentation(crop_padding=0, flip=False, jitter=0, degrees=0, translate=0)


def only(**parts: object) -> Augmentation:
    return Augmentation(**{"crop_padding": 0, "flip": False, "jitter": 0, "degrees": 0, "translate": 0} | parts)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(params=[(6, 3, 32, 32), (5, 3, 17, 24)], ids=["square", "oblong"])
def pixels(request: pytest.FixtureRequest) -> Tensor:
    return torch.randint(0, 256, request.param, dtype=torch.uint8, generator=generator(1))


@pytest.fixture
def images(pixels: Tensor) -> Tensor:
    return pixels.float() / 255


def each(function, images: Tensor, *parameters: Tensor) -> Tensor:
    rows = zip(images, *(values.tolist() for values in parameters), strict=True)
    return torch.stack([function(*row) for row in rows])


def test_crop(pixels: Tensor) -> None:
    height, width = pixels.shape[-2:]
    y = torch.randint(0, 9, (len(pixels),), generator=generator(2))
    x = torch.randint(0, 9, (len(pixels),), generator=generator(3))
    for batch in (pixels, pixels.float()):
        expected = each(lambda i, top, left: TF.crop(TF.pad(i, [4]), top, left, height, width), batch, y, x)
        assert torch.equal(A.crop(batch, y, x, 4), expected)


def test_flip(pixels: Tensor) -> None:
    mask = torch.arange(len(pixels)) % 2 == 0
    expected = each(lambda image, on: TF.horizontal_flip(image) if on else image, pixels, mask)
    assert torch.equal(A.flip(pixels, mask), expected)


def test_affine(images: Tensor) -> None:
    degrees = torch.linspace(-170, 170, len(images))
    shift_x = torch.linspace(-6, 5, len(images)).round()
    shift_y = torch.linspace(4, -3, len(images)).round()
    expected = each(
        lambda image, angle, x, y: TF1.affine(
            image, angle, [int(x), int(y)], 1.0, [0.0, 0.0], TF1.InterpolationMode.BILINEAR
        ),
        images,
        degrees,
        shift_x,
        shift_y,
    )
    torch.testing.assert_close(A.affine(images, degrees, shift_x, shift_y), expected, atol=1e-5, rtol=0)


def test_affine_of_nothing_is_the_image(images: Tensor) -> None:
    zeros = torch.zeros(len(images))
    torch.testing.assert_close(A.affine(images, zeros, zeros, zeros), images, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["adjust_brightness", "adjust_contrast", "adjust_saturation"])
def test_colours(images: Tensor, name: str) -> None:
    factors = torch.linspace(0, 2, len(images))
    expected = each(getattr(TF, name), images, factors)
    torch.testing.assert_close(getattr(A, name)(images, factors, white=1.0), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [1, 5, 8, 100])
def test_cutout(images: Tensor, size: int) -> None:
    height, width = images.shape[-2:]
    y = torch.linspace(0, height - 1, len(images)).long()
    x = torch.linspace(width - 1, 0, len(images)).long()
    expected = images.clone()
    for image, row, column in zip(expected, y.tolist(), x.tolist(), strict=True):
        top, left = row - size // 2, column - size // 2
        image[:, max(top, 0) : max(top + size, 0), max(left, 0) : max(left + size, 0)] = 0
    assert torch.equal(A.cutout(images, y, x, size), expected)


def test_nothing_divides_by_256(pixels: Tensor) -> None:
    assert torch.equal(NOTHING(pixels, generator()), pixels.float() / 256)
    assert torch.equal(NOTHING(pixels.float() / 256, generator()), pixels.float() / 256)


@pytest.mark.parametrize("augmentation", [Augmentation(), Augmentation(cutout=8), Augmentation(trivial=True)])
def test_reproducible_and_in_range(pixels: Tensor, augmentation: Augmentation) -> None:
    first, again = augmentation(pixels, generator(5)), augmentation(pixels, generator(5))
    assert first.dtype == torch.float32
    assert first.shape == pixels.shape
    assert first.min() >= 0
    assert first.max() <= 255 / 256
    assert torch.equal(first, again)
    assert not torch.equal(first, augmentation(pixels, generator(6)))
    moving = generator(5)
    augmentation(pixels, moving)
    assert not torch.equal(first, augmentation(pixels, moving))


@pytest.mark.parametrize(
    "augmentation",
    [only(crop_padding=4), only(jitter=0.3), only(degrees=30.0), only(translate=0.3), only(cutout=8)],
)
def test_images_of_one_batch_differ(augmentation: Augmentation) -> None:
    one = torch.randint(0, 256, (1, 3, 16, 16), dtype=torch.uint8, generator=generator())
    results = augmentation(one.expand(32, -1, -1, -1), generator())
    assert len(results.flatten(1).unique(dim=0)) >= 16


def test_input_is_left_alone(pixels: Tensor) -> None:
    floats = pixels.float() / 256
    before = floats.clone()
    Augmentation(cutout=8)(floats, generator())
    assert torch.equal(floats, before)


def test_crop_offsets_are_uniform() -> None:
    padding, side = 2, 5
    image = torch.arange(1, side * side + 1, dtype=torch.uint8).reshape(1, 1, side, side).expand(5000, 3, -1, -1)
    results = only(crop_padding=padding)(image, generator()) * 256
    centre = results[:, 0, side // 2, side // 2]  # always inside the picture: it tells the offset
    counts = torch.stack([(centre == value).sum() for value in image[0, 0].flatten()])
    assert counts.sum() == 5000
    assert counts.min() > 140  # 200 expected, standard deviation 14
    assert counts.max() < 260


def test_half_of_the_images_are_flipped() -> None:
    image = torch.tensor([10, 20], dtype=torch.uint8).reshape(1, 1, 1, 2).expand(4000, 3, -1, -1)
    flipped = only(flip=True)(image, generator())[:, 0, 0, 0] * 256 == 20
    assert 0.46 < flipped.float().mean() < 0.54


def test_brightness_factors_fill_their_range() -> None:
    grey = torch.full((4000, 3, 2, 2), 100, dtype=torch.uint8)  # contrast and saturation leave it as it is
    factors = only(jitter=0.2)(grey, generator())[:, 0, 0, 0] * 256 / 100
    assert 0.8 <= factors.min() < 0.801 + 1e-3
    assert 1.2 + 1e-3 >= factors.max() > 1.199 - 1e-3
    assert factors.mean().sub(1).abs() < 0.01
    assert factors.std().sub(0.4 / 12**0.5).abs() < 0.005


def test_shifts_and_angles_fill_their_range(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[Tensor, ...]] = []
    monkeypatch.setattr(A, "affine", lambda images, *parameters: drawn.append(parameters) or images)
    only(degrees=10.0, translate=0.25)(torch.zeros(4000, 3, 8, 16, dtype=torch.uint8), generator())
    for values, limit in zip(drawn[0], (10, 4, 2), strict=True):  # degrees, a quarter of 16 and of 8
        assert values.abs().max() <= limit
        assert values.abs().max() > 0.99 * limit
        assert values.mean().abs() < 0.05 * limit
        assert (values.std() - limit / 3**0.5).abs() < 0.02 * limit


def test_cutout_centres_reach_every_pixel() -> None:
    white = torch.full((4000, 3, 4, 6), 255, dtype=torch.uint8)
    holes = only(cutout=1)(white, generator())[:, 0] == 0
    assert holes.flatten(1).sum(1).eq(1).all()
    assert holes.sum(0).min() > 100  # 167 expected, standard deviation 13


def test_switching_a_part_off_leaves_the_others_as_they_were(pixels: Tensor) -> None:
    both = only(crop_padding=4, cutout=6)(pixels, generator())
    crop_only = only(crop_padding=4)(pixels, generator())
    hole = both != crop_only
    assert torch.equal(both[~hole], crop_only[~hole])
    assert both[hole].eq(0).all()


def test_trivial_leaves_the_global_generator_alone(pixels: Tensor) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    only(trivial=True)(pixels, generator())
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("augmentation", [Augmentation(cutout=8), Augmentation(trivial=True)])
def test_gpu_does_as_the_cpu(pixels: Tensor, augmentation: Augmentation) -> None:
    on_gpu = augmentation(pixels.cuda(), generator())
    assert on_gpu.is_cuda
    torch.testing.assert_close(on_gpu.cpu(), augmentation(pixels, generator()), atol=1e-2, rtol=0)
    own = torch.Generator("cuda").manual_seed(0)
    assert augmentation(pixels.cuda(), own).shape == pixels.shape


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_is_never_waited_for() -> None:
    images = torch.zeros(64, 3, 32, 32, dtype=torch.uint8, device="cuda")
    own = torch.Generator("cuda").manual_seed(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        Augmentation(cutout=8)(images, own)
        Augmentation(cutout=8)(images, generator())
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "bad", [{"jitter": 1.5}, {"translate": -0.1}, {"degrees": 181}, {"crop_padding": -1}, {"cutout": -1}]
)
def test_bad_settings(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Augmentation(**bad)


def test_bad_batches() -> None:
    with pytest.raises(ConfigError, match=r"B x 3 x H x W, not of shape \(3, 8, 8\)"):
        Augmentation()(torch.zeros(3, 8, 8), generator())
