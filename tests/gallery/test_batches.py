"""Batches of queries: whichever way a batch is cut, compared and merged, the hits are those of an exhaustive search."""

from __future__ import annotations

import numpy as np
import pytest

from kedge.gallery import Gallery, distances, search

DIM, ANCHORS, ITEMS, QUERIES, K = 6, 7, 900, 60, 15
HUGE = 1 << 40


def integers(count: int, seed: int) -> np.ndarray:
    """Vectors with many equal distances, which single precision holds exactly."""
    return np.random.default_rng(seed).integers(-2, 3, (count, DIM)).astype(np.float32)


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    """Items in inverted lists and behind them, some removed."""
    anchors = integers(ANCHORS, 1) + np.linspace(0, 0.25, ANCHORS, dtype=np.float32)[:, None]
    gallery = Gallery.create(tmp_path_factory.mktemp("batches") / "g", anchors=anchors, lists="anchor")
    gallery.add_embeddings(integers(ITEMS, 2))
    gallery.optimize()
    gallery.add_embeddings(integers(ITEMS // 5, 3))
    gallery.remove(range(3, ITEMS, 10))
    return gallery


def exhaustive(gallery: Gallery, query: np.ndarray, probes: int | None, kept: set[int], exclude: int | None) -> list:
    """Ids and distances in double precision; of equal distances the smaller id comes first."""
    anchors = gallery.snapshot().anchors.vectors.astype(np.float64)
    items = np.concatenate([integers(ITEMS, 2), integers(ITEMS // 5, 3)]).astype(np.float64)
    homes = ((items[:, None] - anchors) ** 2).sum(2).argmin(1)
    order = ((anchors - query) ** 2).sum(1).argsort(kind="stable")
    # With a filter, lists without a match are no candidates, and more are probed until they hold k.
    sizes = [sum(homes[id] == anchor for id in kept) for anchor in order]
    candidates = [anchor for anchor, size in zip(order, sizes, strict=True) if size]
    if probes is not None:
        wanted = probes
        if len(kept) < 900:
            while sum(homes[id] in candidates[:wanted] for id in kept) < K and wanted < ANCHORS:
                wanted += 1
        candidates = candidates[:wanted]
    found = [id for id in kept if homes[id] in candidates and id != exclude]
    ranked = sorted((float(((items[id] - query) ** 2).sum()), id) for id in found)[:K]
    return [(id, square**0.5) for square, id in ranked]


@pytest.mark.parametrize("threaded", [True, False])
@pytest.mark.parametrize("product", [True, False])
@pytest.mark.parametrize(
    ("probes", "where", "exclude"),
    [
        (1, None, False),
        (1, None, True),
        (3, None, False),
        (3, None, True),
        (None, None, False),
        (None, None, True),
        (2, "id % 3 = 1", False),
    ],
)
def test_hits_are_those_of_an_exhaustive_search(
    gallery: Gallery,
    monkeypatch: pytest.MonkeyPatch,
    threaded: bool,
    product: bool,
    probes: int | None,
    where: str | None,
    exclude: bool,
) -> None:
    monkeypatch.setattr(distances, "_THREADS", 3)
    monkeypatch.setattr(search, "_THREADED_PAIRS", -1 if threaded else HUGE)
    for name in ("_LONG_LIST", "_MANY_QUERIES"):
        monkeypatch.setattr(search, name, 0 if product else HUGE)
    for name in ("_PIECE", "_LONG_PIECE"):
        monkeypatch.setattr(search, name, 50 if threaded else HUGE)
    queries, kept = integers(QUERIES, 4), set(gallery.ids(where))
    own = [5 * row + 4 for row in range(QUERIES)] if exclude else None
    how = {"method": "brute_force"} if probes is None else {"probes": probes}
    results = gallery.search_embeddings(queries, k=K, where=where, exclude_id=own, **how)
    for row, (query, result) in enumerate(zip(queries, results, strict=True)):
        expected = exhaustive(gallery, query, probes, kept, own[row] if own else None)
        assert result.ids == [id for id, _ in expected]
        assert result.distances == pytest.approx([distance for _, distance in expected], abs=1e-6)
        single = gallery.search_embeddings(query[None], k=K, where=where, exclude_id=own[row] if own else None, **how)
        assert single[0].hits == result.hits


def test_a_list_in_two_parts_beside_an_empty_one(tmp_path) -> None:
    """As many pieces as queries, though one query has two and the other none."""
    anchors = np.eye(2, DIM, dtype=np.float32) * 10
    items = anchors[:1] + np.arange(10, dtype=np.float32)[:, None] / 10
    gallery = Gallery.create(tmp_path / "g", anchors=anchors, lists="anchor")
    gallery.add_embeddings(items[:5])
    gallery.optimize()
    gallery.add_embeddings(items[5:])
    results = gallery.search_embeddings(anchors, K)
    assert [result.ids for result in results] == [list(range(10)), results[1].ids]
    assert sorted(results[1].ids) == list(range(10))
