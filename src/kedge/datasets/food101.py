"""Food-101: 75,750 training and 25,250 test photographs of 101 dishes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kedge.datasets.base import Dataset
from kedge.datasets.decoding import decode
from kedge.datasets.download import Source, data_root, obtain, read_lines
from kedge.errors import DataError

__all__ = ["food101"]

SOURCE = Source("http://data.vision.ee.ethz.ch/cvl/food-101.tar.gz", "md5:85eeb15f3717b99a5da872d97d918f87")


def food101(root: str | Path | None = None, size: int = 224, source: Source = SOURCE) -> Dataset:
    """Food-101, resized and cropped to ``size``; downloaded (4.7 GB) and decoded (14 GiB at 224) once."""
    folder = obtain(source, data_root(root) / "food-101")
    identifiers = read_lines(folder, "meta/classes.txt")
    label_of = {identifier: label for label, identifier in enumerate(identifiers)}
    train, test = read_lines(folder, "meta/train.txt"), read_lines(folder, "meta/test.txt")
    listed = [*train, *test]
    try:
        labels = np.array([label_of[line.partition("/")[0]] for line in listed], dtype=np.int64)
    except KeyError as error:
        raise DataError(
            f"{folder} is not whole ({error} is not in meta/classes.txt): delete it to have it made again."
        ) from error
    decoded = decode(folder, [folder / "images" / f"{line}.jpg" for line in listed], size, root)
    rows = decoded.rows
    train_rows, test_rows = rows[rows < len(train)], rows[rows >= len(train)]
    return Dataset(
        name="food101",
        classes=tuple(identifier.replace("_", " ") for identifier in identifiers),
        train=decoded.pictures(train_rows, labels[train_rows]),
        test=decoded.pictures(test_rows, labels[test_rows]),
        skipped=decoded.skipped,
    )
