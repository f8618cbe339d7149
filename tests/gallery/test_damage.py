"""Damaged bytes are noticed or harmless: no search answers with a wrong hit."""

from __future__ import annotations

import json
import random
import shutil
import zlib
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from filelock import FileLock

from kedge.encoders import build_encoder
from kedge.errors import ConfigError, GalleryError, KedgeError
from kedge.gallery import Gallery, table
from kedge.gallery.schema import CHECKSUM, damaged_rows, row_checksums
from kedge.images import Preprocessing
from kedge.model import Model

DIM = 8
CLASSES = ["a", "b", "c", "d"]
QUERIES = np.random.default_rng(5).normal(size=(4, DIM)).astype(np.float32)
FEATURES = np.random.default_rng(6).normal(size=(620, 512)).astype(np.float32)


def vectors(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32)


def fill(gallery: Gallery) -> Gallery:
    """600 items in the lists, 20 in the tail, some of either removed."""
    labels = [CLASSES[row % 4] for row in range(600)]
    paths = [f"photos/{row}.jpg" for row in range(600)]
    features = FEATURES if gallery.features else None
    first, last = (None, None) if features is None else (features[:600], features[600:])
    gallery.add_embeddings(vectors(600, 1), labels, paths, {"price": list(range(600))}, features=first)
    gallery.remove([3, 4])
    gallery.optimize()
    gallery.add_embeddings(vectors(20, 2), ["a"] * 20, metadata={"price": [7] * 20}, features=last)
    gallery.remove([10, 605])
    return gallery


@pytest.fixture
def gallery(tmp_path: Path) -> Gallery:
    return fill(Gallery.create(tmp_path / "g", anchors=vectors(4, 9), classes=CLASSES))


def answers(gallery: Gallery) -> list[Any]:
    """Whatever somebody may ask for."""
    found: list[Any] = []
    ways: list[dict[str, Any]] = [{}, {"probes": 4}, {"method": "brute_force"}, {"where": "price < 50", "probes": 4}]
    for way in ways:
        found.append([[tuple(hit) for hit in result] for result in gallery.search_embeddings(QUERIES, k=9, **way)])
    found.append([tuple(hit) for hit in gallery.search(QUERIES[0], k=9)])
    for way in ({}, {"rank": "looks"}, {"where": "price < 50"}) if gallery.features else ():
        results = gallery.search_embeddings(QUERIES, k=9, features=FEATURES[:4], **way)
        found.append([(result.rank, [tuple(hit) for hit in result]) for result in results])
    return [*found, gallery.vector(17).tolist(), tuple(gallery.item(18)), len(gallery), gallery.ids("price = 7")]


def flip(file: Path, place: int, bit: int = 6) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1 << bit
    file.write_bytes(content)


def in_lists(gallery: Gallery, name: str) -> Path:
    (file,) = gallery.path.glob(f"lists/*/{name}")
    return file


def data_file(gallery: Gallery, content: bytes) -> tuple[Path, int]:
    """The file of the newest state that holds some bytes, and where."""
    for name in sorted(gallery._table.files()):
        place = (gallery.path / name).read_bytes().find(content)
        if place >= 0:
            return gallery.path / name, place
    raise AssertionError("They are in no file.")


def damage_vector(gallery: Gallery, id: int) -> Path:
    file, place = data_file(gallery, gallery.vector(id).tobytes())
    flip(file, place + 3)
    return file


ARRAYS = ["vectors.npy", "norms.npy", "ids.npy", "labels.npy", "paths.npy", "offsets.npy", "anchors.npy"]


@pytest.mark.parametrize("name", [*ARRAYS, "checksums.npy", "lists.json"])
def test_damaged_lists_are_rebuilt(name: str, gallery: Gallery) -> None:
    expected = answers(gallery)
    file = in_lists(gallery, name)
    head = 128 if file.suffix == ".npy" else 0
    flip(file, head + int(0.6 * (file.stat().st_size - head)))
    assert answers(Gallery.open(gallery.path)) == expected
    assert not file.exists()
    assert "as they were written" in Gallery.open(gallery.path).check()


