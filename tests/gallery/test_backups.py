"""A copy of a gallery, taken at any moment, opens and gives no id twice."""

from __future__ import annotations

import random
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kedge.errors import GalleryError
from kedge.gallery import Gallery, integrity

DIM = 8


def vectors(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32)


@pytest.fixture
def gallery(tmp_path: Path) -> Gallery:
    gallery = Gallery.create(tmp_path / "g", dim=DIM)
    gallery.add_embeddings(vectors(5), labels=["a"] * 5)
    return gallery


@pytest.mark.parametrize("counter", [None, "0", "3"], ids=["missing", "of the beginning", "stale"])
def test_ids_go_on_behind_the_largest_in_use(counter: str | None, gallery: Gallery) -> None:
    gallery.remove(4)
    file = gallery.path / "next_id"
    if counter is None:
        file.unlink()
    else:
        file.write_text(counter)
    opened = Gallery.open(gallery.path)
    assert opened.add_embeddings(vectors(2), labels=["a"] * 2) == [5, 6]
    assert opened.add_embeddings(vectors(1)) == [7]
    assert opened.remove(5) == 1
    assert file.read_text() == "8"


def test_ids_that_were_skipped_stay_skipped(gallery: Gallery) -> None:
    (gallery.path / "next_id").write_text("100")
    assert gallery.add_embeddings(vectors(1)) == [100]


def test_a_counter_that_is_no_number(gallery: Gallery) -> None:
    for counter in ("", "q5", "-5", "5.0", "٥", "9" * 30, "9" * 5000):
        (gallery.path / "next_id").write_text(counter)
        with pytest.raises(GalleryError, match=r"next_id is damaged; delete it, and the next id"):
            gallery.add_embeddings(vectors(1))
    (gallery.path / "next_id").unlink()
    assert gallery.add_embeddings(vectors(1)) == [5]


# ---------------------------------------------------------------- copies of a gallery that is written meanwhile


def copied_while_written(gallery: Gallery, copy: Path) -> None:
    """What a copy holds that came to the data first and, after another commit, to the versions."""
    shutil.copytree(gallery.path, copy)
    gallery.add_embeddings(vectors(3, 1), labels=["b"] * 3)
    gallery.remove([0])
    for name in ("record.lance/_versions", "record.lance/_transactions"):
        shutil.copytree(gallery.path / name, copy / name, dirs_exist_ok=True)
    for name in ("checksums.json", "next_id"):
        shutil.copy(gallery.path / name, copy / name)


def test_a_copy_opens_at_the_newest_version_that_is_whole(gallery: Gallery, tmp_path: Path) -> None:
    copied_while_written(gallery, tmp_path / "copy")
    opened = Gallery.open(tmp_path / "copy")
    assert opened.ids() == [0, 1, 2, 3, 4]
    assert opened.search(vectors(5)[2], k=1).ids == [2]
    new = opened.add_embeddings(vectors(2, 2), labels=["c"] * 2)
    again = Gallery.open(tmp_path / "copy")
    assert again.ids() == [0, 1, 2, 3, 4, *new]
    assert "as it was written" in again.check()
    assert gallery.ids() == [1, 2, 3, 4, 5, 6, 7]


def test_a_copy_that_came_to_the_checksums_last(gallery: Gallery, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(gallery.path, tmp_path / "copy"))
    gallery.add_embeddings(vectors(3, 1))
    shutil.copy(gallery.path / "checksums.json", copy)
    opened = Gallery.open(copy)
    assert opened.add_embeddings(vectors(1, 2)) == [5]
    assert Gallery.open(copy).ids() == [0, 1, 2, 3, 4, 5]


def test_a_gallery_that_lost_a_file_does_not_go_back_in_silence(gallery: Gallery) -> None:
    before = gallery._table.files()
    gallery.add_embeddings(vectors(3, 1))
    for name in gallery._table.files() - before:
        if "data" in name:
            (gallery.path / name).unlink()
    with pytest.raises(GalleryError, match="damaged"):
        len(Gallery.open(gallery.path))


