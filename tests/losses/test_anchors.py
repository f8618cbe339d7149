from __future__ import annotations

import math

import pytest
import torch

from kedge.errors import ConfigError
from kedge.losses import init_anchors


@pytest.mark.parametrize(
    ("classes", "dim"),
    [
        (1, 1),
        (2, 1),
        (9, 1),
        (2, 2),
        (4, 2),
        (10, 2),
        (101, 2),
        (6, 3),
        (10, 3),
        (60, 3),
        (9, 4),
        (100, 32),
        (8, 8),
        (16, 8),
    ],
)
@pytest.mark.parametrize(("margin", "min_norm"), [(2.0, 1.0), (4.0, 1.0), (0.5, 3.0)])
def test_base_anchors_keep_the_margin_and_the_norm(classes: int, dim: int, margin: float, min_norm: float) -> None:
    anchors = init_anchors(classes, dim, margin=margin, min_norm=min_norm).double()
    assert anchors.shape == (classes, dim)
    assert (anchors.norm(dim=1) >= min_norm * (1 - 1e-6)).all()
    if classes > 1:
        assert torch.pdist(anchors).min() >= 2 * margin * (1 - 1e-6)


def test_base_vectors_are_exactly_two_margins_apart() -> None:
    anchors = init_anchors(5, 8, margin=2.0)
    assert torch.allclose(torch.pdist(anchors), torch.full((10,), 4.0))
    assert torch.allclose(anchors.norm(dim=1), torch.full((5,), 2 * math.sqrt(2)))


def test_the_plane_is_packed_tightly() -> None:
    """Ten anchors on one ring would need a radius of 3.24 margins; a lattice needs less."""
    anchors = init_anchors(10, 2, margin=4.0)
    assert anchors.norm(dim=1).max() < 3.24 * 4.0


def test_spread_directions_need_a_smaller_radius_than_drawn_ones() -> None:
    spread = init_anchors(100, 16)
    drawn = torch.nn.functional.normalize(torch.randn(100, 16, generator=torch.Generator().manual_seed(0)), dim=1)
    assert spread.norm(dim=1).max() < 0.9 * 4.0 / torch.pdist(drawn).min()
    assert torch.equal(spread, init_anchors(100, 16))


def test_very_many_anchors_keep_the_margin_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = init_anchors(4200, 24)
    monkeypatch.setattr("kedge.losses.anchors._SEARCH_AT_MOST", 0)
    believed = init_anchors(4200, 24)
    assert torch.pdist(believed.double()).min() >= 4.0
    # Not by much more than it takes.
    assert believed[0].norm() < 2 * searched[0].norm()


def test_random_anchors_are_small_and_follow_the_generator() -> None:
    first = init_anchors(10, 4, init="random", generator=torch.Generator().manual_seed(3))
    again = init_anchors(10, 4, init="random", generator=torch.Generator().manual_seed(3))
    assert torch.equal(first, again)
    assert 0 < first.norm(dim=1).max() < 0.1


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="'base' or 'random', found 'grid'"):
        init_anchors(3, 4, init="grid")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least 1"):
        init_anchors(0, 4)
