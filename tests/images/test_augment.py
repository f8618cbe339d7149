from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torchvision.transforms import functional as TF1
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as TF

from kedge.errors import ConfigError
from kedge.images import Augmentation
from kedge.images import augment as A

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
    return pixels.float() / 256


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


def test_crop_that_flips(pixels: Tensor) -> None:
    mask = torch.arange(len(pixels)) % 2 == 0
    zeros, offsets = torch.zeros(len(pixels), dtype=torch.long), torch.arange(len(pixels))

    def flip(batch: Tensor) -> Tensor:
        return each(lambda image, on: TF.horizontal_flip(image) if on else image, batch, mask)

    assert torch.equal(A.crop(pixels, zeros, zeros, 0, mask), flip(pixels))
    assert torch.equal(A.crop(pixels, offsets, zeros, 4, mask), flip(A.crop(pixels, offsets, zeros, 4)))


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


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_colours(images: Tensor, name: str) -> None:
    neutral = torch.ones(len(images))
    factors = torch.linspace(0, 2, len(images))
    expected = each(getattr(TF, f"adjust_{name}"), images, factors).clamp(max=A.WHITE)
    parts = dict.fromkeys(("brightness", "contrast", "saturation"), neutral) | {name: factors}
    torch.testing.assert_close(A.adjust_colors(images, **parts), expected, atol=1e-5, rtol=0)


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


def test_all_parts_in_their_order(pixels: Tensor) -> None:
    """Image by image with torchvision, with the parameters that the numbers stand for."""
    count, _, height, width = pixels.shape
    augmentation = Augmentation(crop_padding=3, jitter=0.2, degrees=25.0, translate=0.2, cutout=5)
    draws = augmentation.draw(count, generator(8), pixels.device)
    found = augmentation.apply(pixels, draws)
    for image, result, numbers in zip(pixels, found, draws.T.tolist(), strict=True):
        y, x, mirror, brightness, contrast, saturation, angle, shift_x, shift_y, hole_y, hole_x = numbers
        expected = TF.crop(TF.pad(image, [3]), int(y * 7), int(x * 7), height, width).float() / 256
        expected = TF.horizontal_flip(expected) if mirror < 0.5 else expected
        changes = TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation
        for change, number in zip(changes, (brightness, contrast, saturation), strict=True):
            expected = change(expected, 0.8 + 0.4 * number).clamp(max=255 / 256)
        shifts = [round(0.2 * width * (2 * shift_x - 1)), round(0.2 * height * (2 * shift_y - 1))]
        bilinear = TF1.InterpolationMode.BILINEAR
        expected = TF1.affine(expected, 25 * (2 * angle - 1), shifts, 1.0, [0.0, 0.0], bilinear)
        top, left = int(hole_y * height) - 2, int(hole_x * width) - 2
        expected[:, max(top, 0) : top + 5, max(left, 0) : left + 5] = 0
        torch.testing.assert_close(result, expected, atol=2e-5, rtol=0)


def test_nothing_divides_by_256(pixels: Tensor) -> None:
    assert torch.equal(NOTHING(pixels, generator()), pixels.float() / 256)
    assert torch.equal(NOTHING(pixels.float() / 256, generator()), pixels.float() / 256)


EVERYTHING = [Augmentation(jitter=0), Augmentation(cutout=8), Augmentation(), Augmentation(trivial=True)]


@pytest.mark.parametrize("augmentation", EVERYTHING)
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
    only(degrees=10.0, translate=0.25)(torch.zeros(8000, 3, 8, 16, dtype=torch.uint8), generator())
    degrees, *shifts = drawn[0]
    assert 9.9 < degrees.abs().max() <= 10
    assert degrees.mean().abs() < 0.2
    assert (degrees.std() - 10 / 3**0.5).abs() < 0.1
    for values, limit in zip(shifts, (4, 2), strict=True):  # a quarter of 16 and of 8
        found, counts = values.unique(return_counts=True)
        assert found.tolist() == list(range(-limit, limit + 1))
        inner, outer = counts[1:-1] / 8000, counts[[0, -1]] / 8000
        assert (inner - 1 / (2 * limit)).abs().max() < 0.02  # numbers in between are rounded to these
        assert (outer - 1 / (4 * limit)).abs().max() < 0.02


