"""Tiny ImageNet: 100,000 training images of 200 classes, 64 x 64; the 10,000 for validation serve as test."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kedge.datasets.base import Dataset
from kedge.datasets.decoding import decode
from kedge.datasets.download import Source, data_root, obtain, read_lines
from kedge.errors import DataError
from kedge.images import list_images

__all__ = ["tiny_imagenet"]

SOURCE = Source("http://cs231n.stanford.edu/tiny-imagenet-200.zip", "md5:90528d7ca1a48142e341f4ef8d21d0de")
_SIZE = 64


def tiny_imagenet(root: str | Path | None = None, source: Source = SOURCE) -> Dataset:
    """Tiny ImageNet; downloaded (237 MB) and decoded (1.3 GiB) once. Its own test images have no labels."""
    folder = obtain(source, data_root(root) / "tiny-imagenet-200")
    identifiers = sorted(line.strip() for line in read_lines(folder, "wnids.txt"))
    label_of = {identifier: label for label, identifier in enumerate(identifiers)}
    train = [(file, name) for name in identifiers for file in list_images(folder / "train" / name)]
    notes = (line.split("\t") for line in read_lines(folder, "val/val_annotations.txt"))
    test = [(folder / "val" / "images" / file, name) for file, name, *_ in notes]
    try:
        labels = np.array([label_of[name] for _, name in [*train, *test]], dtype=np.int64)
    except KeyError as error:
        raise DataError(
            f"{folder} is not whole ({error} is not in wnids.txt): delete it to have it made again."
        ) from error
    decoded = decode(folder, [file for file, _ in [*train, *test]], _SIZE, root)
    rows = decoded.rows
    train_rows, test_rows = rows[rows < len(train)], rows[rows >= len(train)]
    return Dataset(
        name="tiny_imagenet",
        classes=_names(folder, identifiers),
        train=decoded.pictures(train_rows, labels[train_rows]),
        test=decoded.pictures(test_rows, labels[test_rows]),
        skipped=decoded.skipped,
    )


def _names(folder: Path, identifiers: list[str]) -> tuple[str, ...]:
    """The first word for each class; where two classes share it, the identifier tells them apart."""
    words = dict(line.split("\t", 1) for line in read_lines(folder, "words.txt") if "\t" in line)
    first = [words.get(identifier, identifier).partition(",")[0].strip() for identifier in identifiers]
    return tuple(
        name if first.count(name) == 1 else f"{name} ({identifier})"
        for name, identifier in zip(first, identifiers, strict=True)
    )
