"""Datasets that people have already, as Kedge's: PyTorch's, Hugging Face's, or splits of them by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset as TorchDataset

from kedge.datasets.base import Dataset, Pictures
from kedge.datasets.huggingface import HuggingFaceSource, is_huggingface, splits_of
from kedge.datasets.pytorch import TorchSource
from kedge.datasets.sources import Source
from kedge.datasets.stored import keep, stored
from kedge.errors import DataError

__all__ = ["as_dataset", "is_given", "keep_given", "sources_of"]

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
    """A dataset of PyTorch or Hugging Face as one of Kedge's; each picture is decoded once.

    Args:
        source: a map-style PyTorch dataset of (PIL image or uint8, label), a Hugging Face ``Dataset`` or
            ``DatasetDict``, or a dictionary of such with ``train`` and ``test``.
        size: side of the pictures; by default theirs where all are squares of at most ``most`` pixels, else ``most``.
        most: see there.
        image: the column of a Hugging Face dataset with the pictures, where there are several.
        label: the one with the labels.
        test_fraction: the share split off for testing where there are no test pictures.
        seed: of that division.
        flip: False where mirroring changes the class.
        classes: the order in which the classes are wanted, such as ``Model.classes``.
    """
    kept = keep_given(source, size=size, most=most, image=image, label=label)
    dataset = stored(kept, test_fraction=test_fraction, seed=seed, flip=flip)
    return dataset if classes is None else _in_order(dataset, classes)


def keep_given(
    source: Any, *, size: int | None = None, most: int = 224, image: str | None = None, label: str | None = None
) -> Path:
    """Decode such a dataset; the path that :func:`stored` opens."""
    train, test = _train_and_test(source, image, label)
    return keep(train, test, size=size, most=most)


def is_given(source: Any) -> bool:
    """Whether this is a dataset of PyTorch or Hugging Face, or splits of one."""
    if isinstance(source, Mapping):
        return bool(source) and all(is_given(split) for split in source.values())
    return isinstance(source, TorchDataset) or is_huggingface(source)


def sources_of(source: Any, image: str | None = None, label: str | None = None) -> list[Source]:
    """All the pictures, split by split."""
    splits = source.values() if isinstance(source, Mapping) else [source]
    return [HuggingFaceSource(split, image, label) if is_huggingface(split) else TorchSource(split) for split in splits]


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
    place = {name: number for number, name in enumerate(classes)}
    used = np.unique(np.concatenate([dataset.train.labels, dataset.test.labels]))
    if strange := [dataset.classes[label] for label in used if dataset.classes[label] not in place]:
        raise DataError(f"{dataset.name} has a class {strange[0]!r}, which is none of the {len(classes)} known ones.")
    moved = np.array([place.get(name, -1) for name in dataset.classes], dtype=np.int64)

    def renumbered(pictures: Pictures) -> Pictures:
        return replace(pictures, labels=moved[pictures.labels])

    return replace(dataset, classes=classes, train=renumbered(dataset.train), test=renumbered(dataset.test))
