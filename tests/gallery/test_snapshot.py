"""What lists do not hold yet, found without reading all of the table; and the memory that a gallery may use."""

import numpy as np
import pytest

from kedge import Gallery
from kedge.errors import ConfigError, GalleryError
from kedge.gallery import snapshot
from kedge.gallery.inverted_lists import open_lists
from kedge.gallery.snapshot import changes_since
from kedge.gallery.table import Table

DIM = 4


@pytest.fixture
def gallery(tmp_path) -> Gallery:
    made = Gallery.create(tmp_path / "gallery", anchors=np.eye(3, DIM, dtype=np.float32) * 4)
    made.add_embeddings(vectors(30))
    made.add_embeddings(vectors(20))
    made.optimize()
    return made


def vectors(count: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, DIM)).astype(np.float32)


def changed(gallery: Gallery):
    opened = open_lists(gallery.path / "lists")
    assert opened is not None
    return changes_since(opened, Table(gallery.path, DIM))


def test_nothing_has_changed(gallery: Gallery) -> None:
    change = changed(gallery)
    assert change.alive is None
    assert len(change.new) == 0
    assert change.data_files == set()


def test_rows_that_came_are_read_from_their_own_files(gallery: Gallery) -> None:
    gallery.add_embeddings(vectors(7))
    change = changed(gallery)
    assert change.alive is None
    assert change.new.tolist() == list(range(50, 57))
    assert len(change.data_files) == 1 < len(Table(gallery.path, DIM).data_files())


def test_rows_that_went_are_marked(gallery: Gallery) -> None:
    gallery.add_embeddings(vectors(5))
    gallery.remove([3, 17, 52])
    change = changed(gallery)
    opened = open_lists(gallery.path / "lists")
    assert opened is not None
    assert opened.lists.ids[~change.alive].tolist() == sorted([3, 17], key=opened.lists.ids.tolist().index)
    assert change.new.tolist() == [50, 51, 53, 54]
    assert len(gallery) == 52


def test_an_older_state_with_other_removals(gallery: Gallery) -> None:
    """Removed, optimised, restored, removed again: as many gone as the lists lack, but other ones."""
    before = gallery.versions()[-1].number
    gallery.remove([1, 2])
    gallery.optimize()
    gallery.restore(before)
    gallery.remove([5, 6])
    change = changed(gallery)
    assert change.new.tolist() == [1, 2]
    assert sorted(hit.id for hit in gallery.search(np.zeros(DIM, np.float32), k=100, method="brute_force")) == [
        row for row in range(50) if row not in (5, 6)
    ]


def test_what_does_not_fit_is_refused_and_not_loaded(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_ROW_OVERHEAD", 40 << 20)
    monkeypatch.setattr(snapshot, "_MAX_TAIL", 1)
    small = Gallery.open(gallery.path, memory=64 << 20)
    small.add_embeddings(vectors(3))
    with small.writing(), pytest.raises(GalleryError, match="run kedge optimize"):
        Gallery.open(gallery.path, memory=64 << 20).snapshot()
    assert len(Gallery.open(gallery.path, memory=64 << 20)) == 53, "once nobody writes, the lists are written anew"


def test_memory_has_a_least(gallery: Gallery) -> None:
    with pytest.raises(ConfigError, match="memory must be at least 64 MiB, found 1 MiB"):
        Gallery.open(gallery.path, memory=1 << 20)


def test_a_list_is_compared_with_its_checksums_at_the_first_look(tmp_path) -> None:
    gallery = Gallery.create(tmp_path / "gallery", anchors=np.eye(3, DIM, dtype=np.float32) * 4)
    gallery.add_embeddings(vectors(1500), labels=["0", "1", "2"] * 500)
    gallery.optimize()
    lists = Gallery.open(gallery.path).snapshot().parts[0].lists
    assert lists.blocks is not None
    assert lists.blocks._pending.tolist() == [True] * 6
    lists.prefetch([2, 99])
    assert lists.blocks._pending.tolist() == [True] * 3 + [False] * 3
    lists.verify()
    assert not lists.blocks._pending.any()
