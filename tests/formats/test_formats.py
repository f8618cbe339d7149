"""What earlier releases wrote is opened, answers as it did, and can be gone on with."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kedge

ARCHIVES = sorted(Path(__file__).parent.glob("*.zip"))


@pytest.fixture(params=ARCHIVES, ids=lambda archive: archive.stem)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model, a gallery and what they answered, as a release left them."""
    with zipfile.ZipFile(request.param) as archive:
        archive.extractall(tmp_path)
    return tmp_path


def expected(written: Path) -> Any:
    return json.loads((written / "expected.json").read_text())


def check(gallery: kedge.Gallery, was: Any) -> None:
    query = np.linspace(-1, 1, gallery.dim, dtype=np.float32)[None]
    for name, ways in {"two_stage": {}, "filtered": {"method": "brute_force", "where": "price < 20"}}.items():
        (hits,) = gallery.search_embeddings(query, k=7, **ways)
        assert [[hit.id, hit.path, hit.label] for hit in hits] == [hit[:3] for hit in was[name]]
        assert [hit.distance for hit in hits] == pytest.approx([hit[3] for hit in was[name]], rel=1e-5)


def test_there_is_one_of_the_first_release() -> None:
    assert "0.1.0" in {archive.stem for archive in ARCHIVES}


def test_a_model(written: Path) -> None:
    model, was = kedge.Model.load(written / "model", device="cpu"), expected(written)
    picture = (np.arange(32 * 32 * 3) * 7 % 256).astype(np.uint8).reshape(32, 32, 3)
    embedding = model.embed(picture)[0]
    assert embedding.tolist() == pytest.approx(was["embedding"], rel=1e-4, abs=1e-4 * float(embedding.abs().max()))
    assert model.classify([picture]) == was["class"]
    model.save(written / "again")
    assert kedge.Model.load(written / "again", device="cpu").fingerprint == model.fingerprint


def test_a_gallery(written: Path) -> None:
    gallery, was = kedge.Gallery.open(written / "gallery"), expected(written)
    assert len(gallery) == was["length"]
    check(gallery, was)
    gallery.optimize()
    check(gallery, was)
    assert gallery.check().endswith("as they were written")
    fresh = gallery.add_embeddings(np.full((2, gallery.dim), 50, np.float32), labels=["buoy", "new"])
    assert min(fresh) > max(hit[0] for hit in was["two_stage"])
    check(kedge.Gallery.open(written / "gallery"), was)


@pytest.mark.parametrize("stamp", [0, 999], ids=["older", "newer"])
def test_lists_of_another_format_are_made_anew(written: Path, stamp: int) -> None:
    (header,) = (written / "gallery").rglob("lists.json")
    about = json.loads(header.read_text())
    header.write_text(json.dumps(about | {"format": stamp}))
    check(kedge.Gallery.open(written / "gallery"), expected(written))
