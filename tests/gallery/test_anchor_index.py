"""The way to the nearest of very many anchors."""

import numpy as np
import pytest

from kedge import Gallery
from kedge.gallery import anchor_index, anchors
from kedge.gallery.anchor_index import AnchorIndex
from kedge.gallery.anchors import Anchors


def flat(points: np.ndarray, queries: np.ndarray, count: int) -> np.ndarray:
    squares = ((queries[:, None].astype(np.float64) - points) ** 2).sum(-1)
    return np.argsort(squares, axis=1, kind="stable")[:, :count]


def anchors_apart(count: int) -> np.ndarray:
    """Anchors with room between them, as training leaves them."""
    return 3 * np.random.default_rng(0).standard_normal((count, 16)).astype(np.float32)


@pytest.fixture(scope="module")
def many() -> np.ndarray:
    return anchors_apart(3000)


@pytest.fixture(scope="module")
def near(many: np.ndarray) -> np.ndarray:
    chance = np.random.default_rng(1)
    noise = chance.standard_normal((200, many.shape[1])).astype(np.float32)
    return many[chance.integers(len(many), size=200)] + 0.3 * noise


@pytest.fixture(scope="module")
def index(many: np.ndarray) -> AnchorIndex:
    return AnchorIndex.build(many)


@pytest.mark.parametrize("count", [1, 4, 40])
def test_it_finds_what_looking_at_all_finds(many: np.ndarray, near: np.ndarray, index: AnchorIndex, count: int) -> None:
    exact = flat(many, near, 40)[:, :count]
    together = index.nearest(near, count)[0]
    assert (together[:, 0] == exact[:, 0]).mean() > 0.98
    assert np.mean([np.isin(*pair).mean() for pair in zip(exact, together, strict=True)]) > 0.9
    alone = np.concatenate([index.nearest(query[None], count)[0] for query in near[:60]])
    np.testing.assert_array_equal(together[:60], alone)


def test_distances_are_those_of_the_anchors_found(many: np.ndarray, near: np.ndarray, index: AnchorIndex) -> None:
    numbers, squares = index.nearest(near, 3)
    exact = ((near[:, None].astype(np.float64) - many[numbers]) ** 2).sum(-1)
    np.testing.assert_allclose(squares, exact, rtol=1e-3, atol=1e-4)
    assert (np.diff(squares, axis=1) >= 0).all()


def test_all_anchors_can_be_asked_for(near: np.ndarray) -> None:
    few = AnchorIndex.build(anchors_apart(300))
    numbers, _ = few.nearest(near, 300)
    np.testing.assert_array_equal(np.sort(numbers, axis=1), np.tile(np.arange(300), (len(near), 1)))
    alone, _ = few.nearest(near[:1], 500)
    np.testing.assert_array_equal(alone, numbers[:1])


def test_who_is_nearer_than_half_the_gap_is_found_in_few_cells(
    near: np.ndarray, index: AnchorIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    monkeypatch.setattr(
        anchor_index, "parallel_cdist", lambda *a, _real=anchor_index.parallel_cdist: read.append(1) or _real(*a)
    )
    for query in near[:50]:
        index.nearest(query[None], 1)
    assert len(read) < 50 * 40  # of 64 cells and the centres
    assert (index.gaps > 0).all()


def test_equal_anchors_go_by_number(many: np.ndarray) -> None:
    few = many[:500]
    index = AnchorIndex.build(np.concatenate([few, few]))
    assert (index.gaps < 1e-4).all()
    np.testing.assert_array_equal(index.nearest(few[:50], 2)[0][:, 0], np.arange(50))


def test_anchors_that_came_later_are_found_too(many: np.ndarray) -> None:
    names = tuple(map(str, range(len(many))))
    later = Anchors(many, names, 0, AnchorIndex.build(many[:2900]))
    np.testing.assert_array_equal(later.nearest(many[2800:], 1)[:, 0], np.arange(2800, 3000))
    np.testing.assert_allclose(later.nearest_squares(many[2800:]), 0, atol=1e-3)


def test_a_gallery_of_many_classes_searches_as_one_that_looks_at_all(
    tmp_path, many: np.ndarray, near: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = np.random.default_rng(2)
    many = many[:1500]
    near = near[:50]
    homes = chance.integers(len(many), size=3000)
    items = many[homes] + 0.2 * chance.standard_normal((3000, 16)).astype(np.float32)
    found = {}
    for name, limit in (("flat", 10**9), ("indexed", 1000)):
        monkeypatch.setattr(anchors, "MIN_ANCHORS", limit)
        gallery = Gallery.create(tmp_path / name, anchors=many, lists="anchor")
        gallery.add_embeddings(items)
        gallery.optimize()
        again = Gallery.open(tmp_path / name)
        assert (again.snapshot().anchors.index is not None) == (name == "indexed")
        found[name] = again.search_embeddings(near, k=5, probes=4)
        assert [hit.id for hit in again.search(near[0], k=5, probes=4)] == found[name][0].ids
        assert len(again.search(near[0], k=50, min_candidates=50)) == 50
        again.add_embeddings(near[:2] + 100, labels=["new", "new"])
        assert again.search(near[0] + 100, k=1).hits[0].label == "new"
    same = [a.ids == b.ids for a, b in zip(found["flat"], found["indexed"], strict=True)]
    assert np.mean(same) > 0.95


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("count", [1, 5])
def test_cells_that_are_all_empty_around_a_query(queries: int, count: int) -> None:
    centres = np.zeros((100, 2), np.float32)
    centres[:99, 0] = np.arange(99)
    centres[99] = 1000  # the cell that holds all anchors is the farthest of all
    vectors = 1000 + np.arange(20, dtype=np.float32).reshape(10, 2)
    offsets = np.where(np.arange(101) > 99, 10, 0)
    index = AnchorIndex(centres, offsets, np.arange(10, dtype=np.int32), vectors, np.ones(10, np.float32))
    assert index.nearest(np.zeros((queries, 2), np.float32), count)[0].tolist() == [list(range(count))] * queries
