"""Datasets that people have already, as Kedge's: PyTorch's, Hugging Face's, or splits of them by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch.utils.data import Dataset as TorchDataset

from kedge.datasets.base import Dataset, ImageSplit
from kedge.datasets.cache import cache_folder, open_array, short_hash, write_array
from kedge.datasets.huggingface import HuggingFaceSource, is_huggingface, load_huggingface, splits_of
from kedge.datasets.sources import Label, Source, TorchSource
from kedge.datasets.splits import hold_out
from kedge.errors import ConfigError, DataError, ImageError

__all__ = ["as_dataset", "huggingface", "is_external", "keep", "keep_external", "sources_of", "stored"]

_VERSION = 1
_SIDE = 224
_LOOKS = 16
"""So many images tell whether all have one size."""
_SPLITS = ("train", "test", "validation", "val", "valid")


def as_dataset(
    source: Any,
    *,
    size: int | None = None,
    most: int = 224,
    image: str | None = None,
    label: str | None = None,
    test_fraction: float = 0.1,
    seed: int = 0,
    flip: bool = True,
    classes: tuple[str, ...] | None = None,
) -> Dataset:
    """A dataset of PyTorch or Hugging Face as one of Kedge's; each image is decoded once.

    Args:
        source: a map-style PyTorch dataset of (PIL image or uint8, label), a Hugging Face ``Dataset`` or
            ``DatasetDict``, or a dictionary of such with ``train`` and ``test``.
        size: side of the images; by default theirs where all are squares of at most ``most`` pixels, else ``most``.
        most: see there.
        image: the column of a Hugging Face dataset with the images, where there are several.
        label: the one with the labels.
        test_fraction: the share split off for testing where there are no test images.
        seed: of that division.
        flip: False where mirroring changes the class.
        classes: the order of the classes, such as ``Model.classes``.
    """
    kept = keep_external(source, size=size, most=most, image=image, label=label)
    dataset = stored(kept, test_fraction=test_fraction, seed=seed, flip=flip)
    return dataset if classes is None else _in_order(dataset, classes)


def keep_external(
    source: Any, *, size: int | None = None, most: int = 224, image: str | None = None, label: str | None = None
) -> Path:
    """Decode such a dataset; the path that :func:`stored` opens."""
    train, test = _train_and_test(source, image, label)
    return keep(train, test, size=size, most=most)


def is_external(source: Any) -> bool:
    """Whether this is a dataset of PyTorch or Hugging Face, or splits of one."""
    if isinstance(source, Mapping):
        return bool(source) and all(is_external(split) for split in source.values())
    return isinstance(source, TorchDataset) or is_huggingface(source)


def sources_of(source: Any, image: str | None = None, label: str | None = None) -> list[Source]:
    """All the images, split by split."""
    splits = source.values() if isinstance(source, Mapping) else [source]
    return [HuggingFaceSource(split, image, label) if is_huggingface(split) else TorchSource(split) for split in splits]


def huggingface(
    path: str | Path,
    name: str | None = None,
    revision: str | None = None,
    image: str | None = None,
    label: str | None = None,
    size: int | None = None,
    test_fraction: float = 0.1,
    seed: int = 0,
    flip: bool = True,
) -> Dataset:
    """Read a dataset with an Image column and a ClassLabel or string column.

    Args:
        path: its name on the Hub, or a folder: one that ``save_to_disk`` left, or of images or Parquet files.
        name: its configuration, where it has several.
        revision: a commit, branch or tag on the Hub.
        image: the column of the images; by default the one of type Image.
        label: the column of the classes; by default the one of type ClassLabel, else the one of strings.
        size: side of the images; by default that of the images where all are small squares, else 224.
        test_fraction: the share split off for testing where there is no split called test or validation.
        seed: of that division.
        flip: False where mirroring changes the class.
    """
    train, test = splits_of(load_huggingface(str(path), name, revision), image, label, called=Path(path).name)
    return stored(keep(train, test, size=size), test_fraction=test_fraction, seed=seed, flip=flip)


def stored(path: str | Path, test_fraction: float = 0.1, seed: int = 0, flip: bool = True) -> Dataset:
    """Open what :func:`keep` left; where it has no test images, ``test_fraction`` of each class are split off."""
    cached = open_array(Path(path).expanduser())
    try:
        if cached is None:
            raise ValueError(path)
        images, notes = cached
        labels = np.array(notes["labels"], dtype=np.int64)
        rows, train_count = np.flatnonzero(labels >= 0), int(notes["train"])
        name, classes = str(notes["name"]), tuple(notes["classes"])
        skipped = tuple((str(item), str(reason)) for item, reason in notes["skipped"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is gone or damaged, where Kedge kept the images of an external dataset: pass that again."
        ) from error
    if train_count < len(labels):
        train, test = rows[rows < train_count], rows[rows >= train_count]
    else:
        train, test = (rows[chosen] for chosen in hold_out(labels[rows], test_fraction, seed))
    train_split, test_split = (ImageSplit(images, labels[chosen], chosen) for chosen in (train, test))
    return Dataset(name, classes, train_split, test_split, flip=flip, skipped=skipped)


def keep(train: Source, test: Source | None = None, *, size: int | None = None, most: int = _SIDE) -> Path:
    """Decode all images to squares of ``size`` pixels, and return where :func:`stored` finds them.

    Without ``size`` it is that of the images, where all are squares of at most ``most`` pixels, else ``most``. What
    was kept before is found again; datasets that cannot tell whether they changed are read again for that.
    """
    if size is not None and size < 1:
        raise ConfigError(f"size must be a positive number of pixels, not {size}.")
    if len(train) == 0:
        raise DataError(f"{train.name} has no images.")
    sources = [train] if test is None else [train, test]
    side = size or _common_side(train, most)
    identities = [source.identity for source in sources]
    key = None if None in identities else short_hash([_VERSION, side, train.name, identities])
    if key is not None and open_array(array := cache_folder() / f"{key}.npy") is not None:
        return array
    items = [(source, row) for source in sources for row in range(len(source))]
    labels: list[Label] = [None] * len(items)

    def read(number: int) -> Image.Image:
        source, row = items[number]
        image, labels[number] = source.read(row)
        return image

    def finish(unreadable: dict[int, str], digest: str) -> tuple[str, dict[str, Any]]:
        for number in unreadable:
            labels[number] = None
        reasons = {
            number: unreadable.get(number, "has no label") for number, label in enumerate(labels) if label is None
        }
        skipped = [(_called(*items[number]), reason) for number, reason in reasons.items()]
        if len(skipped) * 2 > len(items):
            raise DataError(
                f"{len(skipped)} of {len(items)} images of {train.name} cannot be used; the first: "
                f"{' '.join(skipped[0])}"
            )
        classes, numbers = _numbered(train, items, labels)
        notes = {"name": train.name, "train": len(train), "classes": classes, "labels": numbers, "skipped": skipped}
        return key or short_hash([digest, notes]), notes

    return write_array(cache_folder(), (len(items), 3, side, side), read, finish)


def _train_and_test(source: Any, image: str | None, label: str | None) -> tuple[Source, Source | None]:
    if is_huggingface(source):
        return splits_of(source, image, label)
    if not isinstance(source, Mapping):
        return TorchSource(source), None
    if "train" not in source or any(name not in _SPLITS for name in source):
        found = ", ".join(map(str, source))
        raise DataError(f"splits must be called train and, if you like, test or validation; found {found}.")
    train, *others = sources_of({name: source[name] for name in _SPLITS if name in source}, image, label)
    return train, others[0] if others else None


def _in_order(dataset: Dataset, classes: tuple[str, ...]) -> Dataset:
    number = {name: number for number, name in enumerate(classes)}
    used = np.unique(np.concatenate([dataset.train.labels, dataset.test.labels]))
    if strange := [dataset.classes[label] for label in used if dataset.classes[label] not in number]:
        raise DataError(f"{dataset.name} has a class {strange[0]!r}, which is none of the {len(classes)} known ones.")
    moved = np.array([number.get(name, -1) for name in dataset.classes], dtype=np.int64)

    def renumbered(split: ImageSplit) -> ImageSplit:
        return replace(split, labels=moved[split.labels])

    return replace(dataset, classes=classes, train=renumbered(dataset.train), test=renumbered(dataset.test))


def _numbered(train: Source, items: list[tuple[Source, int]], labels: list[Label]) -> tuple[list[str], list[int]]:
    """The classes, and each image's number among them; -1 where it cannot be used."""
    names = [source.name_of(label) for (source, _), label in zip(items, labels, strict=True)]
    numbers = [label for label in labels if isinstance(label, int)]
    if train.classes is not None:
        classes = list(train.classes)
    elif numbers and not any(isinstance(label, str) for label in labels):
        if min(numbers) < 0 or max(numbers) >= len(items):
            odd = min(numbers) if min(numbers) < 0 else max(numbers)
            raise DataError(f"{train.name} has a label {odd} but {len(items)} images: number the classes from 0.")
        classes = [str(number) for number in range(max(numbers) + 1)]
    else:
        classes = sorted({name for name in names[: len(train)] if name is not None})
    numbered = {name: number for number, name in enumerate(classes)}
    if unknown := sorted({name for name in names if name is not None} - numbered.keys()):
        raise DataError(f"{train.name} has test images of a class {unknown[0]!r} but none to train on.")
    if len({name for name in names[: len(train)] if name is not None}) < 2:
        raise DataError(f"{train.name} has training images of one class only: at least two are needed.")
    return classes, [-1 if name is None else numbered[name] for name in names]


def _common_side(source: Source, most: int) -> int:
    sizes = set()
    for row in np.unique(np.linspace(0, len(source) - 1, _LOOKS).astype(int)).tolist():
        try:
            sizes.add(source.read(row)[0].size)
        except ImageError:  # skipped and listed later
            continue
    width, height = sizes.pop() if len(sizes) == 1 else (most, most)
    return width if width == height <= most else most


def _called(source: Source, row: int) -> str:
    return source.path(row) or f"{source.name}[{row}]"
