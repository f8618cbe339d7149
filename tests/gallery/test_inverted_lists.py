"""The inverted lists on disk, written a batch of rows at a time, are the items ordered by list and id."""

from pathlib import Path

import numpy as np
import pytest

from kedge import Gallery
from kedge.gallery import inverted_lists
from kedge.gallery.inverted_lists import open_lists

DIM, CLASSES = 4, ["a", "b", "c"]


@pytest.mark.parametrize("rows_at_once", [1, 7, 4096])
def test_batches_of_any_size_make_the_same_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_at_once: int
) -> None:
    monkeypatch.setattr(inverted_lists, "_WRITE", rows_at_once * 4 * DIM)
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((50, DIM)).astype(np.float32)
    labels = [None if row % 5 == 0 else CLASSES[row % 3] for row in range(50)]
    paths = [None if row % 7 == 0 else "ü" * (row * 5) + ".jpg" for row in range(50)]  # some longer than a cell
    anchors = rng.standard_normal((3, DIM)).astype(np.float32)
    gallery = Gallery.create(tmp_path / "g", anchors=anchors, classes=CLASSES)
    gallery.add_embeddings(vectors[:30], labels[:30], paths[:30])
    gallery.add_embeddings(vectors[30:], labels[30:], paths[30:])
    gallery.remove([8, 31])
    gallery.optimize()

    ids = [row for row in range(50) if row not in (8, 31)]
    nearest = np.square(vectors[:, None] - anchors).sum(axis=2).argmin(axis=1)
    numbers = [int(nearest[row]) if (name := labels[row]) is None else CLASSES.index(name) for row in range(50)]
    ids.sort(key=lambda row: (numbers[row], row))
    stored = open_lists(gallery.path / "lists")
    assert stored is not None
    lists = stored.lists
    lists.verify()
    np.testing.assert_array_equal(lists.vectors, vectors[ids])
    np.testing.assert_allclose(lists.norms, np.square(vectors[ids]).sum(axis=1), rtol=1e-6)
    np.testing.assert_array_equal(np.diff(lists.offsets), np.bincount([numbers[row] for row in ids], minlength=3))
    assert lists.describe(np.arange(len(ids))) == (ids, [paths[row] for row in ids], [labels[row] for row in ids])


def test_lists_of_no_item(tmp_path: Path) -> None:
    gallery = Gallery.create(tmp_path / "g", anchors=np.eye(2, DIM, dtype=np.float32))
    gallery.add_embeddings(np.ones((3, DIM)))
    gallery.remove([0, 1, 2])
    gallery.optimize()
    assert len(Gallery.open(gallery.path)) == 0
    assert not gallery.search(np.ones(DIM)).hits
