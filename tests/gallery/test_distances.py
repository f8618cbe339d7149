"""Scans with SimSIMD: threads change nothing, nor do other libraries; lists of other precisions are rebuilt."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kedge.gallery import Gallery, distances
from kedge.gallery.schema import seal_json, unseal_json

DIM, ANCHORS, ITEMS = 48, 5, 1500


def clusters(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    anchors = (rng.normal(size=(ANCHORS, DIM)) * 2).astype(np.float32)
    items = anchors[rng.integers(0, ANCHORS, ITEMS)] + rng.normal(size=(ITEMS, DIM))
    return anchors, items.astype(np.float32)


@pytest.fixture
def gallery(tmp_path: Path) -> Gallery:
    anchors, items = clusters(0)
    gallery = Gallery.create(tmp_path / "g", anchors=anchors, lists="anchor")
    gallery.add_embeddings(items)
    gallery.optimize()
    return gallery


def test_threads_change_no_hit(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    query = clusters(0)[1][0]
    monkeypatch.setattr(distances, "_PARALLEL_BYTES", 0)
    monkeypatch.setattr(distances, "_THREADS", 2)
    monkeypatch.setattr(distances, "_SLOW", 0.0)  # any wait is too long
    monkeypatch.setattr(distances, "_BACKOFF", 1e9)
    monkeypatch.setattr(distances, "_single_threaded_until", 0.0)
    parallel = gallery.search(query, 20)
    assert distances._single_threaded_until > 1e8
    assert gallery.search(query, 20).hits == parallel.hits


@pytest.mark.parametrize("count", [1, 2, 5, 9])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_smallest_are_those_of_a_stable_sort(count: int, rows: int) -> None:
    rng = np.random.default_rng(0)
    for width in (0, 1, 5, 40):
        values = rng.integers(0, 12, (rows, width)).astype(np.float32)  # with ties
        expected = np.argsort(values, axis=1, kind="stable")[:, :count]
        assert np.array_equal(distances.smallest(values, count), expected)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize("where", ["id < 0", "id = 7", "id % 3 = 1", "id < 1400"])
def test_a_filter_finds_what_a_scan_of_all_matching_items_finds(
    gallery: Gallery, queries: int, k: int, where: str
) -> None:
    items = clusters(0)[1]
    ids = np.arange(ITEMS)
    matching = {"id < 0": ids[:0], "id = 7": ids[7:8], "id % 3 = 1": ids[1::3], "id < 1400": ids[:1400]}[where]
    results = gallery.search_embeddings(items[:queries], k=k, method="brute_force", where=where)
    again = gallery.search_embeddings(items[:queries], k=k, probes=ANCHORS, where=where)
    for query, result, probed in zip(items, results, again, strict=False):
        order = np.linalg.norm(items[matching] - query, axis=1).argsort(kind="stable")[:k]
        assert result.ids == matching[order].tolist() == probed.ids


def test_beside_a_library_that_brings_the_same_symbols() -> None:
    pytest.importorskip("usearch")
    script = (
        "import usearch.index, numpy as np; from kedge.gallery.distances import parallel_cdist; "
        "print(parallel_cdist(np.ones((1, 4), np.float32), np.zeros((3, 4), np.float32)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "[[4. 4. 4.]]\n", done.stderr


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_lists_of_another_precision_are_rebuilt(precision: str, gallery: Gallery) -> None:
    """As earlier releases wrote them, with arrays of codes beside the others."""
    query = clusters(0)[1][0]
    expected = gallery.search(query, 20).hits
    (header,) = gallery.path.glob("lists/*/lists.json")
    for file in (gallery.path / "gallery.json", header):
        file.write_bytes(seal_json({**unseal_json(file.read_bytes()), "precision": precision}))
    np.save(header.with_name("code_codes.npy"), np.zeros((ITEMS, DIM), np.int8))
    assert Gallery.open(gallery.path).search(query, 20).hits == expected
    assert not header.exists()
    assert "as they were written" in Gallery.open(gallery.path).check()


def test_keywords_of_the_last_release(tmp_path: Path, gallery: Gallery) -> None:
    query = clusters(0)[1][0]
    with pytest.warns(DeprecationWarning, match="precision has no effect any more"):
        Gallery.create(tmp_path / "other", dim=3, precision="int8")  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match="at_least is called min_candidates now"):
        found = gallery.search(query, 900, at_least=900)  # type: ignore[call-arg]
    assert len(found) == 900
    with pytest.warns(DeprecationWarning, match="without is called exclude_id now"):
        [found] = gallery.search_embeddings(query[None], 1, without=0)  # type: ignore[call-arg]
    assert found.ids != [0]
