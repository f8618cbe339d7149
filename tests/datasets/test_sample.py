from __future__ import annotations

import runpy
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from PIL import Image

from kedge.datasets import sample


def test_sample() -> None:
    dataset = sample()
    assert len(dataset.classes) == 10
    assert dataset.classes[9] == "Ankle boot"
    assert np.bincount(dataset.train.labels).tolist() == [700] * 10
    assert np.bincount(dataset.test.labels).tolist() == [100] * 10
    assert dataset.train.size == (28, 28)
    assert (dataset.train.images[:, 0] == dataset.train.images[:, 2]).all()
    assert dataset.fingerprint() == "3cb8a2a5b1de8119"


def test_classes_are_what_they_are_called() -> None:
    """The nearest class mean, learned from the training images, recognises most test images."""
    dataset = sample()
    train, test = (split.images[:, 0].reshape(len(split), -1) / 256 for split in (dataset.train, dataset.test))
    means = np.stack([train[dataset.train.labels == label].mean(0) for label in range(10)])
    nearest = ((test[:, None] - means) ** 2).sum(2).argmin(1)
    assert (nearest == dataset.test.labels).mean() > 0.6


def test_licence_and_size() -> None:
    folder = resources.files("kedge.datasets") / "sample"
    assert "Zalando SE" in (folder / "LICENSE").read_text(encoding="utf-8")
    assert sum(len(file.read_bytes()) for file in folder.iterdir()) < 4_000_000


def test_rebuilding(tmp_path: Path, monkeypatch) -> None:
    labels = torch.from_numpy(np.random.default_rng(0).permutation(np.repeat(np.arange(10), 150)))
    images = (labels[:, None, None] * 20).expand(1500, 28, 28).to(torch.uint8)
    main = runpy.run_path(str(Path(__file__).with_name("build_sample.py")))["main"]
    monkeypatch.setitem(main.__globals__, "FashionMNIST", lambda *_, **__: SimpleNamespace(data=images, targets=labels))
    monkeypatch.setitem(main.__globals__, "PER_CLASS", {"train": 100, "test": 100})
    main("nowhere", str(tmp_path))
    with Image.open(tmp_path / "train.png") as sheet:
        assert np.asarray(sheet)[::28, 0].tolist() == [20 * label for label in range(10)]
        assert sheet.size == (28 * 100, 28 * 10)
