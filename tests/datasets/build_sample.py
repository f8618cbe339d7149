"""Rebuilds the bundled sample from Fashion-MNIST, which torchvision downloads into a folder if need be.

python tests/datasets/build_sample.py FOLDER src/kedge/datasets/sample
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image
from torchvision.datasets import FashionMNIST

from kedge.datasets.benchmarks import COLUMNS, PER_CLASS

SEED = 0


def choose(labels: np.ndarray, per_class: int) -> np.ndarray:
    """Rows of ``per_class`` images of every class, class after class, each in its original order."""
    generator = np.random.default_rng(SEED)
    classes = range(int(labels.max()) + 1)
    chosen = [generator.choice(np.flatnonzero(labels == c), per_class, replace=False) for c in classes]
    return np.concatenate([np.sort(rows) for rows in chosen])


def main(source: str, destination: str) -> None:
    """Write one lossless sheet per split: images side by side, ``COLUMNS`` to a row."""
    for split in ("train", "test"):
        mnist = FashionMNIST(source, train=split == "train", download=True)
        images = mnist.data.numpy()[choose(mnist.targets.numpy(), PER_CLASS[split])]
        side = images.shape[1]
        grid = images.reshape(-1, COLUMNS, side, side).transpose(0, 2, 1, 3).reshape(-1, COLUMNS * side)
        Image.fromarray(np.ascontiguousarray(grid)).save(Path(destination) / f"{split}.png", optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
