from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import FakeData, ImageFolder

from kedge import Gallery, Model
from kedge.encoders import build_encoder
from kedge.images import Preprocessing


@pytest.fixture
def gallery(tmp_path: Path) -> Gallery:
    torch.manual_seed(0)
    encoder = build_encoder("resnet10", dim=4, stem="imagenet")
    names = ["apple", "pear", "0", "1"]
    model = Model(encoder, anchors=torch.randn(4, 4), classes=names, preprocessing=Preprocessing(size=16))
    return Gallery.create(tmp_path / "gallery", model)


def test_a_pytorch_dataset_is_added_once(gallery: Gallery) -> None:
    fake = FakeData(size=10, image_size=(3, 16, 16), num_classes=2)
    assert len(gallery.add(fake)) == 10
    again = gallery.add(fake)
    assert (len(again), again.present) == (0, 10)
    # Another one of the same name takes nobody's place.
    other = FakeData(size=10, image_size=(3, 16, 16), num_classes=2, random_offset=100)
    assert len(gallery.add({"train": other})) == 10
    assert len(gallery) == 20
    picture, label = fake[3]
    hit = gallery.search(picture, k=1, method="brute_force").hits[0]
    assert hit.label == str(int(label))
    assert hit.distance == pytest.approx(0, abs=1e-4)


def test_folders_of_torchvision_keep_their_files(gallery: Gallery, tmp_path: Path) -> None:
    for name in ("apple", "pear"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for index in range(3):
            pixels = np.random.default_rng(index).integers(256, size=(20, 20, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{index}.png")
    assert len(gallery.add(ImageFolder(tmp_path / "photos"))) == 6
    assert gallery.add(tmp_path / "photos").present == 6


def test_a_hugging_face_dataset_is_added_once(gallery: Gallery) -> None:
    datasets = pytest.importorskip("datasets")
    pixels = list(np.random.default_rng(0).integers(256, size=(8, 20, 20, 3), dtype=np.uint8))
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["apple", "pear"])})
    table = datasets.Dataset.from_dict({"image": pixels, "label": [0, 1] * 4}, features=features)
    halves = datasets.DatasetDict(train=table.select(range(4)), test=table.select(range(4, 8)))
    assert len(gallery.add(halves)) == 8
    assert gallery.add(halves["test"]).present == 4
    found = gallery.search(Image.fromarray(pixels[5]), k=1, method="brute_force").hits[0]
    assert found.label == "pear"
