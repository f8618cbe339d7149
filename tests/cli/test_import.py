from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from kedge.cli import app
from kedge.errors import KedgeError
from kedge.gallery import Gallery
from kedge.interop import export_gallery


def test_a_file_of_vectors_becomes_a_gallery(tmp_path: Path) -> None:
    items = np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32)
    kinds = [f"kind {row % 3}" for row in range(40)]
    pq.write_table(pa.table({"emb": items.tolist(), "kind": kinds}), tmp_path / "vectors.parquet")
    arguments = ["import", str(tmp_path / "vectors.parquet"), "--gallery", str(tmp_path / "g"), "--labels", "kind"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    assert "40 items with 5 numbers each, in 3 lists." in done.output
    gallery = Gallery.open(tmp_path / "g")
    assert gallery.item(7).label == "kind 1"
    export_gallery(gallery, tmp_path / "out.npz")
    again = ["import", str(tmp_path / "out.npz"), "--gallery", str(tmp_path / "h")]
    assert CliRunner().invoke(app, again, catch_exceptions=False).exit_code == 0
    assert Gallery.open(tmp_path / "h").search(items[3], k=9).hits == gallery.search(items[3], k=9).hits


def test_options_reach_the_import(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(60, 4)))
    arguments = ["import", str(tmp_path / "x.npy"), "--gallery", str(tmp_path / "g"), "--anchors", "6"]
    done = CliRunner().invoke(app, [*arguments, "--precision", "int8", "--lists", "anchor"], catch_exceptions=False)
    assert "--precision no longer has any effect" in done.output
    gallery = Gallery.open(tmp_path / "g")
    assert (len(gallery.classes), gallery.lists) == (6, "anchor")


def test_what_cannot_be_read_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(KedgeError, match="cannot be read"):
        CliRunner().invoke(
            app, ["import", str(tmp_path / "x.parquet"), "--gallery", str(tmp_path / "g")], catch_exceptions=False
        )
    assert [one.name for one in tmp_path.iterdir()] == ["x.parquet"]
