"""Readers and a writer at once: every reader sees one version, whole."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kedge.errors import GalleryError
from kedge.gallery import Gallery
from kedge.gallery import table as module

DIM = 8


def check_readers_and_writer(path: Path, seconds: float) -> None:
    gallery = Gallery.create(path, anchors=np.eye(4, DIM) * 3, classes=["a", "b", "c", "d"])
    chance = np.random.default_rng(0)
    # The item with id i has this vector, whatever happens; so a hit can be checked from its id alone.
    everything = chance.normal(size=(200_000, DIM)).astype(np.float32)
    labels = [("a", "b", "c", "d", "new")[row % 5] for row in range(len(everything))]
    gallery.add_embeddings(everything[:500], labels=labels[:500])
    stop = threading.Event()
    failures: list[str] = []
    searches = 0

    def read(seed: int) -> None:
        nonlocal searches
        own = np.random.default_rng(seed)
        try:
            while not stop.is_set():
                query = own.normal(size=DIM).astype(np.float32)
                snapshot = gallery.snapshot()
                ids = set(gallery._table.at(snapshot.version).columns(["id"]).column("id").to_pylist())
                [result] = gallery.search_embeddings(query[None], 10, "brute_force", snapshot=snapshot)
                expected = np.array(sorted(ids))
                distances = np.linalg.norm(everything[expected] - query, axis=1)
                order = np.argsort(distances, kind="stable")[:10]
                wanted, found = distances[order], [hit.distance for hit in result]
                if len({hit.id for hit in result}) != 10 or not {hit.id for hit in result} <= ids:
                    failures.append(f"version {snapshot.version}: doubled or foreign hits")
                if not np.allclose(wanted, found, atol=1e-5):
                    failures.append(f"version {snapshot.version}: {found} instead of {wanted}")
                if any(hit.label != labels[hit.id] for hit in result):
                    failures.append(f"version {snapshot.version}: wrong label")
                searches += 1
        except Exception as error:
            failures.append(repr(error))
            stop.set()

    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for reader in readers:
        reader.start()
    end, step, next_id = time.monotonic() + seconds, 0, 500
    # On a busy machine it takes longer until enough has happened.
    while (time.monotonic() < end or step <= 5 or searches <= 20) and not stop.is_set() and next_id < 190_000:
        count = int(chance.integers(1, 100))
        ids = gallery.add_embeddings(everything[next_id : next_id + count], labels=labels[next_id : next_id + count])
        assert ids == list(range(next_id, next_id + count))
        next_id += count
        gallery.remove([int(one) for one in chance.integers(0, next_id, 20)])
        step += 1
        if step % 5 == 0:
            gallery.optimize()
    stop.set()
    for reader in readers:
        reader.join()
    assert failures == []
    assert searches > 20
    assert step > 5


def test_four_readers_and_a_writer(tmp_path: Path) -> None:
    check_readers_and_writer(tmp_path / "g", seconds=1)


@pytest.mark.soak
def test_four_readers_and_a_writer_for_a_minute(tmp_path: Path) -> None:
    check_readers_and_writer(tmp_path / "g", seconds=60)


def test_a_second_writer_is_told_to_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Gallery.create(tmp_path / "g", dim=2)
    second = Gallery.open(tmp_path / "g")
    monkeypatch.setattr(module, "_LOCK_SECONDS", 0.1)
    with first.writing(), pytest.raises(GalleryError, match="Another process is writing"):
        second.add_embeddings(np.zeros((1, 2)))
    assert second.add_embeddings(np.zeros((1, 2))) == [0]
    assert len(first) == 1
