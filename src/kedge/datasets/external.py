"""Datasets that people have already, as Kedge's: PyTorch's, Hugging Face's, or splits of them by name."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch.utils.data import Dataset as TorchDataset

from kedge.datasets.base import Dataset, ImageSplit
from kedge.datasets.cache import cache_folder, check_usable, open_array, short_hash, write_array
from kedge.datasets.sources import (
    HuggingFaceSource,
    Label,
    Source,
    TorchSource,
    is_huggingface,
    load_huggingface,
)
from kedge.datasets.splits import hold_out
from kedge.errors import ConfigError, DataError, ImageError

__all__ = ["as_dataset", "huggingface", "is_external", "keep", "keep_external", "sources_of", "stored"]

_VERSION = 1
_SIZE_SAMPLES = 16
"""So many images tell whether all have one size."""
_TEST_SPLITS = ("test", "validation", "val", "valid")


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
    return keep(*_train_and_test(source, image, label), size=size, most=most)


def is_external(source: Any) -> bool:
    """Whether this is a dataset of PyTorch or Hugging Face, or splits of one."""
    if isinstance(source, Mapping):
        return bool(source) and all(is_external(split) for split in source.values())
    return isinstance(source, TorchDataset) or is_huggingface(source)


def sources_of(source: Any, image: str | None = None, label: str | None = None, name: str = "") -> list[Source]:
    """All the images, split by split."""
    splits = source.values() if isinstance(source, Mapping) else [source]
    return [
        HuggingFaceSource(split, image, label, name) if is_huggingface(split) else TorchSource(split)
        for split in splits
    ]


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
    """Read a dataset with an Image column and a ClassLabel or string column, as :func:`as_dataset` does.

    ``path`` is its name on the Hub, or a folder: one that ``save_to_disk`` left, or of images or Parquet files.
    ``name`` is its configuration, where it has several; ``revision`` a commit, branch or tag on the Hub.
    """
    train, test = _train_and_test(load_huggingface(str(path), name, revision), image, label, Path(path).name)
    return stored(keep(train, test, size=size), test_fraction=test_fraction, seed=seed, flip=flip)


def stored(path: str | Path, test_fraction: float = 0.1, seed: int = 0, flip: bool = True) -> Dataset:
    """Open what :func:`keep` left; where it has no test images, ``test_fraction`` of each class are split off."""
    cached = open_array(Path(path).expanduser())
    if cached is None or not {"name", "train", "classes", "labels"} <= cached[1].keys():
        raise DataError(
            f"{path} is gone or damaged, where Kedge kept the images of an external dataset: pass that again."
        )
    images, notes = cached
    labels = np.array(notes["labels"], dtype=np.int64)
    rows, train_count = np.flatnonzero(labels >= 0), notes["train"]
    if train_count < len(labels):
        parts = rows[rows < train_count], rows[rows >= train_count]
    else:
        train, test = hold_out(labels[rows], test_fraction, seed)
        parts = rows[train], rows[test]
    train_split, test_split = (ImageSplit(images, labels[part], part) for part in parts)
    skipped = tuple((item, reason) for item, reason in notes["skipped"])
    return Dataset(notes["name"], tuple(notes["classes"]), train_split, test_split, flip=flip, skipped=skipped)


def keep(train: Source, test: Source | None = None, *, size: int | None = None, most: int = 224) -> Path:
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
        reasons = {number: "has no label" for number, label in enumerate(labels) if label is None} | unreadable
        skipped = []
        for number, reason in sorted(reasons.items()):
            source, row = items[number]
            labels[number] = None
            skipped.append((source.path(row) or f"{source.name}[{row}]", reason))
        check_usable(train.name, skipped, len(items))
        classes, numbers = _numbered(train, items, labels)
        notes = {"name": train.name, "train": len(train), "classes": classes, "labels": numbers, "skipped": skipped}
        return key or short_hash([digest, notes]), notes

    return write_array(cache_folder(), len(items), side, read, finish)


def _train_and_test(source: Any, image: str | None, label: str | None, name: str = "") -> tuple[Source, Source | None]:
    """The images to train on and, if there is a split of them with labels, those to test on."""
    if not isinstance(source, Mapping):
        return sources_of(source, image, label, name)[0], None
    splits = {str(split): images for split, images in source.items()}
    if is_huggingface(source) and len(splits) == 1:
        splits = {"train": next(iter(splits.values()))}
    # Others' dictionaries may have splits for other purposes; in one that was written for us, another name is a slip.
    unknown = not is_huggingface(source) and splits.keys() - {"train", *_TEST_SPLITS}
    if "train" not in splits or unknown:
        found = ", ".join(splits)
        raise DataError(f"splits must be called train and, if you like, test or validation; found {found}.")
    (train,) = sources_of(splits["train"], image, label, name)
    for split in _TEST_SPLITS:
        if split in splits:
            (test,) = sources_of(splits[split], image, label, train.name)
            if isinstance(test, TorchSource) or any(known is not None for known in test.labels()):
                return train, test
    return train, None


def _in_order(dataset: Dataset, classes: tuple[str, ...]) -> Dataset:
    """The same images, with the classes numbered as in ``classes``."""
    number_of = {name: number for number, name in enumerate(classes)}
    used = np.unique(np.concatenate([dataset.train.labels, dataset.test.labels]))
    if unknown := [dataset.classes[label] for label in used if dataset.classes[label] not in number_of]:
        raise DataError(f"{dataset.name} has a class {unknown[0]!r}, which is none of the {len(classes)} known ones.")
    numbers = np.array([number_of.get(name, -1) for name in dataset.classes], dtype=np.int64)
    train, test = (replace(split, labels=numbers[split.labels]) for split in (dataset.train, dataset.test))
    return replace(dataset, classes=classes, train=train, test=test)


def _numbered(train: Source, items: list[tuple[Source, int]], labels: list[Label]) -> tuple[list[str], list[int]]:
    """The classes, and each image's number among them; -1 where it cannot be used."""
    names = [source.name_of(label) for (source, _), label in zip(items, labels, strict=True)]
    numbers = [label for label in labels if isinstance(label, int)]
    trained = {name for name in names[: len(train)] if name is not None}
    if train.classes is not None:
        classes = list(train.classes)
    elif numbers and not any(isinstance(label, str) for label in labels):
        if min(numbers) < 0 or max(numbers) >= len(items):
            odd = min(numbers) if min(numbers) < 0 else max(numbers)
            raise DataError(f"{train.name} has a label {odd} but {len(items)} images: number the classes from 0.")
        classes = [str(number) for number in range(max(numbers) + 1)]
    else:
        classes = sorted(trained)
    number_of: dict[str | None, int] = {name: number for number, name in enumerate(classes)} | {None: -1}
    if unknown := sorted(str(name) for name in names if name not in number_of):
        raise DataError(f"{train.name} has test images of a class {unknown[0]!r} but none to train on.")
    if len(trained) < 2:
        raise DataError(f"{train.name} has training images of one class only: at least two are needed.")
    return classes, [number_of[name] for name in names]


def _common_side(source: Source, most: int) -> int:
    sizes = set()
    for row in np.unique(np.linspace(0, len(source) - 1, _SIZE_SAMPLES).astype(int)).tolist():
        with suppress(ImageError):  # skipped and listed later
            sizes.add(source.read(row)[0].size)
    width, height = sizes.pop() if len(sizes) == 1 else (most, most)
    return width if width == height <= most else most
