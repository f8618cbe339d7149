"""Class folders of image files: every class is a folder."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from kedge.datasets.base import Dataset, FileImages, ImageSplit, Label, Source
from kedge.datasets.cache import Scan, keep, noted, open_array
from kedge.datasets.digests import file_state
from kedge.errors import DataError
from kedge.images import EXTENSIONS, Preprocessing, list_classes, list_images, read_image

__all__ = ["FileSource", "folder", "from_files", "write_pictures"]


class FileSource(Source):
    """Files below a folder, each with the name of its class."""

    def __init__(
        self, name: str, base: Path, labelled: Sequence[tuple[Path, str]], classes: tuple[str, ...] | None = None
    ) -> None:
        self.name, self.classes, self.folder = name, classes, str(base.resolve())
        self.labelled = labelled
        self._base = base

    def __len__(self) -> int:
        return len(self.labelled)

    def read(self, row: int) -> tuple[Image.Image, Label]:
        """An image and its label."""
        file, label = self.labelled[row]
        return read_image(file), label

    def labels(self) -> list[Label]:
        """The classes, as listed."""
        return [label for _, label in self.labelled]

    def path(self, row: int) -> str:
        """The file."""
        return str(self.labelled[row][0])

    @property
    def identity(self) -> Any:
        """The listing: path, class, size and time of every file."""
        listing = [(str(file.relative_to(self._base)), label, *file_state(file)) for file, label in self.labelled]
        return [self.folder, self.classes, listing]


def folder(
    path: str | Path,
    size: int = 224,
    test_fraction: float = 0.1,
    seed: int = 0,
    crop_pct: float = 1.0,
    interpolation: str = "bilinear",
    scan: Scan | None = None,
) -> Dataset:
    """Read class folders, each image resized and cropped to ``size`` pixels, as ``Preprocessing`` says.

    ``path`` holds the class folders, of which ``test_fraction`` is split off for testing; or it holds
    ``train/`` and ``test/`` (or ``val/``), each with class folders. Images that cannot be read are skipped
    and listed: a new folder is decoded once for that, or read by ``scan``, which finds them on its way.
    """
    base = Path(path).expanduser()
    splits = _split_folders(base)
    sources = [_list_split(base, split) for split in splits]
    cropping: dict[str, Any] = {"crop_pct": crop_pct, "interpolation": interpolation}
    dataset = from_files(*sources, size=size, test_fraction=test_fraction, seed=seed, scan=scan, **cropping)
    if len(splits) == 1 and test_fraction > 0:
        _check_singles(base, dataset)
    beside = (file for split in splits for file in sorted(split.iterdir()) if file.is_file())
    loose = [file for file in beside if file.suffix.lower() in EXTENSIONS and not file.name.startswith(".")]
    return replace(
        dataset, skipped=(*dataset.skipped, *((str(file), "lies outside the class folders") for file in loose))
    )


def from_files(
    *sources: FileSource,
    size: int,
    root: str | Path | None = None,
    test_fraction: float = 0.1,
    seed: int = 0,
    scan: Scan | None = None,
    **cropping: Any,
) -> Dataset:
    """A dataset of the files to train on and, if there are such, to test on; `cropping` is that of a `Preprocessing`.

    An array of all pixels is decoded once, and opened when more than a few of them are asked for.
    """
    decoding: dict[str, Any] = {"size": size, **cropping}
    preprocessing = Preprocessing(**decoding)
    array = keep(*sources, **decoding, root=root, pixels=False, scan=scan)
    rows = [(source, row) for source in sources for row in range(len(source))]

    def read(number: int) -> np.ndarray:
        source, row = rows[number]
        return preprocessing.to_pixels(source.read(row)[0])

    def decode() -> np.ndarray:
        if keep(*sources, **decoding, root=root) != array:
            raise DataError(f"{sources[0].name} has changed since it was listed: start again.")
        return open_array(array)[0]

    images = FileImages((len(rows), 3, size, size), read, decode)
    _, notes = open_array(array, pixels=False)
    return noted(images, notes, test_fraction, seed, files=[source.path(row) for source, row in rows])


def write_pictures(
    folder: str | Path, images: ImageSplit, classes: Sequence[str], most: int
) -> tuple[list[Path], list[str | None]]:
    """The first `most` images of each class as PNG in a folder of its name; the files, and the label of each."""
    files: list[Path] = []
    labels: list[str | None] = []
    for label, name in enumerate(classes):
        class_folder = Path(folder, name.replace("/", "-"))
        rows = np.flatnonzero(images.labels == label)[:most]
        for number, image in enumerate(images.take(rows)):
            class_folder.mkdir(parents=True, exist_ok=True)
            files.append(class_folder / f"{number:03d}.png")
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(files[-1])
            labels.append(name)
    return files, labels


def _split_folders(base: Path) -> list[Path]:
    """train/ and test/ or val/, where they hold class folders; else they are classes of these names."""
    for name in ("test", "val"):
        splits = [base / "train", base / name]
        if all(split.is_dir() and list_classes(split)[0] for split in splits):
            return splits
    return [base]


def _list_split(base: Path, split: Path) -> FileSource:
    classes, files, labels = list_classes(split)
    if not classes and list_images(split):
        raise DataError(f"{split} has images but no class folders; put the images of each class in their own folder.")
    if not classes:
        raise DataError(f"{split} has no images ({', '.join(sorted(EXTENSIONS))}): check the path.")
    return FileSource(
        base.resolve().name, base, [(file, classes[label]) for file, label in zip(files, labels, strict=True)]
    )


def _check_singles(base: Path, dataset: Dataset) -> None:
    """Say which classes have a single image, which is then trained on and not tested."""
    if len(dataset.test) == 0:
        raise DataError(f"Every class in {base} has a single image, so none is left to test on; add more images.")
    untested = set(range(len(dataset.classes))) - set(dataset.test.labels.tolist())
    if singles := [dataset.classes[label] for label in sorted(untested)]:
        named = ", ".join(singles[:5]) + (f" and {len(singles) - 5} more" if len(singles) > 5 else "")
        warnings.warn(f"Classes with a single image keep it for training and are not tested: {named}.", stacklevel=3)
