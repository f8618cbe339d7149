"""Class folders of image files: every class is a folder."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from kedge.datasets.base import Dataset, ImageSplit
from kedge.datasets.cache import check_usable, decode
from kedge.datasets.splits import hold_out
from kedge.errors import ConfigError, DataError
from kedge.images import EXTENSIONS, list_classes, list_images

__all__ = ["folder", "from_files", "write_pictures"]

Labelled = list[tuple[Path, str]]
"""Image files, each with the name of its class."""


def folder(path: str | Path, size: int = 224, test_fraction: float = 0.1, seed: int = 0) -> Dataset:
    """Read class folders, each image resized and cropped to ``size`` pixels.

    ``path`` holds the class folders, of which ``test_fraction`` is split off for testing; or it holds
    ``train/`` and ``test/`` (or ``val/``), each with class folders. Images that cannot be read are skipped
    and listed.
    """
    if size < 1:
        raise ConfigError(f"size must be a positive number of pixels, not {size}.")
    base = Path(path).expanduser()
    splits = _split_folders(base)
    train, *tests = [_labelled_files(split) for split in splits]
    dataset = from_files(
        base.resolve().name, base, train, tests[0] if tests else None, size, test_fraction=test_fraction, seed=seed
    )
    if not tests and test_fraction > 0:
        _check_singles(base, dataset)
    beside = (file for split in splits for file in sorted(split.iterdir()) if file.is_file())
    loose = [file for file in beside if file.suffix.lower() in EXTENSIONS and not file.name.startswith(".")]
    return replace(
        dataset, skipped=(*dataset.skipped, *((str(file), "lies outside the class folders") for file in loose))
    )


def from_files(
    name: str,
    base: Path,
    train: Labelled,
    test: Labelled | None,
    size: int,
    *,
    classes: Mapping[str, str] | None = None,
    root: str | Path | None = None,
    test_fraction: float = 0.1,
    seed: int = 0,
) -> Dataset:
    """A dataset of files under ``base``, decoded once; without ``test``, a fraction of each class is split off.

    ``classes`` are the classes as the files have them, and how they are to be called; by default those of the files.
    """
    labelled = [*train, *(test or [])]
    files, names = [file for file, _ in labelled], [name for _, name in labelled]
    images, unreadable = decode(base, files, size, root)
    skipped = [(str(files[row]), reason) for row, reason in unreadable.items()]
    check_usable(base, skipped, len(files))
    rows = np.array([row for row in range(len(files)) if row not in unreadable], dtype=np.int64)
    if classes is None:
        classes = {name: name for name in sorted({names[row] for row in rows if row < len(train)})}
    label_of = {name: label for label, name in enumerate(classes)}
    if unknown := next((names[row] for row in rows if names[row] not in label_of), None):
        raise DataError(f"{base} has images of a class {unknown!r} but none of it to train on: is it whole?")
    if len(classes) < 2:
        raise DataError(f"{base} has images of one class only ({next(iter(classes))!r}): at least two are needed.")
    labels = np.array([label_of[names[row]] for row in rows], dtype=np.int64)
    if test is None:
        parts = hold_out(labels, test_fraction, seed)
    else:
        parts = np.flatnonzero(rows < len(train)), np.flatnonzero(rows >= len(train))
    train_split, test_split = (
        ImageSplit(images, labels[part], rows[part], tuple(str(files[row]) for row in rows[part])) for part in parts
    )
    return Dataset(name, tuple(classes.values()), train_split, test_split, skipped=tuple(skipped))


def write_pictures(
    folder: str | Path, images: ImageSplit, classes: Sequence[str], most: int
) -> tuple[list[Path], list[str | None]]:
    """The first `most` images of each class as PNG in a folder of its name; the files, and the label of each."""
    files: list[Path] = []
    labels: list[str | None] = []
    for label, name in enumerate(classes):
        class_folder = Path(folder, name.replace("/", "-"))
        rows = np.flatnonzero(images.labels == label)[:most]
        if len(rows):
            class_folder.mkdir(parents=True, exist_ok=True)
        for number, image in enumerate(images.take(rows)):
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


def _labelled_files(base: Path) -> Labelled:
    classes, files, labels = list_classes(base)
    if not classes and list_images(base):
        raise DataError(f"{base} has images but no class folders: put each class in a folder of its own.")
    if not classes:
        raise DataError(f"{base} has no images ({', '.join(sorted(EXTENSIONS))}): check the path.")
    return [(file, classes[label]) for file, label in zip(files, labels, strict=True)]


def _check_singles(base: Path, dataset: Dataset) -> None:
    """Say which classes have a single image, which is then trained on and not tested."""
    if len(dataset.test) == 0:
        raise DataError(f"Every class in {base} has a single image, so none is left to test on: add some.")
    untested = set(range(len(dataset.classes))) - set(dataset.test.labels.tolist())
    if singles := [dataset.classes[label] for label in sorted(untested)]:
        named = ", ".join(singles[:5]) + (f" and {len(singles) - 5} more" if len(singles) > 5 else "")
        warnings.warn(f"Classes with a single image keep it for training and are not tested: {named}.", stacklevel=3)