def test_a_file_that_is_no_array(gallery: Gallery) -> None:
    expected = answers(gallery)
    in_lists(gallery, "ids.npy").write_bytes(b"rubbish")
    assert answers(Gallery.open(gallery.path)) == expected


def test_another_byte_order_is_no_other_array(gallery: Gallery) -> None:
    expected = answers(gallery)
    file = in_lists(gallery, "vectors.npy")
    flip(file, file.read_bytes().index(b"<f4"), bit=1)
    assert np.load(file).dtype.str == ">f4"
    assert answers(Gallery.open(gallery.path)) == expected


def test_damaged_lists_while_somebody_writes(gallery: Gallery) -> None:
    expected = answers(gallery)
    file = in_lists(gallery, "vectors.npy")
    flip(file, 128 + 400 * 4 * DIM)
    with FileLock(gallery.path / table.LOCK):
        assert answers(Gallery.open(gallery.path)) == expected
    assert file.exists()


def test_a_damaged_vector_of_the_table(gallery: Gallery) -> None:
    good, before = gallery.versions()[-1].number, answers(gallery)
    ids = gallery.add_embeddings(vectors(5, 4), ["a"] * 5)
    gallery.optimize()
    in_lists_before = in_lists(gallery, "lists.json")
    file = damage_vector(gallery, ids[2])
    opened = Gallery.open(gallery.path)
    # The lists are whole; whatever reads the table is not answered.
    assert len(opened.search(QUERIES[0], k=700, method="brute_force")) == len(gallery)
    with pytest.raises(GalleryError, match=f"item {ids[2]} differs from its checksum"):
        opened.vector(ids[2])
    asked = [
        lambda: opened.search(QUERIES[0], where="price < 9"),
        lambda: opened.add_embeddings(vectors(1, 1)),
        lambda: opened.verified_snapshot(),
    ]
    for ask in asked:
        with pytest.raises(GalleryError, match=file.name):
            ask()
    named = rf"damaged items: {ids[2]}; the last good version is \d+ with \d+ items, which kedge restore brings back"
    for ask in (opened.optimize, opened.check):
        with pytest.raises(GalleryError, match=named) as error:
            ask()
    assert in_lists(gallery, "lists.json") == in_lists_before
    last = int(str(error.value).partition("last good version is ")[2].partition(" ")[0])
    assert last >= good
    opened.restore(good)
    again = Gallery.open(gallery.path)
    assert answers(again) == before
    assert again.check().startswith(f"the table of {len(again)} items is as it was written")


def test_a_row_has_a_checksum_of_its_own(gallery: Gallery) -> None:
    """Which is what an item is compared by."""
    damage_vector(gallery, 30)
    (gallery.path / "checksums.json").unlink()
    opened = Gallery.open(gallery.path)
    with pytest.raises(GalleryError, match="item 30 differs from its checksum"):
        opened.vector(30)
    assert opened.vector(31).tolist() == vectors(600, 1)[31].tolist()
    with pytest.raises(GalleryError, match="damaged items: 30;"):
        opened.check()


def test_what_a_killed_writer_left_is_compared_row_by_row(gallery: Gallery) -> None:
    """It is killed between its commit and the checksums of its files."""
    (gallery.path / "checksums.json").unlink()
    file, place = data_file(gallery, gallery.vector(611).tobytes())
    flip(file, place + 2)
    for method in ("two_stage", "brute_force"):
        with pytest.raises(GalleryError, match="damaged items: 611;"):
            Gallery.open(gallery.path).search(QUERIES[0], method=method)


