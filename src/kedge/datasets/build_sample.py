"""Rebuilds the bundled sample from Fashion-MNIST's four idx files.

    python -m kedge.datasets.build_sample /usr/share/datasets/fashion-mnist src/kedge/datasets/sample

That folder is where Debian's package ``dataset-fashion-mnist`` puts them.
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from kedge.datasets.sample import COLUMNS, PER_CLASS

SEED = 0


def read_idx(path: Path) -> np.ndarray:
    """The array in a gzipped idx file of unsigned bytes."""
    data = gzip.decompress(path.read_bytes())
    dimensions = data[3]
    shape = np.frombuffer(data, ">i4", dimensions, offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def choose(labels: np.ndarray, per_class: int) -> np.ndarray:
    """Rows of ``per_class`` images of every class, class after class, each in its original order."""
    generator = np.random.default_rng(SEED)
    classes = range(int(labels.max()) + 1)
    chosen = [generator.choice(np.flatnonzero(labels == c), per_class, replace=False) for c in classes]
    return np.concatenate([np.sort(rows) for rows in chosen])


def sheet(images: np.ndarray) -> Image.Image:
    """Images side by side, ``COLUMNS`` to a row."""
    count, height, width = images.shape
    rows = count // COLUMNS
    grid = images.reshape(rows, COLUMNS, height, width).transpose(0, 2, 1, 3)
    return Image.fromarray(np.ascontiguousarray(grid.reshape(rows * height, COLUMNS * width)))


def main(source: str, destination: str) -> None:
    """Write one lossless sheet per split."""
    for split, prefix in {"train": "train", "test": "t10k"}.items():
        images = read_idx(Path(source) / f"{prefix}-images-idx3-ubyte.gz")
        labels = read_idx(Path(source) / f"{prefix}-labels-idx1-ubyte.gz")
        rows = choose(labels, PER_CLASS[split])
        sheet(images[rows]).save(Path(destination) / f"{split}.png", optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