def distance(first: Tensor, second: Tensor) -> float:
    """Largest difference of the two cumulative distributions (Kolmogorov and Smirnov)."""
    values = torch.cat([first, second]).unique()
    shares = [torch.searchsorted(sample.sort().values, values, right=True) / len(sample) for sample in (first, second)]
    return (shares[0] - shares[1]).abs().max().item()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (only(crop_padding=3), v2.RandomCrop(12, padding=3)),
        (only(flip=True), v2.RandomHorizontalFlip()),
        (only(jitter=0.4), v2.ColorJitter(0.4, 0.4, 0.4)),
        # Without a fill colour: with one, torchvision darkens the edge twice.
        (only(degrees=40.0), v2.RandomAffine(40, interpolation=v2.InterpolationMode.BILINEAR, fill=None)),
        (only(translate=0.3), v2.RandomAffine(0, (0.3, 0.3), fill=None)),
        (only(trivial=True), v2.TrivialAugmentWide()),
    ],
    ids=["crop", "flip", "jitter", "degrees", "translate", "trivial"],
)
def test_distributed_as_in_torchvision(ours: Augmentation, theirs: v2.Transform) -> None:
    count = 1000
    image = torch.randint(0, 256, (3, 12, 12), dtype=torch.uint8, generator=generator(4)) // 2 + 30
    with torch.random.fork_rng():
        torch.manual_seed(0)
        expected = torch.stack([theirs(image) for _ in range(count)]).float() / 256
    found = ours(image.expand(count, -1, -1, -1), generator(5))
    # Distributions of some mixtures of the pixels; those of twice 1,000 draws stay below 0.087 in 999 of 1,000 cases.
    mixtures = torch.randn(10, image.numel(), generator=generator(6)).relu()
    for weights in mixtures:
        assert distance(found.flatten(1) @ weights, expected.flatten(1) @ weights) < 0.09


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


@pytest.mark.parametrize("augmentation", EVERYTHING)
def test_reduced_precision_of_the_network_leaves_it_alone(pixels: Tensor, augmentation: Augmentation) -> None:
    expected = augmentation(pixels, generator())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(augmentation(pixels, generator()), expected)


@pytest.mark.parametrize("augmentation", EVERYTHING[1::2])
def test_can_be_traced(augmentation: Augmentation) -> None:
    pixels = torch.randint(0, 256, (5, 3, 17, 24), dtype=torch.uint8, generator=generator(1))
    draws = augmentation.draw(len(pixels), generator(), pixels.device)
    traced = torch.compile(augmentation.apply, backend="eager", fullgraph=True)
    torch.testing.assert_close(traced(pixels, draws), augmentation.apply(pixels, draws), atol=1e-6, rtol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("augmentation", EVERYTHING)
def test_gpu_does_as_the_cpu(pixels: Tensor, augmentation: Augmentation) -> None:
    on_gpu = augmentation(pixels.cuda(), generator())
    assert on_gpu.is_cuda
    torch.testing.assert_close(on_gpu.cpu(), augmentation(pixels, generator()), atol=1e-2, rtol=0)
    own = torch.Generator("cuda").manual_seed(0)
    assert augmentation(pixels.cuda(), own).shape == pixels.shape


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("augmentation", EVERYTHING)
def test_gpu_is_never_waited_for(augmentation: Augmentation) -> None:
    images = torch.zeros(64, 3, 32, 32, dtype=torch.uint8, device="cuda")
    own = torch.Generator("cuda").manual_seed(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        augmentation(images, own)
        augmentation(images, generator())
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