def test_every_file_of_the_table_has_a_checksum(gallery: Gallery) -> None:
    for _ in range(2):
        names = gallery._table.files()
        assert {Path(name).parts[1] for name in names} == {"_versions", "data", "_deletions"}
        assert all(map(Gallery.open(gallery.path)._table.integrity.checksums.__contains__, names))
        gallery.add_embeddings(vectors(2, 1), metadata={"shop": ["x", "y"]})


def test_classes_that_are_not_those_of_the_model(tmp_path: Path) -> None:
    everything(tmp_path)
    file = tmp_path / "g" / "model" / "model.json"
    file.write_text(file.read_text().replace('"c"', '"e"'))
    with pytest.raises(GalleryError, match="have different classes"):
        Gallery.open(tmp_path / "g")


def test_optimize_does_not_take_damage_of_older_versions_for_good(gallery: Gallery) -> None:
    oldest = max((gallery.path / "record.lance" / "_versions").glob("*.manifest"))
    before = [version.number for version in gallery.versions()]
    flip(oldest, oldest.stat().st_size // 2)
    gallery.optimize()
    opened = Gallery.open(gallery.path)
    numbers = [version.number for version in opened.versions()]
    assert set(before) - set(numbers) == {1}
    with pytest.raises(ConfigError, match="versions go from 2 to"):
        opened.restore(1)
    opened.restore(before[-1])
    assert len(opened) == 616


def test_rows_with_metadata_of_any_kind(gallery: Gallery) -> None:
    metadata = {
        "when": [datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC), None],
        "day": [date(2026, 1, 2), date(1969, 1, 1)],
        "tags": [["a", "b"], []],
        "about": [{"x": 1, "y": "é"}, None],
        "share": [0.1, float("nan")],
        "good": [True, None],
    }
    gallery.add_embeddings(vectors(2, 1), metadata=metadata)
    (gallery.path / "checksums.json").unlink()
    assert "as it was written" in Gallery.open(gallery.path).check()
    assert Gallery.open(gallery.path).item(620).metadata["tags"] == ["a", "b"]


def test_dates_count_as_numbers_in_the_checksum_of_a_row() -> None:
    """How Python shows a date depends on what is installed (pandas, time zones), and its checksum must not."""
    moment = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)
    columns = {"when": pa.array([moment], pa.timestamp("us", "UTC")), "day": pa.array([date(2026, 1, 2)])}
    embedding = pa.FixedSizeListArray.from_arrays(pa.array(vectors(1, 1).reshape(-1)), DIM)
    rows = pa.table({"embedding": embedding, **columns})
    numbers = {"when": pa.array([int(moment.timestamp() * 1e6)]), "day": pa.array([20455], pa.int32())}
    assert row_checksums(rows) == row_checksums(pa.table({"embedding": embedding, **numbers}))


def test_the_checksum_of_a_row_is_the_crc_32_of_its_cells() -> None:
    """Tables of earlier releases hold it."""
    columns: dict[str, list[Any]] = {
        "id": [1, 2, 1 << 39],
        "label": ["a", None, "grün"],
        "price": [None, 0.1, 3.0],
        "sold": [True, None, False],
        "tags": [["a"], None, []],
        "thumbnail": [None, b"\x00\xff", b""],
    }
    matrix = vectors(3, 1)
    embedding = pa.FixedSizeListArray.from_arrays(pa.array(matrix.reshape(-1)), DIM)
    rows = pa.table({**{name: pa.array(cells) for name, cells in columns.items()}, "embedding": embedding})

    def encode(cell: Any) -> bytes:
        if isinstance(cell, bytes):
            return cell
        return (json.dumps(cell) if isinstance(cell, list) else str(cell)).encode()

    for row, checksum in enumerate(row_checksums(rows).tolist()):
        expected = 0
        for name, cells in sorted({**columns, "embedding": [vector.tobytes() for vector in matrix]}.items()):
            if cells[row] is not None:
                expected = zlib.crc32(encode(cells[row]), expected ^ zlib.crc32(name.encode()))
        assert checksum == expected


