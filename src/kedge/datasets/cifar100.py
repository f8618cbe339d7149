"""CIFAR-100: 50,000 training and 10,000 test images of 100 classes, 32 x 32."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kedge.datasets.base import Dataset, Pictures
from kedge.datasets.download import Source, data_root, obtain, read_lines
from kedge.errors import DataError

__all__ = ["cifar100"]

# The binary version: the Python one is a pickle, and opening a pickle runs what is in it.
SOURCE = Source("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz", "md5:03b5dce01913d631647c71ecec9e9cb8")
_PIXELS = 3 * 32 * 32


def cifar100(root: str | Path | None = None, source: Source = SOURCE) -> Dataset:
    """CIFAR-100 with its fine labels; downloaded (161 MB) on first use."""
    folder = obtain(source, data_root(root) / "cifar-100-binary")
    classes = tuple(line.strip() for line in read_lines(folder, "fine_label_names.txt"))
    return Dataset("cifar100", classes, _read(folder / "train.bin"), _read(folder / "test.bin"))


def _read(path: Path) -> Pictures:
    """Records of a coarse label, a fine label and three planes of pixels."""
    records = np.fromfile(path, np.uint8) if path.is_file() else np.empty(0, np.uint8)
    if len(records) == 0 or len(records) % (2 + _PIXELS):
        raise DataError(f"{path} is missing or cut short: delete {path.parent} to have it made again.")
    records = records.reshape(-1, 2 + _PIXELS)
    images = np.ascontiguousarray(records[:, 2:]).reshape(-1, 3, 32, 32)
    return Pictures(images, records[:, 1].astype(np.int64))
