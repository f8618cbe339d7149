from __future__ import annotations

from pathlib import Path

import pytest

from kedge.gallery import Gallery
from kedge.model import Model
from kedge.ray.index import Decoder, Embedder, Task, Writer, pack, unpack
from kedge.ray.journal import Entry, Journal
from kedge.ray.sources import FileShard


def one(gallery: Gallery, first: int, files: list[Path]) -> Entry:
    """A chunk through all stages, in this process."""
    model = gallery.model
    assert model is not None
    work = Task(FileShard(0, [str(file) for file in files], ["a"] * len(files)), {})
    [rows] = Decoder(first, model.preprocessing, gallery.thumbnails)(pack(work))
    embedder = Embedder.__new__(Embedder)
    embedder._model, embedder._columns = model, ("embedding", "features")
    entry = unpack(Writer(gallery.location, gallery.dim, first)(embedder(rows)))
    assert isinstance(entry, Entry)
    return entry


def test_written_twice_is_there_once(gallery: Gallery, photos: Path) -> None:
    files = sorted((photos / "c0").iterdir())[:5]
    journal = Journal(str(gallery.path))
    journal.begin("digest", 7)
    twice = [one(gallery, 7, files) for _ in range(2)]
    assert twice[0].files != twice[1].files
    entries = journal.entries()
    assert list(entries) == [0]
    assert entries[0].ids == [7, 8, 9, 10, 11]
    with gallery.writing() as record:
        record.commit(entries[0].fragments)
    assert gallery.ids() == [7, 8, 9, 10, 11]


def test_what_no_longer_holds_is_not_taken(gallery: Gallery, photos: Path) -> None:
    journal = Journal(str(gallery.path))
    journal.begin("digest", 0)
    entry = one(gallery, 0, sorted((photos / "c0").iterdir())[:3])
    assert Journal(str(gallery.path)).resume("digest", 1)
    assert journal.entries() == {0: entry}
    assert Journal(str(gallery.path), first=1).entries() == {}
    (gallery.path / "journal" / "0" / "000000000999.json").write_text('{"start": 99')
    assert journal.entries() == {0: entry}
    [data] = [gallery.path / "record.lance" / "data" / name for name in entry.files]
    data.unlink()
    assert journal.entries() == {}


@pytest.mark.parametrize("left", ["another listing", "perhaps committed", "half a plan"])
def test_another_plan_is_removed(gallery: Gallery, left: str) -> None:
    journal = Journal(str(gallery.path))
    journal.begin("other" if left == "another listing" else "digest", 0, committing=1)
    if left == "half a plan":
        (gallery.path / "journal" / "plan.json").write_text('{"digest": "dig')
    again = Journal(str(gallery.path))
    assert not again.resume("digest", version=2)
    assert not (gallery.path / "journal").exists()


def test_a_driver_killed_before_its_commit_goes_on(gallery: Gallery, model: Model) -> None:
    Journal(str(gallery.path)).begin("digest", 5, committing=3)
    again = Journal(str(gallery.path))
    assert again.resume("digest", version=3)
    assert again.first == 5