@pytest.mark.parametrize("column", ["label", "path", "hash", "price"])
def test_a_row_is_compared_with_all_its_columns(column: str, gallery: Gallery) -> None:
    rows = gallery._table._dataset.to_table(filter="id = 30")
    assert not damaged_rows(rows).any()
    place = rows.column_names.index(column)
    other = {"price": [31]}.get(column, ["other"])
    changed = rows.set_column(place, column, [other]).cast(rows.schema)
    assert damaged_rows(changed).all()


@pytest.mark.parametrize("column", ["id", "embedding"])
def test_numbers_that_no_item_can_have(column: str, gallery: Gallery) -> None:
    rows: dict[str, Any] = {"id": [700], "embedding": vectors(1, 1)}
    rows[column] = {"id": [1 << 50], "embedding": np.full((1, DIM), np.inf, np.float32)}[column]
    with gallery.writing() as writer:
        writer.commit(writer.write(rows))
    for ask in (lambda: gallery.search(QUERIES[0], k=5, method="brute_force"), gallery.optimize):
        with pytest.raises(GalleryError, match=r"not finite|invalid ids|damaged items: (700|\d{16});"):
            ask()


def test_a_damaged_manifest(gallery: Gallery) -> None:
    before = gallery.versions()[-2].number
    newest = min((gallery.path / "record.lance" / "_versions").glob("*.manifest"))
    # "path" becomes "Path", which Lance reads as another column.
    flip(newest, newest.read_bytes().index(b"path"), bit=5)
    with pytest.raises(GalleryError, match=rf"move .*{newest.name} away to go back to version {before}\."):
        Gallery.open(gallery.path)
    newest.unlink()
    opened = Gallery.open(gallery.path)
    assert opened.versions()[-1].number == before
    opened.add_embeddings(vectors(1, 1))
    assert len(Gallery.open(gallery.path)) == len(opened)


