"""Parquet files and WebDataset shards."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from kedge.cli import app
from kedge.errors import ConfigError, DataError, KedgeError
from kedge.gallery import Gallery
from kedge.model import Model
from kedge.ray.index import Decoder, Embedder, Task, Writer, pack, unpack
from kedge.ray.sources import CHUNK, Item, list_source


@pytest.fixture(scope="session")
def pictures(photos: Path) -> list[Path]:
    return sorted((photos / "c0").iterdir()) + sorted((photos / "c2").glob("*.jpg"))


def save_shards(folder: Path, pictures: list[Path], size: int) -> Path:
    folder.mkdir()
    for shard, start in enumerate(range(0, len(pictures), size)):
        with tarfile.open(folder / f"{shard:04d}.tar", "w") as file:
            for number, picture in enumerate(pictures[start : start + size]):
                kind = ("cls", "txt", "json", "none")[number % 4]
                label = json.dumps({"label": "seven"}) if kind == "json" else "seven\n"
                for name, content in ((f"{kind}", label.encode()), ("jpg", picture.read_bytes())):
                    member = tarfile.TarInfo(f"in/{number:03d}.{name}")
                    member.size = len(content)
                    file.addfile(member, io.BytesIO(content))
    return folder


def hits(printed: str) -> list[tuple[int, str, float]]:
    return [(hit["id"], hit["anchor"], round(hit["distance"], 4)) for hit in json.loads(printed)["hits"]]


def items(source: Path) -> list[Item]:
    listing = list_source(source)
    chunks = [chunk for piece in listing.shards for chunk in piece.chunks()]
    assert [start for start, _ in chunks] == np.cumsum([0, *(len(some) for _, some in chunks)]).tolist()[:-1]
    assert all(len(some) <= CHUNK for _, some in chunks)
    found = [item for _, some in chunks for item in some]
    assert len(found) == len(listing)
    return found


def test_shards(pictures: list[Path], tmp_path: Path) -> None:
    folder = save_shards(tmp_path / "shards", pictures, size=50)
    found = items(folder)
    assert [item.content for item in found] == [picture.read_bytes() for picture in pictures]
    assert [item.label for item in found[:5]] == ["seven", "seven", "seven", None, "seven"]
    assert found[50].path == f"{folder / '0001.tar'}#in/000.jpg"
    (tmp_path / "bad.tar").write_bytes(b"no tar" * 200)
    with pytest.raises(DataError, match=r"bad.tar is not a .tar shard"):
        list_source(tmp_path / "bad.tar")


def test_parquet(pictures: list[Path], tmp_path: Path) -> None:
    contents = [picture.read_bytes() for picture in pictures] * 5
    count = len(contents)
    numbers = list(range(count))
    whole = pa.table({"image": contents, "label": [n % 3 for n in numbers], "size": numbers})
    pq.write_table(whole, tmp_path / "a.parquet", row_group_size=CHUNK + 30)
    found = items(tmp_path / "a.parquet")
    assert [item.content for item in found] == contents
    assert [item.label for item in found] == [str(n % 3) for n in numbers]
    assert [item.metadata for item in found] == [{"size": n} for n in numbers]
    assert found[3].path == f"{tmp_path / 'a.parquet'}#3"
    # Paths instead of pictures, and as the datasets of Hugging Face have them.
    (tmp_path / "two").mkdir()
    pq.write_table(pa.table({"path": [str(one) for one in pictures]}), tmp_path / "two" / "0.parquet")
    nested = [{"bytes": one, "path": "x"} for one in contents[:2]]
    pq.write_table(pa.table({"image": nested, "path": ["p", None]}), tmp_path / "two" / "1.parquet")
    found = items(tmp_path / "two")
    assert [item.content for item in found] == [*pictures, *contents[:2]]
    assert [item.path for item in found[-2:]] == ["p", f"{tmp_path / 'two' / '1.parquet'}#1"]

    pq.write_table(pa.table({"picture": [1]}), tmp_path / "none.parquet")
    with pytest.raises(DataError, match="no column image or path, found picture"):
        list_source(tmp_path / "none.parquet")
    pq.write_table(pa.table({"path": ["x"], "hash": [1]}), tmp_path / "own.parquet")
    with pytest.raises(ConfigError, match="column 'hash', which galleries have themselves"):
        list_source(tmp_path / "own.parquet")
    (tmp_path / "bad.parquet").write_text("no Parquet")
    with pytest.raises(DataError, match=r"bad.parquet is not a Parquet file"):
        list_source(tmp_path / "bad.parquet")


def test_parquet_through_all_stages(gallery: Gallery, model: Model, pictures: list[Path], tmp_path: Path) -> None:
    contents = [picture.read_bytes() for picture in pictures[:40]] + [b"no picture"]
    table = pa.table({"image": contents, "label": ["x"] * 41, "size": list(range(41))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=25)
    embedder = Embedder.__new__(Embedder)
    embedder._model, embedder._columns = model, ("embedding", "features")
    decode, write = Decoder(0, model.preprocessing, 16), Writer(gallery.location, gallery.dim, 0)
    with gallery.writing() as writer:
        writer.add_columns({"size": pa.array([], pa.int64())})
        shards = list_source(tmp_path / "a.parquet").shards
        chunks = [chunk for shard in shards for chunk in decode(pack(Task(shard, {})))]
        entries = [unpack(write(embedder(chunk))) for chunk in chunks]
        writer.commit([fragment for entry in entries for fragment in entry.fragments])
    added = [id for entry in entries for id in entry.ids]
    assert (len(shards), added) == (2, list(range(40)))
    assert [path for entry in entries for path, _ in entry.skipped] == [f"{tmp_path / 'a.parquet'}#40"]
    assert (gallery.item(39).label, gallery.item(39).metadata) == ("x", {"size": 39})
    wanted = model.embed(pictures[:40]).numpy()
    np.testing.assert_allclose([gallery.vector(id) for id in added], wanted, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("cluster")
def test_shards_from_the_shell(model: Model, pictures: list[Path], tmp_path: Path) -> None:
    shards = save_shards(tmp_path / "shards", pictures[:40], size=30)
    model.save(tmp_path / "model")

    def run(*words: object) -> str:
        done = CliRunner().invoke(app, [str(word) for word in words])
        if done.exception is not None:
            raise done.exception
        return done.stdout

    where = ("--gallery", tmp_path / "g", "--model", tmp_path / "model")
    assert "40 added, 0 already there, 0 unreadable" in run("index", shards, *where, "--runner", "ray", "--workers", 1)
    gallery = Gallery.open(tmp_path / "g", model)
    assert [gallery.item(id).label for id in (0, 3, 30)] == ["seven", None, "seven"]
    wanted = model.embed(pictures[:40]).numpy()
    np.testing.assert_allclose([gallery.vector(id) for id in range(40)], wanted, rtol=0, atol=1e-5)

    query = ("search", tmp_path / "g", pictures[3], "-k", 4, "--json")
    assert hits(run(*query, "--runner", "ray")) == hits(run(*query, "--rank", "class"))
    for wrong, sentence in (
        (("--runner", "spark"), "--runner must be local or ray, found spark"),
        (("--address", "x:1"), "--address only applies to --runner ray"),
        (("--runner", "ray", "--at-least", 3), "--at-least is for --runner local"),
    ):
        with pytest.raises(KedgeError, match=sentence):
            run(*query, *wrong)
