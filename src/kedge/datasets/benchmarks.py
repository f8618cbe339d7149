"""The four datasets of the paper, downloaded on first use, and the bundled sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import numpy as np
from PIL import Image

from kedge.datasets.base import Dataset, ImageSplit
from kedge.datasets.download import Source, data_root, fetch, obtain, read_lines
from kedge.datasets.folder import FileSource, from_files
from kedge.deps import require
from kedge.errors import DataError
from kedge.images import list_images

__all__ = ["cifar100", "food101", "sample", "svhn", "tiny_imagenet"]

# The binary version: the Python one is a pickle, and opening a pickle runs what is in it.
CIFAR100 = Source("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz", "md5:03b5dce01913d631647c71ecec9e9cb8")
FOOD101 = Source("http://data.vision.ee.ethz.ch/cvl/food-101.tar.gz", "md5:85eeb15f3717b99a5da872d97d918f87")
TINY_IMAGENET = Source("http://cs231n.stanford.edu/tiny-imagenet-200.zip", "md5:90528d7ca1a48142e341f4ef8d21d0de")
_HOUSE_NUMBERS = "http://ufldl.stanford.edu/housenumbers"
SVHN: Mapping[str, Source] = {
    "train": Source(f"{_HOUSE_NUMBERS}/train_32x32.mat", "md5:e26dedcc434d2e4c54c9b2d4a06d8373"),
    "test": Source(f"{_HOUSE_NUMBERS}/test_32x32.mat", "md5:eb5a983be6a315427106f1b164d9cef3"),
}
SAMPLE_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
PER_CLASS = {"train": 700, "test": 100}
COLUMNS = 100


def sample() -> Dataset:
    """A balanced part of Fashion-MNIST, so that everything can be tried without a network.

    7,000 training and 1,000 test images of clothes, 10 classes, 28 x 28, grey repeated to 3 channels.
    """
    return Dataset("sample", SAMPLE_CLASSES, _sample_split("train"), _sample_split("test"))


def cifar100(root: str | Path | None = None, source: Source = CIFAR100) -> Dataset:
    """CIFAR-100: 50,000 training and 10,000 test images, 32 x 32, with fine labels (161 MB to download)."""
    folder = obtain(source, data_root(root) / "cifar-100-binary")
    classes = tuple(line.strip() for line in read_lines(folder, "fine_label_names.txt"))
    train, test = (_cifar_records(folder / f"{split}.bin") for split in ("train", "test"))
    return Dataset("cifar100", classes, train, test)


def svhn(root: str | Path | None = None, sources: Mapping[str, Source] = SVHN) -> Dataset:
    """SVHN: 73,257 training and 26,032 test images of digits, 32 x 32 (246 MB); a mirrored digit is none."""
    folder = data_root(root) / "svhn"
    train, test = (_matlab_split(folder, sources[split]) for split in ("train", "test"))
    return Dataset("svhn", tuple("0123456789"), train, test, flip=False)


def tiny_imagenet(root: str | Path | None = None, source: Source = TINY_IMAGENET) -> Dataset:
    """Tiny ImageNet: 100,000 training images of 200 classes, 64 x 64 (237 MB; 1.3 GiB decoded).

    Its own test images have no labels: the 10,000 for validation serve as test.
    """
    folder = obtain(source, data_root(root) / "tiny-imagenet-200")
    identifiers = sorted(line.strip() for line in read_lines(folder, "wnids.txt"))
    words = dict(line.split("\t", 1) for line in read_lines(folder, "words.txt") if "\t" in line)
    first = {name: words.get(name, name).partition(",")[0].strip() for name in identifiers}
    # The first word for each class; where two classes share it, the identifier tells them apart.
    counts = Counter(first.values())
    classes = {name: word if counts[word] == 1 else f"{word} ({name})" for name, word in first.items()}
    notes = (line.split("\t") for line in read_lines(folder, "val/val_annotations.txt"))
    splits = (
        [(file, classes[name]) for name in identifiers for file in list_images(folder / "train" / name)],
        [(folder / "val" / "images" / file, classes.get(name, name)) for file, name, *_ in notes],
    )
    train, test = (FileSource("tiny_imagenet", folder, split, tuple(classes.values())) for split in splits)
    return from_files(train, test, size=64, root=root)


def food101(root: str | Path | None = None, size: int = 224, source: Source = FOOD101) -> Dataset:
    """Food-101: 75,750 training and 25,250 test photographs of 101 dishes (4.7 GB; 14 GiB decoded at 224)."""
    folder = obtain(source, data_root(root) / "food-101")
    classes = tuple(name.replace("_", " ") for name in read_lines(folder, "meta/classes.txt"))
    splits = (
        [
            (folder / "images" / f"{line}.jpg", line.partition("/")[0].replace("_", " "))
            for line in read_lines(folder, f"meta/{split}.txt")
        ]
        for split in ("train", "test")
    )
    train, test = (FileSource("food101", folder, split, classes) for split in splits)
    return from_files(train, test, size=size, root=root)


def _sample_split(split: str) -> ImageSplit:
    """Cut one sheet into its images: class after class, ``COLUMNS`` to a row."""
    with (
        resources.files("kedge.datasets").joinpath("sample", f"{split}.png").open("rb") as stream,
        Image.open(stream) as image,
    ):
        sheet = np.asarray(image)
    tiles = sheet.reshape(-1, 28, COLUMNS, 28).transpose(0, 2, 1, 3).reshape(-1, 1, 28, 28)
    labels = np.repeat(np.arange(len(SAMPLE_CLASSES), dtype=np.int64), PER_CLASS[split])
    return ImageSplit(np.repeat(tiles, 3, axis=1), labels)


def _cifar_records(path: Path) -> ImageSplit:
    """Records of a coarse label, a fine label and three planes of pixels."""
    width = 2 + 3 * 32 * 32
    records = np.fromfile(path, np.uint8) if path.is_file() else np.empty(0, np.uint8)
    if len(records) == 0 or len(records) % width:
        raise DataError(f"{path} is missing or cut short; delete {path.parent} to create it again.")
    records = records.reshape(-1, width)
    return ImageSplit(np.ascontiguousarray(records[:, 2:]).reshape(-1, 3, 32, 32), records[:, 1].astype(np.int64))


def _matlab_split(folder: Path, source: Source) -> ImageSplit:
    scipy_io = require("scipy.io", extra="svhn", purpose="SVHN, which comes as Matlab files,")
    path = fetch(source, folder)
    try:
        contents = scipy_io.loadmat(path, variable_names=("X", "y"))
        images, labels = contents["X"], contents["y"].reshape(-1)
    except Exception as error:  # scipy promises no particular error for a file that is not Matlab's
        raise DataError(f"{path} is not SVHN's Matlab file ({error}).") from error
    labels = labels.astype(np.int64)
    labels[labels == 10] = 0  # the files call the digit 0 "10"
    return ImageSplit(np.ascontiguousarray(images.transpose(3, 2, 0, 1)), labels)
