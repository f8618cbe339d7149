"""Class folders of image files: every class is a folder."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from kedge.datasets.base import Dataset, FileImages, ImageSplit
from kedge.datasets.cache import Scan, keep, noted, read_notes, stored
from kedge.datasets.sources import FileSource
from kedge.errors import DataError
from kedge.images import EXTENSIONS, Preprocessing, list_classes, list_images

__all__ = ["folder", "from_files", "write_pictures"]


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
    train, *tests = [_list_split(base, split) for split in splits]
    decoding: dict[str, Any] = {"size": size, "crop_pct": crop_pct, "interpolation": interpolation}
    dataset = _from_listing(train, tests[0] if tests else None, decoding, test_fraction, seed, scan)
    if not tests and test_fraction > 0:
        _check_singles(base, dataset)
    beside = (file for split in splits for file in sorted(split.iterdir()) if file.is_file())
    loose = [file for file in beside if file.suffix.lower() in EXTENSIONS and not file.name.startswith(".")]
    return replace(
        dataset, skipped=(*dataset.skipped, *((str(file), "lies outside the class folders") for file in loose))
    )


def from_files(train: FileSource, test: FileSource, *, size: int, root: str | Path | None = None) -> Dataset:
    """A dataset of files, decoded once."""
    return _with_paths(stored(keep(train, test, size=size, root=root)), train, test)


def _from_listing(
    train: FileSource,
    test: FileSource | None,
    decoding: dict[str, Any],
    test_fraction: float,
    seed: int,
    scan: Scan | None,
) -> Dataset:
    """A dataset of files whose pixels are decoded when they are asked for."""
    preprocessing = Preprocessing(**decoding)
    array = keep(train, test, **decoding, pixels=False, scan=scan)

    def read(row: int) -> np.ndarray:
        source, own = (train, row) if test is None or row < len(train) else (test, row - len(train))
        return preprocessing.to_pixels(source.read(own)[0])

    def decode() -> np.ndarray:
        if keep(train, test, **decoding) != array:
            raise DataError(f"{train.name} has changed since it was listed: start again.")
        images: np.ndarray = np.load(array, mmap_mode="r")
        return images

    notes = read_notes(array)
    assert notes is not None
    images = FileImages((len(notes["labels"]), 3, decoding["size"], decoding["size"]), read, decode)
    return _with_paths(noted(images, notes, test_fraction, seed), train, test)


def _with_paths(dataset: Dataset, train: FileSource, test: FileSource | None) -> Dataset:
    files = [str(file) for file, _ in (*train.labelled, *(test.labelled if test else ()))]

    def with_paths(split: ImageSplit) -> ImageSplit:
        return replace(split, paths=None if split.rows is None else tuple(files[row] for row in split.rows))

    return replace(dataset, train=with_paths(dataset.train), test=with_paths(dataset.test))


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
        raise DataError(f"{split} has images but no class folders: put each class in a folder of its own.")
    if not classes:
        raise DataError(f"{split} has no images ({', '.join(sorted(EXTENSIONS))}): check the path.")
    return FileSource(
        base.resolve().name, base, [(file, classes[label]) for file, label in zip(files, labels, strict=True)]
    )


def _check_singles(base: Path, dataset: Dataset) -> None:
    """Say which classes have a single image, which is then trained on and not tested."""
    if len(dataset.test) == 0:
        raise DataError(f"Every class in {base} has a single image, so none is left to test on: add some.")
    untested = set(range(len(dataset.classes))) - set(dataset.test.labels.tolist())
    if singles := [dataset.classes[label] for label in sorted(untested)]:
        named = ", ".join(singles[:5]) + (f" and {len(singles) - 5} more" if len(singles) > 5 else "")
        warnings.warn(f"Classes with a single image keep it for training and are not tested: {named}.", stacklevel=3)
