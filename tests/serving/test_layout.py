from __future__ import annotations

import dataclasses
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.decomposition import PCA
from sklearn.manifold import trustworthiness

from kedge.errors import ConfigError
from kedge.serving import islands, nearness
from kedge.serving import layout as layout_module
from kedge.serving.islands import alike
from kedge.serving.layout import Layout

NONE = np.zeros(0, np.int64)


def clusters(
    count: int, dim: int, items: int, *, noise: float = 0.5, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Anchors that are nearly base vectors, and items around them."""
    chance = np.random.default_rng(seed)
    anchors = np.linalg.qr(chance.standard_normal((dim, count)))[0].T
    anchors += 0.05 / np.sqrt(dim) * chance.standard_normal((count, dim))
    places = chance.integers(0, count, items)
    sample = anchors[places] + noise / np.sqrt(dim) * chance.standard_normal((items, dim))
    return anchors.astype(np.float32), sample.astype(np.float32), places


def nearest(rows: np.ndarray, anchors: np.ndarray) -> np.ndarray:
    return np.stack([np.square(anchors - row).sum(axis=1).argmin() for row in rows])


def sound(spots: np.ndarray, count: int) -> bool:
    return spots.shape == (count, 2) and bool(np.isfinite(spots).all()) and bool((np.abs(spots) <= 1).all())


# ---------------------------------------------------------------------- any input


@st.composite
def galleries(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    count, dim, items = draw(st.integers(1, 8)), draw(st.integers(1, 4)), draw(st.integers(0, 12))
    # Few different numbers make rows that coincide; the others are as large and small as single precision goes.
    numbers = st.one_of(
        st.sampled_from([0.0, -0.0, 1.0, -1.0]), st.floats(width=32, allow_nan=False, allow_infinity=False)
    )

    def rows(size: int) -> np.ndarray:
        return draw(arrays(np.float32, (size, dim), elements=numbers))

    places = draw(arrays(np.int64, items, elements=st.integers(0, count - 1)))
    return rows(count), rows(items), places, rows(4)


@settings(max_examples=80, deadline=None)
@given(galleries())
def test_everything_is_on_the_map(gallery: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]) -> None:
    anchors, sample, places, queries = gallery
    layout = Layout.of(anchors, sample, places)
    assert sound(layout.anchors, len(anchors))
    assert sound(layout.place(anchors), len(anchors))
    assert sound(layout.place(sample), len(sample))
    assert sound(layout.place(queries), len(queries))


@pytest.mark.parametrize(("count", "dim", "items"), [(1, 1, 0), (1, 2048, 300), (2, 1, 50), (3, 2, 4), (600, 2, 900)])
def test_sizes(count: int, dim: int, items: int) -> None:
    chance = np.random.default_rng(1)
    anchors, sample = chance.normal(size=(count, dim)), chance.normal(size=(items, dim))
    layout = Layout.of(anchors, sample, chance.integers(0, count, items))
    assert sound(layout.anchors, count)
    assert sound(layout.place(sample), items)
    assert len(np.unique(layout.anchors, axis=0)) == count


def test_anchors_that_coincide_share_an_island() -> None:
    chance = np.random.default_rng(2)
    row = chance.normal(size=8)
    sample = chance.normal(size=(100, 8))
    layout = Layout.of(np.tile(row, (5, 1)), sample, np.arange(100) % 5)
    assert (layout.anchors == 0).all()
    assert np.ptp(layout.place(sample), axis=0).min() > 0.5, "one island fills the map"

    layout = Layout.of(np.stack([row, -row, row]), sample, np.zeros(100, int))
    assert (layout.anchors[0] == layout.anchors[2]).all()
    assert np.linalg.norm(layout.anchors[0] - layout.anchors[1]) > 0.5


# ---------------------------------------------------------------------- the same place every time


@pytest.mark.parametrize("count", [10, 550])
def test_the_same_map_again(count: int) -> None:
    anchors, sample, places = clusters(count, 560, 900)
    one, two = Layout.of(anchors, sample, places), Layout.of(anchors, sample, places)
    assert (one.anchors == two.anchors).all()
    assert (one.place(sample) == two.place(sample)).all()


def test_a_row_is_placed_alike_alone_and_among_others() -> None:
    anchors, sample, places = clusters(30, 64, 1200, noise=1.5)
    layout = Layout.of(anchors, sample, places)
    together = layout.place(sample)
    alone = np.concatenate([layout.place(row[None]) for row in sample])
    assert (together == alone).all()


@pytest.mark.parametrize("scale", [0.1, 1e20])
def test_ties_and_absurd_distances_are_no_exception(scale: float) -> None:
    base = np.ones((1, 1))
    for _ in range(6):
        base = np.block([[base, base], [base, -base]])
    layout = Layout.of(base[:40], np.zeros((0, 64)), NONE)
    # Whatever is made of the other rows is as far from each of the forty as from any other.
    rows = scale * np.random.default_rng(3).integers(-3, 4, (600, 24)) @ base[40:]
    alone = np.concatenate([layout.place(row[None]) for row in rows])
    assert (layout.place(rows) == alone).all()


def test_unchanging() -> None:
    layout = Layout.of(*clusters(4, 8, 40))
    with pytest.raises(ValueError, match="read-only"):
        layout.anchors[0] = 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.anchors = np.zeros((4, 2))  # type: ignore[misc]


# ---------------------------------------------------------------------- a good map


@pytest.mark.parametrize(("count", "dim"), [(10, 64), (100, 512)])
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_islands(count: int, dim: int, scale: float) -> None:
    anchors, sample, places = clusters(count, dim, 3000)
    anchors, sample = anchors * scale, sample * scale + 3 * scale
    anchors += 3 * scale
    seen, asked = sample[:2000], sample[2000:]
    assert (nearest(asked, anchors) == places[2000:]).all()
    layout = Layout.of(anchors, seen, places[:2000])
    assert (nearest(layout.place(seen), layout.anchors) == places[:2000]).mean() > 0.97
    assert (nearest(layout.place(asked), layout.anchors) == places[2000:]).mean() > 0.97
    # Plain projection is the blob this is meant to avoid.
    plain = PCA(2).fit(anchors)
    assert (nearest(plain.transform(asked), plain.transform(anchors)) == places[2000:]).mean() < 0.9


def test_islands_do_not_overlap() -> None:
    anchors, sample, places = clusters(100, 512, 3000)
    layout = Layout.of(anchors, sample, places)
    lengths = np.linalg.norm(layout.anchors[:, None] - layout.anchors, axis=2) + 9 * np.eye(100)
    own = np.linalg.norm(layout.place(sample) - layout.anchors[places], axis=1)
    assert np.quantile(own, 0.95) < lengths.min() / 2
    assert np.ptp(layout.anchors, axis=0).max() > 1.5, "the map is used"


def test_like_anchors_are_neighbours() -> None:
    anchors, _, _ = clusters(60, 128, 0)
    for pair in range(0, 20, 2):
        anchors[pair + 1] = (anchors[pair] + anchors[pair + 1]) / 2
    layout = Layout.of(anchors, np.zeros((0, 128)), NONE)
    assert np.mean([rank(layout, pair, pair + 1) for pair in range(0, 20, 2)]) < 2


def test_no_island_wants_to_be_its_own_neighbour() -> None:
    # What a list has of its own anchor is on the diagonal, and larger than all else.
    between = np.array([[np.inf, 1, 4], [1, np.inf, 1], [4, 1, np.inf]])
    confusion = np.array([[0.9, 0.1, 0], [0.2, 0.9, 0.1], [0, 0, 0.9]])
    blocks = [(between[rows], confusion[rows], confusion.T[rows]) for rows in (slice(0, 2), slice(2, 3))]
    pairs = alike(blocks, 3)
    assert (pairs.one != pairs.other).all()
    assert pairs.wanted.sum() == pytest.approx(1)


def test_lists_that_are_confused_are_neighbours() -> None:
    anchors, sample, places = clusters(60, 128, 3000)
    for pair in range(0, 20, 2):
        members = np.flatnonzero(places == pair)[::3]
        sample[members] += 0.5 * (anchors[pair + 1] - anchors[pair])
    confused = Layout.of(anchors, sample, places)
    assert np.mean([rank(confused, pair, pair + 1) for pair in range(0, 20, 2)]) < 4


def rank(layout: Layout, one: int, other: int) -> int:
    """The how manieth neighbour of one island another is."""
    lengths = np.linalg.norm(layout.anchors - layout.anchors[one], axis=1)
    return int((lengths < lengths[other]).sum())


def test_an_item_between_two_anchors_is_between_their_islands() -> None:
    anchors, sample, places = clusters(10, 64, 1000)
    layout = Layout.of(anchors, sample, places)
    for one in range(10):
        for other in range(one):
            [spot] = layout.place((anchors[one : one + 1] + anchors[other : other + 1]) / 2)
            ends = layout.anchors[[one, other]]
            length = np.linalg.norm(ends[0] - ends[1])
            away = np.linalg.norm(ends - spot, axis=1)
            assert away.max() < 0.8 * length
            farthest = np.linalg.norm(layout.anchors - ends.mean(axis=0), axis=1).max()
            third = np.linalg.norm(layout.anchors - spot, axis=1).max()
            if farthest > length:
                assert away.max() < third


def test_on_the_way_from_one_anchor_to_another_nothing_jumps() -> None:
    anchors, sample, places = clusters(10, 64, 1000)
    layout = Layout.of(anchors, sample, places)
    share = np.linspace(0, 1, 2001)[:, None]
    path = layout.place(anchors[:1] * (1 - share) + anchors[1:2] * share)
    assert np.linalg.norm(np.diff(path, axis=0), axis=1).max() < 0.02
    assert nearest(path[[0, -1]], layout.anchors).tolist() == [0, 1]


def test_outliers_are_at_the_rim() -> None:
    anchors, sample, places = clusters(10, 64, 2000)
    layout = Layout.of(anchors, sample, places)
    rests = sample - anchors[places]
    inner = np.linalg.norm(layout.place(anchors[places] + 0.5 * rests) - layout.anchors[places], axis=1)
    outer = np.linalg.norm(layout.place(anchors[places] + 1.5 * rests) - layout.anchors[places], axis=1)
    assert (outer > inner).mean() > 0.9


def test_who_is_far_in_a_way_the_chart_does_not_show_is_at_the_rim_too() -> None:
    anchors, sample, places = clusters(10, 64, 2000)
    sample[:, 32:] = anchors[places, 32:]
    layout = Layout.of(anchors, sample, places)
    far = sample.copy()
    far[:, 32:] += 0.4 * np.random.default_rng(5).standard_normal(32)
    plain = np.linalg.norm(layout.place(sample) - layout.anchors[places], axis=1)
    moved = np.linalg.norm(layout.place(far) - layout.anchors[places], axis=1)
    assert np.median(moved) > 1.3 * np.median(plain)


def test_parts_of_a_class_stay_apart() -> None:
    anchors, sample, places = clusters(30, 128, 3000, noise=0.3)
    chance = np.random.default_rng(4)
    parts = chance.integers(0, 2, 3000)
    ways = 0.25 * np.linalg.qr(chance.standard_normal((128, 30)))[0].T
    sample = sample + np.where(parts[:, None] == 1, ways[places], -ways[places])
    spots = Layout.of(anchors, sample, places).place(sample)
    for place in range(30):
        here, which = spots[places == place], parts[places == place]
        means = np.stack([here[which == part].mean(axis=0) for part in range(2)])
        assert (nearest(here, means) == which).mean() > 0.9


def test_a_chain_of_anchors_stays_a_chain() -> None:
    chance = np.random.default_rng(6)
    steps = np.linalg.qr(chance.standard_normal((64, 40)))[0].T
    anchors = np.cumsum(steps, axis=0)
    places = np.repeat(np.arange(40), 20)
    sample = anchors[places] + 0.02 * chance.standard_normal((800, 64))
    layout = Layout.of(anchors, sample, places)
    assert np.mean([rank(layout, link, link + 1) for link in range(39)]) < 1.8


def test_neighbours_are_kept_better_than_by_projection() -> None:
    anchors, sample, places = clusters(20, 64, 1000)
    spots = Layout.of(anchors, sample, places).place(sample)
    plain = PCA(2).fit_transform(sample)
    assert trustworthiness(sample, spots, n_neighbors=10) > trustworthiness(sample, plain, n_neighbors=10) + 0.1


# ---------------------------------------------------------------------- how much it takes


def test_no_matrix_of_all_pairs_of_anchors_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (nearness, islands, layout_module):
        monkeypatch.setattr(module, "ROWS", 16)
    monkeypatch.setattr(islands, "_WORK", 0)
    anchors, sample, places = clusters(1000, 1000, 200)
    anchors, sample = anchors[:, :8], sample[:, :8]
    tracemalloc.start()
    Layout.of(anchors, sample, places)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 1000 * 1000


def test_blocks_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    monkeypatch.setattr(layout_module, "alike", lambda *given: found.append(alike(*given)) or found[-1])
    for rows in (7, 1000):
        for module in (nearness, layout_module):
            monkeypatch.setattr(module, "ROWS", rows)
        Layout.of(*clusters(40, 64, 500))
    (one, other) = found
    assert (one.one == other.one).all()
    assert (one.other == other.other).all()
    assert np.allclose(one.wanted, other.wanted, atol=1e-12)


# ---------------------------------------------------------------------- what cannot be used

GOOD = {"anchors": np.eye(3), "sample": np.ones((2, 3)), "places": np.array([0, 2])}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("anchors", np.zeros(3), "anchors must have rows and columns, found 3"),
        ("anchors", np.zeros((0, 3)), "at least one row and one column, found 0 × 3"),
        ("anchors", np.full((3, 3), np.nan), "anchors must be finite"),
        ("anchors", np.array([["a"] * 3]), "anchors must be a matrix of numbers"),
        ("sample", np.ones((2, 4)), "sample must have rows of 3 numbers, found 2 × 4"),
        ("sample", np.full((2, 3), np.inf), "sample must be finite"),
        ("sample", np.full((2, 3), 1e300), "sample must be finite"),
        ("places", np.array([0]), "places must be 2 whole numbers"),
        ("places", np.array([0.0, 1.0]), "places must be 2 whole numbers"),
        ("places", np.array([0, 3]), "places must lie between 0 and 2, the rows of anchors, found 0 to 3"),
        ("places", np.array([-1, 0]), "found -1 to 0"),
    ],
)
def test_unusable(name: str, value: np.ndarray, message: str) -> None:
    Layout.of(**GOOD)
    with pytest.raises(ConfigError, match=message):
        Layout.of(**{**GOOD, name: value})


@pytest.mark.parametrize("value", [np.ones(3), np.ones((1, 2)), np.full((1, 3), np.nan)])
def test_unusable_embeddings(value: np.ndarray) -> None:
    with pytest.raises(ConfigError, match="embeddings must"):
        Layout.of(**GOOD).place(value)
