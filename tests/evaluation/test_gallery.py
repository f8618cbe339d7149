"""Evaluation of a gallery, compared with plain loops and with what its own searches find."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import kedge
from kedge.datasets import folder
from kedge.encoders import build_encoder
from kedge.errors import ConfigError, DataError
from kedge.evaluation import evaluate_gallery
from kedge.gallery import Gallery
from kedge.images import Preprocessing
from kedge.model import Model

COLOURS = {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200)}


def judge(right: list[bool], relevant: int) -> tuple[float, float, float]:
    """AP@100, P@1 and P@20 of one result, met hit by hit."""
    found, total = 0, 0.0
    for place, is_right in enumerate(right[:100], start=1):
        if is_right:
            found += 1
            total += found / place
    return total / min(relevant, 100), float(sum(right[:1])), sum(right[:20]) / 20


def test_items_among_themselves_equal_a_walk_down_the_results(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    centres = 2 * rng.normal(size=(4, 6))
    numbers = np.concatenate([rng.integers(0, 3, 200), [3]])  # the last label has a single item
    vectors = (centres[numbers] + rng.normal(size=(201, 6))).astype(np.float32)
    labels = [None if row % 10 == 0 else f"c{number}" for row, number in enumerate(numbers)]
    labels[-1] = "c3"
    gallery = Gallery.create(tmp_path / "g", anchors=centres.astype(np.float32), classes=[f"c{n}" for n in range(4)])
    ids = gallery.add_embeddings(vectors, labels)
    gallery.remove(ids[5:9])
    kept = [row for row in range(201) if row not in range(5, 9)]
    expected, first_right = [], 0
    asked = [row for row in kept if labels[row] is not None]
    for row in asked:
        others = [other for other in kept if other != row]
        order = sorted(others, key=lambda other: (np.linalg.norm(vectors[other] - vectors[row]), other))
        relevant = sum(labels[other] == labels[row] for other in others)
        if relevant:
            expected.append(judge([labels[other] == labels[row] for other in order], relevant))
        nearest = int(np.linalg.norm(centres - vectors[row], axis=1).argmin())
        first_right += labels[row] == f"c{nearest}" and relevant > 0
    report = evaluate_gallery(gallery)
    assert (report.queries, report.left_out) == (len(asked), 1)
    assert list(report.brute_force) == ["mAP@100", "P@1", "P@20"]
    assert list(report.brute_force.values()) == pytest.approx(np.mean(expected, axis=0).tolist(), abs=1e-6)
    assert report.classes is not None
    matrix = report.classes.matrix().to_numpy()
    # An item without a label may be the first hit: it sits in the list of its nearest anchor.
    assert np.trace(matrix) <= first_right
    assert np.trace(matrix) == pytest.approx(report.two_stage["P@1"] * len(expected))
    assert report.classes.table.loc["c3", "queries"] == 1
    assert np.isnan(report.classes.table.loc["c3", "mAP@100"])
    assert report.to_pandas().loc["two_stage", "P@1"] == report.two_stage["P@1"]
    some = evaluate_gallery(gallery, limit=20)
    assert some.queries == 20


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    encoder = build_encoder("resnet10", dim=4, stem="imagenet").eval()
    return Model(encoder, anchors=torch.eye(3, 4), classes=list(COLOURS), preprocessing=Preprocessing(size=32))


def draw(place: Path, count: int, seed: int) -> Path:
    """Noisy images of three colours, in class folders."""
    rng = np.random.default_rng(seed)
    for name, colour in COLOURS.items():
        (place / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = np.clip(np.array(colour) + rng.normal(0, 60, (40, 40, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(place / name / f"{number}.png")
    return place


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("photos"), 8, seed=0)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, model: Model, photos: Path) -> Gallery:
    gallery = Gallery.create(tmp_path_factory.mktemp("filled") / "g", model)
    gallery.add(photos)
    return gallery


@pytest.mark.parametrize("method", ["two_stage", "brute_force"])
def test_searches_are_those_of_users(filled: Gallery, method: str) -> None:
    labels = {id: filled.item(id).label for id in filled.ids()}
    expected = []
    for id, label in labels.items():
        result = filled.search(id, k=100, method=method)  # type: ignore[arg-type]
        expected.append(judge([hit.label == label for hit in result], 7))
    report = kedge.evaluate(filled)
    assert list(report.scores(method).values()) == pytest.approx(np.mean(expected, axis=0).tolist())
    assert report.queries == 24


def test_a_folder_against_a_gallery(filled: Gallery, photos: Path, tmp_path: Path) -> None:
    queries = draw(tmp_path / "queries", 3, seed=1)
    (queries / "red" / "broken.png").write_bytes(b"no image")
    (queries / "violet").mkdir()
    Image.new("RGB", (9, 9)).save(queries / "violet" / "0.png")
    copy = queries / "blue" / "copy.png"
    copy.write_bytes((photos / "blue" / "0.png").read_bytes())
    report = kedge.evaluate(filled, against=queries)
    assert report.queries == 10
    assert report.meta["in_gallery"] == 1
    assert {Path(file).name: reason for file, reason in report.meta["skipped"]}.keys() == {"broken.png", "0.png"}
    expected = []
    for file in sorted(queries.glob("[bgr]*/[0-9c]*.png")):
        result = filled.search(file, k=100, method="brute_force")
        if file == copy:
            (own,) = (id for id in filled.ids() if filled.item(id).path == str(photos / "blue" / "0.png"))
            result = filled.search(own, k=100, method="brute_force")
        expected.append(judge([hit.label == file.parent.name for hit in result], 7 if file == copy else 8))
    assert list(report.brute_force.values()) == pytest.approx(np.mean(expected, axis=0).tolist(), abs=1e-6)
    report.save(tmp_path / "scores.json")
    content = json.loads((tmp_path / "scores.json").read_text())
    assert content["two_stage"] == report.two_stage
    assert "classes" not in content


def test_a_folder_against_the_training_images(photos: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    names = sorted(COLOURS)
    encoder = build_encoder("resnet10", dim=4, stem="imagenet").eval()
    model = Model(encoder, anchors=torch.eye(3, 4), classes=names, preprocessing=Preprocessing(size=32))
    dataset = folder(photos, size=32, test_fraction=0.25)
    again = kedge.evaluate(model, dataset, against=photos)
    assert (again.queries, again.meta["in_gallery"], len(dataset.train)) == (24, 18, 18)
    assert again.knn1 >= 18 / 24, "a training image finds itself"
    queries = draw(tmp_path / "queries", 2, seed=3)
    (queries / "red").rename(queries / "pink")
    report = kedge.evaluate(model, dataset, against=queries)
    assert (report.queries, report.meta["in_gallery"], len(report.meta["skipped"])) == (4, 0, 2)
    vectors = model.embed(sorted(queries.glob("[bg]*/*.png"))), model.embed(dataset.train.paths)
    nearest = torch.cdist(*vectors).argmin(dim=1)
    expected = np.mean([dataset.train.labels[row] == label for row, label in zip(nearest, (0, 0, 1, 1), strict=True)])
    assert report.knn1 == pytest.approx(expected)
    assert report.classes is not None
    assert report.classes.table.loc["red", "queries"] == 0


def test_what_cannot_be_evaluated_says_why(filled: Gallery, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no class folders"):
        kedge.evaluate(filled, against=tmp_path / "empty")
    (tmp_path / "other" / "violet").mkdir(parents=True)
    Image.new("RGB", (9, 9)).save(tmp_path / "other" / "violet" / "0.png")
    with pytest.raises(DataError, match=r"None of the classes in .* \(violet\) is among the 3"):
        kedge.evaluate(filled, against=tmp_path / "other")
    with pytest.raises(ConfigError, match="limit is 0"):
        kedge.evaluate(filled, limit=0)
    bare = Gallery.create(tmp_path / "bare", dim=3)
    bare.add_embeddings(np.eye(3, dtype=np.float32))
    with pytest.raises(DataError, match="no items with a label"):
        kedge.evaluate(bare)
    bare.add_embeddings(np.eye(3, dtype=np.float32), ["a", "b", "c"])
    with pytest.raises(DataError, match="No other item"):
        kedge.evaluate(bare)
    with pytest.raises(ConfigError, match="has no model"):
        kedge.evaluate(bare, against=tmp_path / "other")
    with pytest.raises(ConfigError, match="or a Gallery alone"):
        kedge.evaluate(bare, "dataset")  # type: ignore[call-overload]
