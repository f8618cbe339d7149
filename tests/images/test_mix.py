from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torchvision.transforms import v2

from kedge.errors import ConfigError
from kedge.images import Mixing
from kedge.images import mix as A


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(params=[(40, 3, 16, 16), (30, 3, 9, 14)], ids=["square", "oblong"])
def images(request: pytest.FixtureRequest) -> Tensor:
    return torch.rand(request.param, generator=generator(1))


def box(share: float, y: int, x: int, height: int, width: int) -> tuple[slice, slice]:
    """The rectangle of the CutMix paper."""
    half_y, half_x = int(height * share**0.5) // 2, int(width * share**0.5) // 2
    return slice(max(y - half_y, 0), min(y + half_y, height)), slice(max(x - half_x, 0), min(x + half_x, width))


def test_cutmix(images: Tensor) -> None:
    count, _, height, width = images.shape
    others = images.flip(0)
    shares = torch.linspace(0, 1, count)
    y, x = torch.arange(count) % height, torch.arange(count) * 5 % width
    mixed, weights = A.cutmix(images, others, shares, y, x)
    for i in range(count):
        rows, columns = box(shares[i].item(), int(y[i]), int(x[i]), height, width)
        expected = images[i].clone()
        expected[:, rows, columns] = others[i][:, rows, columns]
        assert torch.equal(mixed[i], expected)
        own = (mixed[i] == images[i]).all(0).float().mean()
        assert weights[i].item() == pytest.approx(own.item(), abs=1e-6)
    assert weights[0] == 1
    assert weights.min() < 0.5


def test_mixup(images: Tensor) -> None:
    others, shares = images.flip(0), torch.linspace(0, 1, len(images))
    mixed, weights = A.mixup(images, others, shares)
    for i in range(len(images)):
        expected = (1 - shares[i]) * images[i] + shares[i] * others[i]
        torch.testing.assert_close(mixed[i], expected, atol=1e-6, rtol=0)
        assert weights[i].item() == pytest.approx(1 - shares[i].item())


@pytest.mark.parametrize("mixing", [Mixing(cutmix=1.0), Mixing(cutmix=0.5), Mixing(mixup=0.5), Mixing(0.4, 0.4)])
def test_what_comes_back_is_what_was_mixed(images: Tensor, mixing: Mixing) -> None:
    before = images.clone()
    mixed, partners, weights = mixing(images, generator())
    assert torch.equal(images, before)
    assert partners.dtype == torch.int64
    assert weights.dtype == torch.float32
    for i in range(len(images)):
        own, other = images[i], images[partners[i]]
        cut = ((mixed[i] == own) | (mixed[i] == other)).all()
        if partners[i] == i:
            assert torch.equal(mixed[i], own)
            assert weights[i] == 1
        elif cut:
            assert weights[i].item() == pytest.approx((mixed[i] == own).all(0).float().mean().item(), abs=1e-6)
        else:
            torch.testing.assert_close(mixed[i], torch.lerp(other, own, weights[i]), atol=1e-6, rtol=0)


def test_shares_of_the_images() -> None:
    images = torch.rand(4000, 1, 4, 4, generator=generator())
    mixed, partners, weights = Mixing(cutmix=0.3, mixup=0.5)(images, generator())
    alone = partners == torch.arange(4000)
    assert 0.18 < alone.float().mean() < 0.22
    blended = (weights < 1) & ~((mixed == images) | (mixed == images[partners])).flatten(1).all(1)
    assert 0.47 < blended.float().mean() < 0.53
    assert torch.equal(mixed[alone], images[alone])


def test_partners_are_any_of_the_others() -> None:
    images = torch.zeros(5, 1, 2, 2)
    moving = generator()
    counts = torch.zeros(5, 5)
    for _ in range(400):
        counts[torch.arange(5), Mixing(cutmix=1.0)(images, moving).partners] += 1
    assert counts.diagonal().eq(0).all()
    others = counts[~torch.eye(5, dtype=torch.bool)]
    assert others.min() > 64  # 100 expected, standard deviation 9
    assert others.max() < 136


def test_an_image_alone_is_left_alone() -> None:
    image = torch.rand(1, 3, 8, 8)
    mixed, partners, _ = Mixing(cutmix=0.5, mixup=0.5)(image, generator())
    torch.testing.assert_close(mixed, image)
    assert partners.tolist() == [0]


def test_weights_are_distributed_as_in_torchvision() -> None:
    count = 4000
    theirs = v2.CutMix(alpha=1.0, num_classes=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        query = [torch.zeros(1, 3, 24, 32)]
        expected = torch.tensor([theirs.make_params(query)["lam_adjusted"] for _ in range(count)])
    found = Mixing(cutmix=1.0)(torch.zeros(count, 1, 24, 32), generator()).weights
    values = torch.cat([found, expected]).unique()
    shares = [torch.searchsorted(sample.sort().values, values, right=True) / count for sample in (found, expected)]
    assert (shares[0] - shares[1]).abs().max() < 0.044  # 999 of 1,000 times, twice 4,000 of one distribution


def test_reproducible(images: Tensor) -> None:
    mixing = Mixing(cutmix=0.5, mixup=0.3)
    first, again, other = (mixing(images, generator(seed)) for seed in (5, 5, 6))
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first.images, other.images)


def test_nothing_to_mix_draws_nothing(images: Tensor) -> None:
    moving = generator(3)
    mixed, partners, weights = Mixing()(images, moving)
    assert torch.equal(mixed, images)
    assert torch.equal(partners, torch.arange(len(images)))
    assert weights.eq(1).all()
    assert torch.equal(torch.rand(4, generator=moving), torch.rand(4, generator=generator(3)))


def test_can_be_traced() -> None:
    images = torch.rand(30, 3, 9, 14, generator=generator(1))
    mixing = Mixing(cutmix=0.5, mixup=0.3)
    draws = mixing.draw(len(images), generator(), images.device)
    traced = torch.compile(mixing.apply, backend="eager", fullgraph=True)(images, draws)
    torch.testing.assert_close(tuple(traced), tuple(mixing.apply(images, draws)), atol=1e-6, rtol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_does_as_the_cpu_and_is_never_waited_for(images: Tensor) -> None:
    mixing = Mixing(cutmix=0.5, mixup=0.3)
    on_gpu = images.cuda()
    own = torch.Generator("cuda").manual_seed(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        mixing(on_gpu, own)
        found = mixing(on_gpu, generator())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one, other in zip(found, mixing(images, generator()), strict=True):
        torch.testing.assert_close(one.cpu(), other, atol=1e-6, rtol=0)


@pytest.mark.parametrize("bad", [{"cutmix": 1.5}, {"mixup": -0.1}, {"cutmix": 0.6, "mixup": 0.6}])
def test_bad_settings(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Mixing(**bad)


@pytest.mark.parametrize("bad", [torch.zeros(3, 8, 8), torch.zeros(2, 3, 8, 8, dtype=torch.uint8)])
def test_bad_batches(bad: Tensor) -> None:
    with pytest.raises(ConfigError, match="floats B x C x H x W"):
        Mixing(cutmix=0.5)(bad, generator())
