"""The bundled sample: a balanced part of Fashion-MNIST, so that everything can be tried without a network."""

from __future__ import annotations

from importlib import resources

import numpy as np
from PIL import Image

from kedge.datasets.base import Dataset, ImageSplit

__all__ = ["sample"]

CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
PER_CLASS = {"train": 700, "test": 100}
COLUMNS = 100
_SIDE = 28


def sample() -> Dataset:
    """7,000 training and 1,000 test images of clothes, 10 classes, 28 x 28, grey repeated to 3 channels."""
    return Dataset(name="sample", classes=CLASSES, train=_read_split("train"), test=_read_split("test"))


def _read_split(split: str) -> ImageSplit:
    """Cut one sheet into its images: class after class, ``COLUMNS`` to a row."""
    with (
        resources.files("kedge.datasets").joinpath("sample", f"{split}.png").open("rb") as stream,
        Image.open(stream) as image,
    ):
        sheet = np.asarray(image)
    tiles = sheet.reshape(-1, _SIDE, COLUMNS, _SIDE).transpose(0, 2, 1, 3).reshape(-1, 1, _SIDE, _SIDE)
    labels = np.repeat(np.arange(len(CLASSES), dtype=np.int64), PER_CLASS[split])
    return ImageSplit(images=np.repeat(tiles, 3, axis=1), labels=labels)
