"""`kedge.train` on datasets that people have already: the run knows them by what was decoded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset as TorchDataset

from kedge import Model, evaluate, train
from kedge.config.compose import dataset_of
from kedge.datasets import as_dataset
from kedge.encoders import pretrained
from kedge.errors import DataError
from kedge.training import overrides_for

COLOURS = {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200)}


class Colours(TorchDataset):  # type: ignore[type-arg]
    """Plain colours with noise, 24 x 24."""

    classes = tuple(COLOURS)

    def __init__(self, per_class: int = 12) -> None:
        generator = np.random.default_rng(0)
        colours = np.repeat(np.array(list(COLOURS.values())), per_class, axis=0)
        noise = generator.normal(0, 30, (len(colours), 24, 24, 3))
        self.pixels = np.clip(colours[:, None, None] + noise, 0, 255).astype(np.uint8)
        self.labels = np.repeat(np.arange(3), per_class)

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, row: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.pixels[row]), int(self.labels[row])


QUICK = ["recipe=head", "recipe.size=24", "recipe.epochs=40", "recipe.batch_size=16"]
QUICK += ["encoder=resnet10", "encoder.dim=8", "logger=none"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("given") / "run"
    train(Colours(), overrides=QUICK, folder=folder)
    return folder


def test_a_pytorch_dataset_trains_and_its_run_can_be_measured_without_it(run: Path) -> None:
    model = Model.load(run)
    assert model.classes == tuple(COLOURS)
    dataset = dataset_of(run)
    assert (len(dataset.train), len(dataset.test), dataset.train.size) == (33, 3, (24, 24))
    assert dataset.fingerprint() == as_dataset(Colours()).fingerprint()
    assert evaluate(model, dataset).accuracy == 1.0
    source = Colours()
    assert model.classify([source[row][0] for row in (0, 12, 24)]) == list(COLOURS)


def test_hugging_face_splits_train_alike(run: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    source = Colours()
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(COLOURS))})
    values = {"image": list(source.pixels), "label": source.labels.tolist()}
    table = datasets.Dataset.from_dict(values, features=features)
    model = train(table, overrides=QUICK, folder=tmp_path / "run").to("cpu")
    assert dataset_of(tmp_path / "run").fingerprint() == dataset_of(run).fingerprint()
    torch.testing.assert_close(model.anchors, Model.load(run, device="cpu").anchors)


def test_what_the_user_says_of_the_pictures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(pretrained, "find_spec", lambda _: None)
    monkeypatch.setattr(pretrained, "reach", lambda *_: (_ for _ in ()).throw(OSError("no network")))
    given = overrides_for(Colours(), ["dataset.size=16", "dataset.test_fraction=0.5"])
    assert given[0] == "dataset=stored"
    assert "recipe=kedge" in given
    assert not any(override.startswith("dataset.size") for override in given)
    assert given[-1] == "dataset.test_fraction=0.5"
    path = given[1].removeprefix("dataset.path=").strip("'")
    assert np.load(path, mmap_mode="r").shape == (36, 3, 16, 16)
    assert overrides_for(Colours(), ["recipe=paper"])[2:] == ["recipe=paper"]
    for wrong in (3, ["a.png"], {"train": "photos"}):
        with pytest.raises(DataError, match="map-style dataset of PyTorch or Hugging Face"):
            overrides_for(wrong)
