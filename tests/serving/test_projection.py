from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.decomposition import PCA

from kedge.serving import projection
from kedge.serving.projection import Projection


def clusters(count: int, dim: int, items: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Anchors that are nearly orthogonal, items around them, and the anchor of each item."""
    rng = np.random.default_rng(seed)
    anchors = np.linalg.qr(rng.standard_normal((dim, count)))[0].T
    labels = rng.integers(0, count, items)
    sample = anchors[labels] + 0.5 / np.sqrt(dim) * rng.standard_normal((items, dim))
    return anchors.astype(np.float32), sample.astype(np.float32), labels


def nearest(rows: np.ndarray, anchors: np.ndarray) -> np.ndarray:
    return np.square(rows[:, None] - anchors).sum(axis=2).argmin(axis=1)


def is_on_the_map(places: np.ndarray, count: int) -> bool:
    return places.shape == (count, 2) and bool((np.abs(places) <= 1).all())


@st.composite
def galleries(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    count, dim, items = draw(st.integers(1, 8)), draw(st.integers(1, 4)), draw(st.integers(0, 12))
    # Few different numbers make rows that coincide; the others are as large and small as a gallery takes.
    numbers = st.one_of(st.sampled_from([0.0, -0.0, 1.0, -1.0]), st.floats(-(2.0**57), 2.0**57, width=32))

    def rows(size: int) -> np.ndarray:
        return draw(arrays(np.float32, (size, dim), elements=numbers))

    return rows(count), rows(items), rows(4)


@settings(max_examples=30, deadline=None)
@given(galleries())
def test_everything_is_on_the_map(gallery: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    anchors, sample, queries = gallery
    fitted = Projection(anchors, sample)
    assert is_on_the_map(fitted.anchors, len(anchors))
    assert is_on_the_map(fitted.place(sample), len(sample))
    assert is_on_the_map(fitted.place(queries), len(queries))


@pytest.mark.parametrize("count", [10, 60])
def test_items_lie_around_their_anchors_unlike_in_a_linear_projection(count: int) -> None:
    anchors, sample, labels = clusters(count, 64, 1000)
    fitted = Projection(anchors, sample[:500])
    assert np.ptp(fitted.anchors, axis=0).max() == pytest.approx(1.8), "the map is used"
    gaps = np.linalg.norm(fitted.anchors[:, None] - fitted.anchors, axis=2) + 9 * np.eye(count)
    for rows in (slice(0, 500), slice(500, 1000)):  # those that were seen, and new ones
        places, own = fitted.place(sample[rows]), labels[rows]
        right = (nearest(places, fitted.anchors) == own).mean()
        assert right > 0.95
        away = np.linalg.norm(places - fitted.anchors[own], axis=1) / np.median(gaps.min(axis=1))
        assert 0.1 < np.median(away) < 0.4  # neither on one heap nor all over the map
    plain = PCA(2).fit(anchors)
    # How far below depends on the processor: the anchors have no principal axes but for rounding.
    assert (nearest(plain.transform(sample), plain.transform(anchors)) == labels).mean() < right


def test_an_item_between_two_anchors_lies_between_them() -> None:
    anchors, sample, _ = clusters(10, 64, 500)
    fitted = Projection(anchors, sample)
    [place] = fitted.place((anchors[2:3] + anchors[7:8]) / 2)
    ends = fitted.anchors[[2, 7]]
    assert np.linalg.norm(place - ends.mean(axis=0)) <= fitted._reach


def test_the_same_map_again_and_for_an_item_alone() -> None:
    anchors, sample, _ = clusters(6, 16, 120)
    first, second = Projection(anchors, sample), Projection(anchors, sample)
    assert (first.anchors == second.anchors).all()
    together = first.place(sample)
    alone = np.concatenate([first.place(row[None]) for row in sample])
    assert together == pytest.approx(alone, abs=1e-6)


def test_too_many_anchors_are_projected_linearly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projection, "_TSNE_ANCHORS", 10)
    anchors, sample, _ = clusters(11, 16, 50)
    anchors[:, 0] *= 5
    anchors[:, 1] *= 3
    plane = PCA(2).fit_transform(anchors)
    fitted = Projection(anchors, sample).anchors
    distances, expected = (np.linalg.norm(rows[:, None] - rows, axis=2) for rows in (fitted, plane))
    assert distances / distances.max() == pytest.approx(expected / expected.max(), abs=1e-5)
