"""What lists do not hold yet, found without reading all of the record; and the memory that a gallery may use."""

import numpy as np
import pytest

from kedge import Gallery
from kedge.errors import ConfigError, GalleryError
from kedge.gallery import view
from kedge.gallery.changes import Marks, compare
from kedge.gallery.lists import open_lists
from kedge.gallery.record import Record

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
    return compare(opened, Record(gallery.path, DIM))


def test_nothing_has_changed(gallery: Gallery) -> None:
    change = changed(gallery)
    assert change.alive is None
    assert len(change.new) == 0
    assert change.files == set()


def test_rows_that_came_are_read_from_their_own_files(gallery: Gallery) -> None:
    gallery.add_embeddings(vectors(7))
    change = changed(gallery)
    assert change.alive is None
    assert change.new.tolist() == list(range(50, 57))
    assert len(change.files) == 1 < len(Record(gallery.path, DIM).pieces())


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


def test_marks_grow_and_keep_the_higher() -> None:
    marks = Marks()
    marks.set(np.array([5, 100_000]), 2)
    marks.set(np.array([5, 7]), 1)
    assert marks.of(np.array([5, 6, 7, 100_000, 10**9])).tolist() == [2, 0, 1, 2, 0]
    assert marks.with_mark(2).tolist() == [5, 100_000]


def test_what_does_not_fit_is_refused_and_not_loaded(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "_ROW", 40 << 20)
    monkeypatch.setattr(view, "_TAIL", 1)
    small = Gallery.open(gallery.path, memory=64 << 20)
    small.add_embeddings(vectors(3))
    with small.writing(), pytest.raises(GalleryError, match="wait for its writer"):
        Gallery.open(gallery.path, memory=64 << 20).snapshot()
    assert len(Gallery.open(gallery.path, memory=64 << 20)) == 53, "once nobody writes, the lists are written anew"


def test_memory_has_a_least(gallery: Gallery) -> None:
    with pytest.raises(ConfigError, match="memory must be at least 64 MiB, found 1 MiB"):
        Gallery.open(gallery.path, memory=1 << 20)


def test_the_first_look_into_a_list_asks_for_all_its_parts(gallery: Gallery) -> None:
    lists = gallery.snapshot().parts[0].lists
    assert lists.mapped
    assert not lists._seen.any()
    gallery.search(np.eye(3, DIM, dtype=np.float32)[1] * 4, k=3)
    assert lists._seen.tolist() == [False, True, False, False]
    lists.prepare([0, 1, 2, 99])
    assert lists._seen.tolist() == [True, True, True, False]


def test_ids_that_were_damaged_have_no_mark() -> None:
    marks = Marks()
    marks.set(np.arange(3000), 2)
    assert marks.of(np.array([-1, -5000, 5, 2999, 1 << 60])).tolist() == [0, 0, 2, 2, 0]
