"""Datasets that people have already, as Kedge's: PyTorch's, Hugging Face's, or splits of them by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset as TorchDataset

from kedge.datasets.base import Dataset
from kedge.datasets.cache import keep, stored
from kedge.datasets.sources import HuggingFaceSource, Source, TorchSource, is_huggingface, load_huggingface
from kedge.errors import DataError

__all__ = ["as_dataset", "huggingface", "is_external", "keep_external", "sources_of"]

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
    path = keep_external(source, size=size, most=most, image=image, label=label)
    dataset = stored(path, test_fraction=test_fraction, seed=seed, flip=flip)
    return dataset if classes is None else _reorder_classes(dataset, classes)


def keep_external(
    source: Any,
    *,
    size: int | None = None,
    most: int = 224,
    crop_pct: float = 1.0,
    interpolation: str = "bilinear",
    image: str | None = None,
    label: str | None = None,
    name: str = "",
) -> Path:
    """Decode such a dataset; the path that ``stored`` opens."""
    train, test = _train_and_test(source, image, label, name)
    return keep(train, test, size=size, most=most, crop_pct=crop_pct, interpolation=interpolation)


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
    source = load_huggingface(str(path), name, revision)
    array = keep_external(source, size=size, image=image, label=label, name=Path(path).name)
    return stored(array, test_fraction=test_fraction, seed=seed, flip=flip)


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


def _train_and_test(source: Any, image: str | None, label: str | None, name: str) -> tuple[Source, Source | None]:
    """The images to train on and, if there is a split of them with labels, those to test on."""
    mapping = source if isinstance(source, Mapping) else {"train": source}
    splits = {str(split): images for split, images in mapping.items()}
    if is_huggingface(source) and len(splits) == 1:
        splits = {"train": next(iter(splits.values()))}
    # Others' dictionaries may have splits for other purposes; in one that was written for us, another name is a slip.
    unknown = not is_huggingface(source) and splits.keys() - {"train", *_TEST_SPLITS}
    if "train" not in splits or unknown:
        raise DataError(f"splits must be called train and, if you like, test or validation; found {', '.join(splits)}.")
    (train,) = sources_of(splits["train"], image, label, name)
    for split in _TEST_SPLITS:
        if split in splits:
            (test,) = sources_of(splits[split], image, label, train.name)
            if isinstance(test, TorchSource) or any(value is not None for value in test.labels()):
                return train, test
    return train, None


def _reorder_classes(dataset: Dataset, classes: tuple[str, ...]) -> Dataset:
    """The same images, with the classes numbered as in ``classes``."""
    number_of = {name: number for number, name in enumerate(classes)}
    used = np.unique(np.concatenate([dataset.train.labels, dataset.test.labels]))
    if unknown := [dataset.classes[label] for label in used if dataset.classes[label] not in number_of]:
        raise DataError(f"{dataset.name} has a class {unknown[0]!r}, which is none of the {len(classes)} known ones.")
    numbers = np.array([number_of.get(name, -1) for name in dataset.classes], dtype=np.int64)
    train, test = (replace(split, labels=numbers[split.labels]) for split in (dataset.train, dataset.test))
    return replace(dataset, classes=classes, train=train, test=test)
