"""A folder of one's own pictures: every class is a folder."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kedge.datasets.base import Dataset
from kedge.datasets.cache import Decoded, decode
from kedge.datasets.splits import hold_out
from kedge.errors import ConfigError, DataError
from kedge.images import EXTENSIONS, list_classes, list_images

__all__ = ["folder"]


def folder(path: str | Path, size: int = 224, test_fraction: float = 0.1, seed: int = 0) -> Dataset:
    """Read class folders, each picture resized and cropped to ``size`` pixels.

    ``path`` holds the class folders, of which ``test_fraction`` is split off for testing; or it holds
    ``train/`` and ``test/`` (or ``val/``), each with class folders. Images that cannot be read are skipped
    and listed.
    """
    if size < 1:
        raise ConfigError(f"size must be a positive number of pixels, not {size}.")
    base = Path(path).expanduser()
    splits = _split_folders(base)
    if splits is None:
        names, files = _classes(base)
        decoded = _decoded(base, files, size)
        chosen, classes, labels = decoded.rows, *_labels(names[decoded.rows])
        train, test = hold_out(labels, test_fraction, seed)
        _check_singles(base, classes, labels, test_fraction)
    else:
        train_names, train_files = _classes(splits[0])
        test_names, test_files = _classes(splits[1])
        names = np.concatenate([train_names, test_names])
        decoded = _decoded(base, [*train_files, *test_files], size)
        chosen = decoded.rows
        train, test = np.flatnonzero(chosen < len(train_files)), np.flatnonzero(chosen >= len(train_files))
        classes, _ = _labels(names[chosen[train]])
        if unknown := sorted(set(names[chosen[test]]) - set(classes)):
            raise DataError(f"{splits[1]} has a class {unknown[0]!r} of which {splits[0]} has no picture.")
        labels = np.searchsorted(classes, names[chosen])
    if len(classes) < 2:
        raise DataError(f"{base} has pictures of one class only ({classes[0]!r}): at least two are needed.")
    return Dataset(
        name=base.resolve().name,
        classes=tuple(str(name) for name in classes),
        train=decoded.split(chosen[train], labels[train]),
        test=decoded.split(chosen[test], labels[test]),
        skipped=(*decoded.skipped, *_loose(splits or (base,))),
    )


def _split_folders(base: Path) -> tuple[Path, Path] | None:
    """train/ and test/ or val/, where they hold class folders; else they are classes of these names."""
    for name in ("test", "val"):
        pair = base / "train", base / name
        if all(folder.is_dir() and list_classes(folder)[0] for folder in pair):
            return pair
    return None


def _classes(base: Path) -> tuple[np.ndarray, list[Path]]:
    """The class name of every file, and the files."""
    classes, files, labels = list_classes(base)
    if not classes and list_images(base):
        raise DataError(f"{base} has pictures but no class folders: put each class in a folder of its own.")
    if not classes:
        raise DataError(f"{base} has no pictures ({', '.join(sorted(EXTENSIONS))}): check the path.")
    return np.array(classes, dtype=object)[labels], files


def _decoded(base: Path, files: Sequence[Path], size: int) -> Decoded:
    decoded = decode(base, files, size)
    if len(decoded.skipped) * 2 > len(files):
        raise DataError(
            f"{len(decoded.skipped)} of {len(files)} pictures in {base} cannot be read; the first: "
            f"{' '.join(decoded.skipped[0])}"
        )
    return decoded


def _labels(names: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The classes, sorted, and every picture's place among them."""
    return np.unique(names, return_inverse=True)


def _check_singles(base: Path, classes: np.ndarray, labels: np.ndarray, test_fraction: float) -> None:
    singles = classes[np.bincount(labels, minlength=len(classes)) == 1]
    if test_fraction == 0 or len(singles) == 0:
        return
    if len(singles) == len(classes) > 1:
        raise DataError(f"Every class in {base} has a single picture, so none is left to test on: add some.")
    named = ", ".join(singles[:5]) + (f" and {len(singles) - 5} more" if len(singles) > 5 else "")
    warnings.warn(f"Classes with a single picture keep it for training and are not tested: {named}.", stacklevel=3)


def _loose(folders: Sequence[Path]) -> list[tuple[str, str]]:
    """Images beside the class folders instead of inside one."""
    beside = (file for folder in folders for file in sorted(folder.iterdir()) if file.is_file())
    return [
        (str(file), "lies outside the class folders")
        for file in beside
        if file.suffix.lower() in EXTENSIONS and not file.name.startswith(".")
    ]
