from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from typer.testing import CliRunner

from kedge.cli import app
from kedge.datasets import folder, sample


def test_folders_are_those_that_training_takes(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["sample", str(tmp_path), "--pictures", "4", "--queries", "2"])
    assert done.exit_code == 0, done.output
    read = folder(tmp_path / "photos", size=28, test_fraction=0.5)
    assert len(read.classes) == 9
    assert "Bag" not in read.classes
    assert len(read.train) == len(read.test) == 18
    assert len(list((tmp_path / "queries").rglob("*.png"))) == 18
    assert {file.parent.name for file in (tmp_path / "strangers").rglob("*.png")} == {"Bag"}


def test_photos_and_queries_are_different_pictures(tmp_path: Path) -> None:
    CliRunner().invoke(app, ["sample", str(tmp_path), "--pictures", "3", "--queries", "3"])
    with (
        Image.open(tmp_path / "photos/T-shirt-top/000.png") as one,
        Image.open(tmp_path / "queries/T-shirt-top/000.png") as other,
    ):
        assert np.array_equal(np.asarray(one), sample().train.images[0].transpose(1, 2, 0))
        assert not np.array_equal(np.asarray(one), np.asarray(other))


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "queries").mkdir()
    done = CliRunner().invoke(app, ["sample", str(tmp_path)])
    assert "already exists" in str(done.exception)
    assert not (tmp_path / "photos").exists()