def test_nor_does_a_copy_that_lost_it_later(gallery: Gallery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrity, "_CLOCK_SKEW", 0.0)
    before = gallery._table.files()
    gallery.add_embeddings(vectors(3, 1))
    time.sleep(0.1)
    copy = Path(shutil.copytree(gallery.path, tmp_path / "copy"))
    for name in gallery._table.files() - before:
        if "data" in name:
            (copy / name).unlink()
    with pytest.raises(GalleryError, match="damaged"):
        len(Gallery.open(copy))


def check_backup(copy: Path) -> int:
    gallery = Gallery.open(copy)
    ids = gallery._table.columns(["id"]).column("id").to_pylist()
    assert len(set(ids)) == len(ids)
    query = np.zeros(DIM, np.float32)
    assert sorted(gallery.search(query, k=max(1, len(ids)), method="brute_force").ids) == sorted(ids)
    new = gallery.add_embeddings(vectors(3), labels=["after"] * 3)
    assert not set(new) & set(ids)
    assert gallery.remove(new[0]) == 1
    assert len(gallery) == len(ids) + 2
    assert "as it was written" in gallery.check()
    return len(ids)


def write(path: Path, seed: int, began: threading.Event, stop: threading.Event) -> None:
    """Add, remove and optimise until told to stop."""
    rng, gallery, ids = np.random.default_rng(seed), Gallery.open(path), list[int]()
    while not stop.is_set():
        count = int(rng.integers(1, 200))
        ids += gallery.add_embeddings(rng.normal(size=(count, DIM)), labels=[str(count % 7)] * count)
        began.set()
        if rng.random() < 0.5:
            gallery.remove([int(id) for id in rng.choice(ids, min(len(ids), 20), replace=False)])
        if rng.random() < 0.2:
            gallery.optimize()


def check_backups(tmp_path: Path, count: int, seed: int) -> None:
    Gallery.create(tmp_path / "g", dim=DIM)
    chance, began, stop = random.Random(seed), threading.Event(), threading.Event()
    writer = threading.Thread(target=write, args=(tmp_path / "g", seed, began, stop))
    writer.start()
    try:
        assert began.wait(60)
        for turn in range(count):
            time.sleep(chance.uniform(0.05, 0.3))
            order = ["data", "_deletions", "_transactions", "_versions"]
            chance.shuffle(order)
            copy_slowly(tmp_path / "g", tmp_path / f"copy {turn}", order, chance)
        assert writer.is_alive()
    finally:
        stop.set()
        writer.join()
    sizes = [check_backup(tmp_path / f"copy {turn}") for turn in range(count)]
    assert sizes[-1] > 0


def copy_slowly(source: Path, target: Path, order: list[str], chance: random.Random) -> None:
    """As `cp -r` does it, in some order and while time goes by; what vanishes meanwhile is not copied."""
    target.mkdir()
    table = [f"record.lance/{name}" for name in order]
    rest = ["lists", "next_id", "checksums.json", "gallery.json"]
    chance.shuffle(rest)
    for name in [*table, *rest] if chance.random() < 0.5 else [*rest, *table]:
        time.sleep(chance.uniform(0, 0.1))
        if (source / name).is_dir():
            (target / name).mkdir(parents=True)
            for file in sorted((source / name).rglob("*")):
                try:
                    if file.is_file():
                        (target / file.relative_to(source)).parent.mkdir(exist_ok=True)
                        shutil.copy2(file, target / file.relative_to(source))
                except FileNotFoundError:
                    continue
        elif (source / name).exists():
            shutil.copy2(source / name, target / name)


def test_two_backups_of_a_live_gallery(tmp_path: Path) -> None:
    check_backups(tmp_path, count=2, seed=0)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_twenty_backups_of_a_live_gallery(tmp_path: Path) -> None:
    check_backups(tmp_path, count=20, seed=1)
