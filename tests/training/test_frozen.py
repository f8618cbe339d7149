"""The road of a folder of photos through a frozen encoder: each is decoded and encoded once."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from kedge import Gallery, Model, evaluate, train
from kedge.config.compose import dataset_of, held_out_of
from kedge.datasets import Dataset, ImageSplit, folder, leave_classes_out
from kedge.errors import ConfigError, DataError
from kedge.gallery.ingest import index_folder
from kedge.training import resume_run

COLOURS = {"red": (140, 115, 115), "green": (115, 140, 115), "blue": (115, 115, 140), "grey": (120, 120, 120)}
OVERRIDES = [
    *("encoder=timm", "encoder.name=timm:test_resnet", "encoder.weights=null", "recipe=head", "recipe.epochs=12"),
    *("recipe.batch_size=16", "recipe.size=32", "dataset.size=48", "split.holdout=0.3", "logger=none"),
]


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twenty photos of each colour, two files that are none, and a data root of the test's own."""
    monkeypatch.setenv("KEDGE_DATA", str(tmp_path / "data"))
    generator = np.random.default_rng(0)
    root = tmp_path / "photos"
    for name, colour in COLOURS.items():
        (root / name).mkdir(parents=True)
        for number in range(20):
            tint = generator.normal(colour, 8)
            pixels = np.clip(generator.normal(tint, 50, (40, 60, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number:02}.png")
    (root / "red" / "empty.png").touch()
    (root / "grey" / "text.jpg").write_text("no photo")
    return root


@pytest.fixture
def no_pixels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """From when it is called, no image can be decoded."""

    def forbid() -> None:
        def fail(*_: object, **__: object) -> None:
            raise AssertionError("an image was opened")

        monkeypatch.setattr(Image, "open", fail)

    return forbid


def exact_map(queries: torch.Tensor, asked: np.ndarray, gallery: torch.Tensor, labels: np.ndarray) -> dict[str, float]:
    """By walking down a sorted list."""
    precisions, first = [], []
    for query, label in zip(queries.double(), asked, strict=True):
        right = labels[(gallery.double() - query).norm(dim=1).argsort(stable=True).numpy()] == label
        places = np.flatnonzero(right) + 1
        precisions.append((np.arange(1, len(places) + 1) / places).mean())
        first.append(right[0])
    return {"mAP": float(np.mean(precisions)), "1-NN": float(np.mean(first))}


def test_each_photo_is_decoded_and_encoded_once(
    photos: Path, tmp_path: Path, no_pixels: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    model = train(photos, overrides=OVERRIDES, folder=run)
    assert {line.split(": ")[0] for line in (run / "skipped.txt").read_text().splitlines()} == {
        str(photos / "red/empty.png"),
        str(photos / "grey/text.jpg"),
    }
    assert not list((tmp_path / "data").rglob("*.npy"))
    assert not (run / "features").exists()
    said = capsys.readouterr().err

    dataset = held_out_of(run)
    assert (len(dataset.train), len(dataset.test)) == (52, 20)  # of 20 photos, 2 to test, and 5 of the rest held out
    # An oracle that reads the files itself.
    with torch.no_grad():
        pixels, raw, embeddings = {}, {}, {}
        for name, split in (("train", dataset.train), ("held_out", dataset.test)):
            images = [model.preprocessing.to_pixels(Image.open(file)) for file in split.paths]
            pixels[name] = torch.from_numpy(np.stack(images))
            raw[name] = model.encoder.eval().features(model.preprocessing.to_input(pixels[name]))
            embeddings[name] = model.embed_pixels(pixels[name])
    unit = {name: torch.nn.functional.normalize(part.double(), dim=1) for name, part in raw.items()}
    gain = json.loads((run / "gain.json").read_text())
    assert (gain["queries"], gain["gallery"]) == (20, 52)
    for name, vectors in {"embeddings": embeddings, "features": unit}.items():
        expected = exact_map(vectors["held_out"], dataset.test.labels, vectors["train"], dataset.train.labels)
        assert gain[name] == pytest.approx(expected, abs=1e-3)
        assert 0.3 < expected["mAP"] < 0.98
    assert f"mAP {gain['embeddings']['mAP']:.3f}".replace(" 0.", " .") in said

    anchors, familiarity = model.anchors.double(), []
    for looks, embedding in zip(unit["held_out"], embeddings["held_out"].double(), strict=True):
        distances = (anchors - embedding).norm(dim=1)
        cosines = unit["train"] @ looks
        own = cosines[dataset.train.labels == int(distances.argmin())].topk(3).values.mean()
        shares = torch.nn.functional.cosine_similarity(anchors, embedding[None]).clamp(min=1e-4)
        familiarity.append(float((own + cosines.max()) / 2 + 0.1 * (shares.max() / shares.sum()).log()))
    for calibration in (model.calibration, Model.load(run).calibration):
        assert -calibration.threshold == pytest.approx(min(familiarity), abs=1e-3)  # 20 photos: ceil(21 * .95) = 20
        assert (calibration.accept, calibration.items) == (0.95, 20)

    no_pixels()
    again = train(photos, overrides=[*OVERRIDES, "split.seed=1"], folder=tmp_path / "again")
    assert again.fingerprint != model.fingerprint
    same = train(photos, overrides=OVERRIDES, folder=tmp_path / "same")
    assert same.fingerprint == model.fingerprint
    report = evaluate(model, dataset_of(run))
    assert report.queries == 8
    resume_run(run)
    gallery = Gallery.create(tmp_path / "gallery", model, thumbnails=0)
    assert len(index_folder(gallery, photos)) == 80
    assert len(gallery.add(photos)) == 0


def test_a_gallery_holds_what_the_model_says(photos: Path, tmp_path: Path) -> None:
    """Whether its features came from the cache or not."""
    model = train(photos, overrides=OVERRIDES, folder=tmp_path / "run")
    file = photos / "blue/07.png"
    gallery = Gallery.create(tmp_path / "gallery", model)
    index_folder(gallery, photos)
    hit = next(iter(gallery.search(file, k=1)))
    assert hit.path == str(file)
    assert hit.distance == pytest.approx(0, abs=1e-4)


def test_without_held_out_photos_there_is_no_gain(photos: Path, tmp_path: Path) -> None:
    overrides = [*OVERRIDES, "split.holdout=0", "loss=cross_entropy"]
    model = train(photos, overrides=overrides, folder=tmp_path / "run")
    assert not (tmp_path / "run/gain.json").exists()
    assert model.calibration is None
    assert "calibration" not in json.loads((tmp_path / "run/model/model.json").read_text())
    # Anchors are the means of what it embeds.
    dataset = folder(photos, size=32)
    embeddings = model.embed(list(dataset.train.paths))
    means = torch.stack([embeddings[dataset.train.labels == label].mean(0) for label in range(4)])
    torch.testing.assert_close(model.anchors, means, rtol=1e-3, atol=1e-3)


def test_a_photo_that_changed_is_noticed(photos: Path, tmp_path: Path) -> None:
    train(photos, overrides=OVERRIDES, folder=tmp_path / "run")
    Image.new("RGB", (40, 40)).save(photos / "red/03.png")
    with pytest.raises(DataError, match="has changed since"):
        dataset_of(tmp_path / "run")
    with pytest.raises(DataError, match="has changed since"):
        resume_run(tmp_path / "run")


def test_a_run_that_recorded_pixels_is_still_measured(photos: Path, tmp_path: Path) -> None:
    """As the first release did for folders."""
    run = tmp_path / "run"
    train(photos, overrides=OVERRIDES, folder=run)
    dataset = dataset_of(run)
    digest = hashlib.sha256()
    for split in (dataset.train, dataset.test):
        digest.update(repr((len(split), (48, 48))).encode() + split.labels.astype("<i8").tobytes())
        for file in split.paths:
            image = Image.open(file).resize((48, 48), Image.Resampling.BILINEAR, box=(10, 0, 50, 40))
            digest.update(np.asarray(image).transpose(2, 0, 1).tobytes())
    (run / "dataset.json").write_text(json.dumps({"name": "photos", "fingerprint": digest.hexdigest()[:16]}))
    assert len(dataset_of(run).train) == len(dataset.train)
    (run / "dataset.json").write_text(json.dumps({"name": "photos", "fingerprint": "0" * 16}))
    with pytest.raises(DataError, match="has changed since"):
        dataset_of(run)


def test_classes_kept_out_are_searched_among_themselves(photos: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    model = train(photos, overrides=[*OVERRIDES, "split.unseen=0.4"], folder=run)
    assert len(model.classes) == 2
    dataset = dataset_of(run)
    assert dataset.classes == model.classes
    files = [file for split in dataset.unseen for file in split.paths]
    labels = np.array([Path(file).parent.name for file in files])
    assert set(labels) == COLOURS.keys() - set(model.classes)
    assert len(files) == 40
    report = evaluate(model, dataset)
    assert report.queries == 4
    unseen = report.unseen
    assert (unseen["classes"], unseen["queries"]) == (2, 40)
    vectors = model.vectors(files)
    spaces = {"embedding": vectors.embeddings, "features": torch.nn.functional.normalize(vectors.features, dim=1)}
    for name, space in spaces.items():
        first, at_r, precision = [], [], []
        for row in range(40):
            order = (space.double() - space[row].double()).norm(dim=1).argsort(stable=True).numpy()
            right = labels[order[order != row]] == labels[row]
            first.append(right[0])
            at_r.append(sum(right[: k + 1].mean() for k in range(19) if right[k]) / 19)
            precision.append(right[:19].mean())
        expected = {"R@1": np.mean(first), "MAP@R": np.mean(at_r), "R-precision": np.mean(precision)}
        assert {score: unseen[name][score] for score in expected} == pytest.approx(expected, abs=5e-3)
        assert unseen[name].keys() == {"R@1", "R@2", "R@4", "R@8", "R-precision", "MAP@R", "NMI"}
        assert unseen[name]["R@1"] <= unseen[name]["R@2"] <= unseen[name]["R@8"] <= 1
    strangers = report.open_set["unseen classes"]
    assert strangers["images"] == 40
    assert strangers["OSCR"] <= min(strangers["AUROC"], report.accuracy)
    other = evaluate(model, dataset, unknown=dataset_of(run, ["dataset=sample"]))
    assert other.open_set.keys() == {"unseen classes", "sample"}
    assert other.open_set["unseen classes"] == strangers
    assert other.open_set["sample"]["AUROC"] > 0.9, "clothes are not colours"


def test_leaving_classes_out() -> None:
    labels = np.repeat(np.arange(10), 3)
    split = ImageSplit(np.zeros((30, 3, 4, 4), np.uint8), labels, paths=tuple(str(label) for label in labels))
    dataset = Dataset("digits", tuple("abcdefghij"), split, split)
    assert leave_classes_out(dataset, 0) is dataset
    seen = leave_classes_out(dataset, 0.3, seed=1)
    assert len(seen.classes) == 7
    assert sum(map(len, seen.unseen)) == 18
    for part in (seen.train, seen.test):
        assert [seen.classes[label] for label in part.labels] == ["abcdefghij"[int(path)] for path in part.paths]
    assert leave_classes_out(dataset, 0.3, seed=1).classes == seen.classes
    assert leave_classes_out(dataset, 0.3, seed=2).classes != seen.classes
    assert len(leave_classes_out(dataset, 0.99).classes) == 2
    assert len(leave_classes_out(dataset, 0.001).classes) == 9
    pair = Dataset("pair", ("a", "b"), split.subset(range(6)), split.subset(range(6)))
    with pytest.raises(ConfigError, match="at least 3"):
        leave_classes_out(pair, 0.5)
