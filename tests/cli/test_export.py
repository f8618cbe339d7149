from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from typer.testing import CliRunner

from kedge.cli import app
from kedge.encoders import build_encoder
from kedge.gallery import Gallery
from kedge.images import Preprocessing
from kedge.model import Model


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    encoder = build_encoder("resnet10", dim=8, stem="imagenet").eval()
    made = Model(encoder, anchors=torch.randn(2, 8), classes=["ant", "bee"], preprocessing=Preprocessing(size=32))
    made.engine = "eager"
    return made


@pytest.fixture(scope="module")
def run(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    model.save(folder / "model")
    scores = {"mAP": 0.5, "P@20": 0.25, "P@100": 0.125}
    names = ("brute_force", "label_lists", "label_lists_rest_last", "anchor_lists")
    meta = {"dataset": "sample", "model_fingerprint": model.fingerprint}
    metrics = {**dict.fromkeys(names, scores), "accuracy": 0.75, "knn1": 0.5, "queries": 9, "left_out": 0, "meta": meta}
    (folder / "metrics.json").write_text(json.dumps(metrics))
    return folder


@pytest.fixture(scope="module")
def gallery(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("galleries") / "gallery"
    made = Gallery.create(folder, model)
    made.add_embeddings(np.random.default_rng(0).normal(size=(20, 8)).astype(np.float32), labels=["ant", "bee"] * 10)
    return folder


def said(*arguments: object) -> str:
    outcome = CliRunner().invoke(app, ["export", *map(str, arguments)], catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    assert len(outcome.stdout.strip().splitlines()) == 1
    return outcome.stdout


def test_onnx_with_scores(run: Path, model: Model, tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    line = said(run, file, "--anchors")
    assert str(file) in line
    assert '"pixels"' in line
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3, 32, 32), dtype=np.uint8)
    embeddings, scores = onnxruntime.InferenceSession(file).run(None, {"pixels": pixels})
    wanted = model.embed_pixels(torch.from_numpy(pixels))
    np.testing.assert_allclose(embeddings, wanted, atol=1e-4)
    np.testing.assert_allclose(scores, model.scores(wanted), atol=1e-4)


def test_a_gallery_s_model_as_a_program(gallery: Path, model: Model, tmp_path: Path) -> None:
    assert "torch.export.load" in said(gallery, tmp_path / "model.pt2")
    pixels = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    (found,) = torch.export.load(tmp_path / "model.pt2").module()(pixels)
    torch.testing.assert_close(found, model.embed_pixels(pixels), atol=1e-4, rtol=0)


def test_a_folder_for_the_hub_has_the_runs_metrics(run: Path, model: Model, tmp_path: Path) -> None:
    assert "from_pretrained" in said(run, tmp_path / "folder")
    assert Model.from_pretrained(tmp_path / "folder", device="cpu").fingerprint == model.fingerprint
    assert "| mAP (brute force) | 0.500 |" in (tmp_path / "folder" / "README.md").read_text()


@pytest.mark.parametrize("ending", ["npz", "parquet", "faiss"])
def test_vectors_of_a_gallery(gallery: Path, ending: str, tmp_path: Path) -> None:
    assert "20 vectors of 8" in said(gallery, tmp_path / f"vectors.{ending}")
    assert (tmp_path / f"vectors.{ending}").stat().st_size > 20 * 8 * 4


def test_what_is_there_is_replaced_only_if_asked(
    run: Path, tmp_path: Path, refused: Callable[..., str], model: Model
) -> None:
    file = tmp_path / "model.pt2"
    file.write_bytes(b"mine")
    assert "--overwrite" in refused("export", str(run), str(file))
    assert file.read_bytes() == b"mine"
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    assert "--overwrite" in refused("export", str(run), str(folder))
    said(run, folder, "--overwrite")
    assert (folder / "notes.txt").read_text() == "mine"
    assert Model.load(folder, device="cpu").fingerprint == model.fingerprint
    said(run, file, "--overwrite")
    assert file.read_bytes() != b"mine"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{run}", "model.bin"], ["model.bin", ".onnx", "/ for a folder"]),
        (["{run}", "vectors.npz"], ["not a gallery", "kedge index"]),
        (["nowhere", "model.onnx"], ["nowhere does not exist"]),
        (["nowhere", "vectors.npz"], ["nowhere"]),
        (["{run}", "folder", "--anchors"], ["--anchors", ".onnx"]),
        (["{run}", "model.onnx", "--private"], ["--private", "hf://"]),
        (["{run}", "hf://nobody"], ["user/name", "nobody"]),
    ],
)
def test_what_cannot_be_exported(
    arguments: list[str], words: list[str], run: Path, refused: Callable[..., str]
) -> None:
    sentence = refused("export", *(one.format(run=run) for one in arguments))
    assert all(word in sentence for word in words), sentence


def test_a_gallery_without_a_model_has_none_to_export(tmp_path: Path, refused: Callable[..., str]) -> None:
    Gallery.create(tmp_path / "vectors", dim=4)
    assert "has no model" in refused("export", str(tmp_path / "vectors"), str(tmp_path / "model.onnx"))