def test_damaged_deletions(gallery: Gallery) -> None:
    for name in gallery._table.files():
        if "_deletions" in name:
            flip(gallery.path / name, (gallery.path / name).stat().st_size // 2)
    with pytest.raises(GalleryError, match=r"_deletions.* differs from its checksum"):
        Gallery.open(gallery.path)


def test_damaged_headers(gallery: Gallery, tmp_path: Path) -> None:
    gallery.calibrate(vectors(100, 3))
    for name, text in {"gallery.json": b'"b"', "anchors.npy": b"", "calibration.json": b"threshold"}.items():
        copy = Path(shutil.copytree(gallery.path, tmp_path / f"copy of {name}"))
        file = copy / name
        # A class, an anchor, a digit.
        flip(file, file.read_bytes().index(text) + (1 if name == "gallery.json" else 12 if text else 150), bit=0)
        with pytest.raises(GalleryError, match=f"{name} is damaged"):
            Gallery.open(copy)


def test_damaged_checksums_are_renewed(gallery: Gallery, caplog: pytest.LogCaptureFixture) -> None:
    expected = answers(gallery)
    file = gallery.path / "checksums.json"
    flip(file, file.stat().st_size // 2)
    opened = Gallery.open(gallery.path)
    assert answers(opened) == expected
    assert "checksums.json is damaged" in caplog.text
    opened.optimize()
    caplog.clear()
    damage_vector(gallery, 30)
    with pytest.raises(GalleryError, match="differs from its checksum"):
        Gallery.open(gallery.path).vector(30)
    assert caplog.text == ""


@pytest.mark.parametrize("with_checksums", [True, False])
def test_a_table_that_was_cut_off_is_no_missing_item(with_checksums: bool, gallery: Gallery) -> None:
    file, _ = data_file(gallery, gallery.vector(30).tobytes())
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    if not with_checksums:
        (gallery.path / "checksums.json").unlink()
    opened = Gallery.open(gallery.path)
    asked = [lambda: opened.vector(30), lambda: opened.item(30), lambda: opened.search(QUERIES[0], where="price < 9")]
    for ask in [*asked, opened.touch, opened.optimize, opened.check]:
        with pytest.raises(GalleryError):
            ask()


def test_before_an_item_is_said_to_be_missing_all_was_compared(gallery: Gallery) -> None:
    """The id itself may be what is damaged."""
    with pytest.raises(ConfigError, match="There is no item 9999"):
        Gallery.open(gallery.path).vector(9999)
    damage_vector(gallery, 30)
    with pytest.raises(GalleryError, match="differs from its checksum"):
        Gallery.open(gallery.path).vector(9999)
    with pytest.raises(GalleryError, match="item 30 differs from its checksum"):
        Gallery.open(gallery.path).vector(30)


# ---------------------------------------------------------------- a bit anywhere


def everything(tmp_path: Path) -> Gallery:
    """A gallery with a model, calibrated: all kinds of files that there are."""
    torch.manual_seed(0)
    encoder = build_encoder("resnet10", dim=DIM, stem="imagenet")
    anchors = torch.from_numpy(vectors(4, 9))
    model = Model(encoder, anchors=anchors, classes=CLASSES, preprocessing=Preprocessing(size=32))
    gallery = fill(Gallery.create(tmp_path / "g", model))
    gallery.calibrate(vectors(100, 3))
    return gallery


def check_flips(tmp_path: Path, count: int, seed: int) -> None:
    source = everything(tmp_path)
    picture = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)

    def asked(gallery: Gallery) -> list[Any]:
        embedded = gallery.model.embed(picture).numpy()[0].tolist() if gallery.model is not None else []
        return [*answers(gallery), embedded, None if gallery.calibration is None else gallery.calibration.threshold]

    expected = asked(Gallery.open(source.path))
    kinds: dict[str, list[Path]] = {}
    for file in sorted(source.path.rglob("*")):
        if file.is_file() and file.stat().st_size:
            name = file.relative_to(source.path)
            kinds.setdefault(str(name.parent if len(name.parts) > 1 else name), []).append(name)
    chance = random.Random(seed)
    noticed = 0
    for turn in range(count):
        copy = Path(shutil.copytree(source.path, tmp_path / "copy"))
        # Each kind in turn: most bytes are the model's.
        name = chance.choice(kinds[sorted(kinds)[turn % len(kinds)]])
        place, bit = chance.randrange((copy / name).stat().st_size), chance.randrange(8)
        flip(copy / name, place, bit)
        what = f"bit {bit} of byte {place} of {name}"
        for ask in (asked, lambda gallery: gallery.check()):
            try:
                found = ask(Gallery.open(copy))
                assert found == expected or isinstance(found, str), what
            except KedgeError:
                noticed += 1
        shutil.rmtree(copy)
    assert noticed > count / 4


def test_a_few_flips(tmp_path: Path) -> None:
    check_flips(tmp_path, count=13, seed=0)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_forty_flips(seed: int, tmp_path: Path) -> None:
    check_flips(tmp_path, count=40, seed=seed)


def test_what_earlier_releases_wrote_gets_checksums(gallery: Gallery) -> None:
    """Files without a checksum, a gallery of format 1; rows stay without."""
    (gallery.path / "checksums.json").unlink()
    gallery._table._dataset.drop_columns([CHECKSUM])
    about = json.loads((gallery.path / "gallery.json").read_text())
    old = {name: value for name, value in about.items() if name not in (CHECKSUM, "anchors")}
    (gallery.path / "gallery.json").write_text(json.dumps({**old, "format": 1}))
    opened = Gallery.open(gallery.path)
    expected = answers(opened)
    opened.add_embeddings(vectors(1, 6))
    opened.remove([620])
    opened.optimize()
    assert answers(Gallery.open(gallery.path)) == expected
    file = damage_vector(gallery, 30)
    for ask in (lambda: Gallery.open(gallery.path).vector(30), Gallery.open(gallery.path).check):
        with pytest.raises(GalleryError, match=file.name):
            ask()
