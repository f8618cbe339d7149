"""Images of a dataset as files: class folders that `kedge train` and `kedge index` take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from kedge.datasets.base import ImageSplit

__all__ = ["write_pictures"]


def write_pictures(
    folder: str | Path, pictures: ImageSplit, classes: tuple[str, ...], most: int
) -> tuple[list[Path], list[str | None]]:
    """The first `most` pictures of each class as PNG in a folder of its name; the files, and the label of each."""
    files: list[Path] = []
    labels: list[str | None] = []
    for label, name in enumerate(classes):
        own = Path(folder, name.replace("/", "-"))
        rows = np.flatnonzero(pictures.labels == label)[:most]
        if len(rows):
            own.mkdir(parents=True, exist_ok=True)
        for number, image in enumerate(pictures.take(rows)):
            files.append(own / f"{number:03d}.png")
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(files[-1])
            labels.append(name)
    return files, labels
