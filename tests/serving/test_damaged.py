"""A table that cannot be read is the server's trouble, not that of whoever asks."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient

from kedge.gallery import Gallery
from kedge.serving import service
from kedge.serving.app import create_app


@pytest.fixture
def gallery(tmp_path: Path) -> Path:
    made = Gallery.create(tmp_path / "g", anchors=np.eye(3, 4), classes=["a", "b", "c"])
    made.add_embeddings(np.random.default_rng(0).normal(size=(50, 4)), labels=["a", "b"] * 25)
    made.optimize()
    return tmp_path / "g"


def test_a_table_that_was_cut_off(
    gallery: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service, "_TOUCH_SECONDS", -1.0)
    with TestClient(create_app(gallery), base_url="http://localhost/api/v1") as api:
        assert api.get("/ready").status_code == 200
        assert api.get("/items/3").status_code == 200
        assert api.get("/items/999").status_code == 404
    with TestClient(create_app(gallery), base_url="http://localhost/api/v1") as api:
        for file in gallery.glob("record.lance/data/*"):
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        caplog.set_level(logging.ERROR)
        for path in ("/items/3", "/items/3/thumbnail", "/items/999", "/ready"):
            caplog.clear()
            answer = api.get(path)
            assert (path, answer.status_code) == (path, 503)
            assert answer.json() == {"error": "The gallery is not available at the moment; try again."}
            [said] = [line.getMessage() for line in caplog.records if line.name == "kedge.serving.app"]
            assert said.startswith(f"GET /api/v1{path}: ")
            assert "damaged" in said
        assert api.get("/health").status_code == 200
        assert len(api.get("/items/3/similar").json()["searches"][0]["hits"]) == 20  # the lists are whole


def test_damaged_lists_are_rebuilt_while_it_serves(gallery: Path) -> None:
    with TestClient(create_app(gallery), base_url="http://localhost/api/v1") as api:
        expected = api.get("/items/3/similar", params={"method": "brute_force"}).json()["searches"][0]["hits"]
    (file,) = gallery.glob("lists/*/labels.npy")
    content = bytearray(file.read_bytes())
    content[140] ^= 1
    file.write_bytes(content)
    with TestClient(create_app(gallery), base_url="http://localhost/api/v1") as api:
        found = api.get("/items/3/similar", params={"method": "brute_force"}).json()["searches"][0]["hits"]
        assert found == expected
        assert api.get("/classes").json()["classes"] == [{"name": "a", "items": 25}, {"name": "b", "items": 25}]


@pytest.mark.parametrize("folder", ["lists", "looks"])
def test_damage_in_either_space_is_rebuilt_while_it_serves(own_gallery: Path, folder: str) -> None:
    def similar(api: TestClient, rank: str) -> list[dict[str, object]]:
        hits: list[dict[str, object]] = api.get("/items/3/similar", params={"rank": rank}).json()["searches"][0]["hits"]
        return hits

    with TestClient(create_app(own_gallery), base_url="http://localhost/api/v1") as api:
        expected = {rank: similar(api, rank) for rank in ("auto", "class", "looks")}
    (file,) = own_gallery.glob(f"{folder}/*/vectors.npy")
    content = bytearray(file.read_bytes())
    content[128:] = bytes(len(content) - 128)
    file.write_bytes(content)
    with TestClient(create_app(own_gallery), base_url="http://localhost/api/v1") as api:
        for rank, hits in expected.items():
            assert similar(api, rank) == hits


def test_an_item_whose_lists_are_damaged_is_searched_from_the_table(gallery: Path) -> None:
    with TestClient(create_app(gallery), base_url="http://localhost/api/v1") as api:
        expected = api.get("/items/3/similar").json()["searches"][0]["hits"]
    (file,) = gallery.glob("lists/*/vectors.npy")
    content = bytearray(file.read_bytes())
    content[128:] = bytes(len(content) - 128)
    file.write_bytes(content)
    with TestClient(create_app(gallery), base_url="http://localhost/api/v1") as api:
        assert api.get("/items/3/similar").json()["searches"][0]["hits"] == expected
