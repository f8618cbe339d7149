"""Lists in fewer bits find what the full ones find, and say so where they do not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kedge.errors import ConfigError
from kedge.gallery import Gallery, crew
from kedge.gallery.precision import PRECISIONS, Precision, described

DIM, ANCHORS, ITEMS = 48, 5, 1500
NARROW: list[Precision] = ["bfloat16", "int8"]


def clusters(seed: int, offset: float = 0.0, spread: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    chance = np.random.default_rng(seed)
    anchors = (chance.normal(size=(ANCHORS, DIM)) * 2 + offset).astype(np.float32)
    items = anchors[chance.integers(0, ANCHORS, ITEMS)] + chance.normal(size=(ITEMS, DIM)) * spread
    return anchors, items.astype(np.float32)


def gallery_of(path: Path, anchors: np.ndarray, items: np.ndarray, precision: Precision) -> Gallery:
    gallery = Gallery.create(path, anchors=anchors, lists="anchor", precision=precision)
    gallery.add_embeddings(items, paths=[f"{row}.jpg" for row in range(len(items))])
    gallery.optimize()
    return Gallery.open(path)


@pytest.mark.parametrize("options", [{}, {"probes": 3}, {"probes": ANCHORS}, {"where": "id % 7 = 0"}])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("precision", NARROW)
def test_the_same_hits_as_full_lists(
    precision: Precision, together: bool, options: dict[str, object], tmp_path: Path
) -> None:
    anchors, items = clusters(0)
    full = gallery_of(tmp_path / "full", anchors, items, "float32")
    narrow = gallery_of(tmp_path / "narrow", anchors, items, precision)
    queries = np.concatenate([clusters(1)[1][:30], items[:10]])
    if together:
        pairs = zip(*(one.search_embeddings(queries, k=20, **options) for one in (full, narrow)), strict=True)
    else:
        pairs = ((full.search(query, 20, **options), narrow.search(query, 20, **options)) for query in queries)
    for exact, found in pairs:
        assert [hit.id for hit in found] == [hit.id for hit in exact]
        assert np.allclose(found.distances, exact.distances, rtol=1e-6)


@pytest.mark.parametrize(("offset", "spread"), [(0, 1e-3), (1e3, 1.0), (0, 1e4), (5.0, 1e-6), (0, 1e-20)])
def test_sixteen_bits_miss_nothing_wherever_the_items_lie(offset: float, spread: float, tmp_path: Path) -> None:
    anchors, items = clusters(2, offset, spread)
    items[200:260] = items[200]  # copies
    full = gallery_of(tmp_path / "full", anchors, items, "float32")
    narrow = gallery_of(tmp_path / "narrow", anchors, items, "bfloat16")
    queries = items[190:230] + np.float32(spread) * clusters(3, 0, 0.1)[1][:40]
    for query in queries.astype(np.float32):
        exact, found = full.search(query, 20), narrow.search(query, 20)
        assert found.distances == exact.distances
        assert found.ids == exact.ids


def test_what_eight_bits_miss_is_stated(tmp_path: Path) -> None:
    anchors, items = clusters(4, spread=0.0)
    # One number is so large that the steps swallow all others, in which the items differ.
    items[:, 0] += 1000 * np.sign(np.arange(ITEMS) - ITEMS / 2)
    items[:, 1:] += np.random.default_rng(5).normal(size=(ITEMS, DIM - 1)).astype(np.float32)
    narrow = gallery_of(tmp_path / "narrow", anchors, items, "int8")
    recall = narrow.snapshot().parts[0].lists.recall
    assert recall is not None
    assert recall < 0.98
    easy = gallery_of(tmp_path / "easy", *clusters(6), "int8").snapshot().parts[0].lists.recall
    assert easy is not None
    assert easy > 0.99
    assert gallery_of(tmp_path / "full", *clusters(6), "float32").snapshot().parts[0].lists.recall is None


def test_new_items_join(tmp_path: Path) -> None:
    anchors, items = clusters(7)
    narrow = gallery_of(tmp_path / "g", anchors, items, "int8")
    [new] = narrow.add_embeddings(items[:1] + 0.001, labels=["unseen"])
    assert narrow.search(items[0], 2, probes=ANCHORS + 1).ids == [0, new]
    narrow.optimize()
    assert narrow.search(items[0], 2, probes=ANCHORS + 1).ids == [0, new]
    narrow.remove(new)
    assert narrow.search(items[0], 1, probes=ANCHORS + 1).ids == [0]


@pytest.mark.parametrize("precision", NARROW)
def test_codes_say_how_far_off_they_are(precision: Precision) -> None:
    narrow = PRECISIONS[precision]
    assert narrow is not None
    vectors = clusters(8)[1]
    vectors[0] = 0
    codes, scales = narrow.encode(vectors)
    meant = narrow.widen(codes) * scales[:, None]
    norms, errors = described(narrow, vectors, codes, scales)
    assert codes.dtype == narrow.dtype
    assert np.allclose(norms, (meant.astype(np.float64) ** 2).sum(axis=1), rtol=1e-5)
    assert np.allclose(errors, np.linalg.norm(meant.astype(np.float64) - vectors, axis=1), rtol=1e-4, atol=1e-7)
    assert errors[0] == 0
    assert (errors < np.linalg.norm(vectors, axis=1) * 0.02 + 1e-12).all()


def test_alone_or_together_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    anchors, items = clusters(9)
    gallery = gallery_of(tmp_path / "g", anchors, items, "float32")
    monkeypatch.setattr(crew, "_WORTH_IT", 0)
    monkeypatch.setattr(crew, "_CREW", 2)
    monkeypatch.setattr(crew, "_SLOW", 0.0)  # any wait is too long
    monkeypatch.setattr(crew, "_ALONE", 1e9)
    monkeypatch.setattr(crew, "_alone_until", 0.0)
    together = gallery.search(items[0], 20)
    assert crew._alone_until > 1e8
    alone = gallery.search(items[0], 20)
    assert alone.hits == together.hits


def test_beside_a_library_that_brings_the_same_symbols() -> None:
    pytest.importorskip("usearch")
    script = (
        "import usearch.index, numpy as np; from kedge.gallery.crew import read_together; "
        "print(read_together(np.ones((1, 4), np.float32), np.zeros((3, 4), np.float32), 'sqeuclidean', 'float32'))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "[4. 4. 4.]\n", done.stderr


def test_bad_precision(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="precision must be one of float32, bfloat16, int8, found 'int4'"):
        Gallery.create(tmp_path / "g", dim=3, precision="int4")  # type: ignore[arg-type]
