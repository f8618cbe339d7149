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
def galleries(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    count, dim, items = draw(st.integers(1, 8)), draw(st.integers(1, 4)), draw(st.integers(0, 20))
    # Few different numbers make rows that coincide; the others are as large and small as a gallery takes.
    numbers = st.one_of(st.sampled_from([0.0, -0.0, 1.0, -1.0]), st.floats(-(2.0**57), 2.0**57, width=32))

    def rows(size: int) -> np.ndarray:
        return draw(arrays(np.float32, (size, dim), elements=numbers))

    lists = draw(arrays(np.int64, items, elements=st.integers(0, count - 1)))
    return rows(count), rows(items), lists, rows(4)


@settings(max_examples=30, deadline=None)
@given(galleries())
def test_everything_is_on_the_map(gallery: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]) -> None:
    anchors, sample, lists, queries = gallery
    fitted = Projection(anchors, sample, lists)
    assert is_on_the_map(fitted.anchors, len(anchors))
    assert is_on_the_map(fitted.place(queries), len(queries))
    assert is_on_the_map(fitted.place(sample), len(sample))


def test_items_lie_around_their_anchors_unlike_in_a_linear_projection() -> None:
    anchors, sample, labels = clusters(20, 64, 1000)
    seen, new = sample[:500], sample[500:]
    fitted = Projection(anchors, seen, labels[:500])
    assert (nearest(fitted.place(seen), fitted.anchors) == labels[:500]).mean() > 0.97
    assert (nearest(fitted.place(new), fitted.anchors) == labels[500:]).mean() > 0.97
    plain = PCA(2).fit(anchors)
    assert (nearest(plain.transform(new), plain.transform(anchors)) == labels[500:]).mean() < 0.9
    assert np.ptp(fitted.anchors, axis=0).max() > 1, "the map is used"
    # New items spread as the others do, and do not all go to their anchor.
    seen_spread, new_spread = (
        np.median(np.linalg.norm(fitted.place(rows) - fitted.anchors[own], axis=1))
        for rows, own in ((seen, labels[:500]), (new, labels[500:]))
    )
    assert new_spread > 0.25 * seen_spread > 0


def test_anchors_without_items_are_laid_out_too() -> None:
    anchors, sample, labels = clusters(40, 64, 400)
    fitted = Projection(anchors, sample[:0], labels[:0])
    assert (nearest(fitted.place(sample), fitted.anchors) == labels).mean() > 0.9


def test_the_same_map_again_and_for_an_item_alone() -> None:
    anchors, sample, labels = clusters(6, 16, 120)
    first, second = Projection(anchors, sample, labels), Projection(anchors, sample, labels)
    assert (first.anchors == second.anchors).all()
    together = first.place(sample)
    alone = np.concatenate([first.place(row[None]) for row in sample])
    assert together == pytest.approx(alone, abs=1e-4)


def test_too_many_anchors_are_projected_linearly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projection, "_TSNE_POINTS", 10)
    anchors, sample, labels = clusters(11, 16, 50)
    fitted = Projection(anchors, sample, labels)
    middle = (sample[:1] + sample[1:2]) / 2
    assert fitted.place(middle) == pytest.approx(fitted.place(sample[:2]).mean(axis=0, keepdims=True), abs=1e-6)
