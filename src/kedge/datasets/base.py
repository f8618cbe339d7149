"""What every loader returns: two splits of uint8 images of one size, and the names of their classes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kedge.errors import DataError

__all__ = ["Dataset", "ImageSplit", "Indices"]

Indices = Sequence[int] | np.ndarray | Tensor


@dataclass(frozen=True, eq=False)
class ImageSplit:
    """One split: images, M x 3 x H x W, in memory or memory-mapped, and a label for each.

    With ``rows`` it is a view: image i is ``images[rows[i]]``, while labels and paths are the view's own.
    A torch DataLoader fetches whole batches from it (``__getitems__``): give it an identity ``collate_fn``.
    """

    images: np.ndarray
    labels: np.ndarray
    rows: np.ndarray | None = None
    paths: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.images.dtype != np.uint8 or self.images.ndim != 4 or self.images.shape[1] != 3:
            raise DataError(
                f"images must be uint8 of shape M x 3 x H x W, not {self.images.dtype} {self.images.shape}."
            )
        for name, numbers in {"labels": self.labels, "rows": self.rows}.items():
            if numbers is not None and (numbers.ndim != 1 or not np.issubdtype(numbers.dtype, np.integer)):
                raise DataError(f"{name} must be one row of integers, not {numbers.dtype} {numbers.shape}.")
        object.__setattr__(self, "labels", self.labels.astype(np.int64, copy=False))
        count = len(self.images)
        if self.rows is not None:
            if len(self.rows) and not (self.rows.min() >= 0 and self.rows.max() < count):
                raise DataError(f"rows must lie between 0 and {count - 1}: there are {count} images.")
            count = len(self.rows)
        for name, values in {"labels": self.labels, "paths": self.paths}.items():
            if values is not None and len(values) != count:
                raise DataError(f"There are {count} images but {len(values)} {name}: one is needed for each.")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.images.shape[2], self.images.shape[3]

    def take(self, indices: Indices) -> Tensor:
        """The images at these indices: uint8, B x 3 x H x W."""
        chosen = _as_array(indices)
        return torch.from_numpy(np.asarray(self.images[chosen if self.rows is None else self.rows[chosen]]))

    def subset(self, indices: Indices) -> ImageSplit:
        """A view of some of the images; nothing is copied."""
        chosen = _as_array(indices)
        rows = np.arange(len(self)) if self.rows is None else self.rows
        paths = None if self.paths is None else tuple(self.paths[index] for index in chosen)
        return ImageSplit(self.images, self.labels[chosen], rows[chosen], paths)

    def __getitems__(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """A batch: images and their labels."""
        return self.take(indices), torch.from_numpy(self.labels[_as_array(indices)])

    def __reduce__(self) -> tuple[Callable[..., ImageSplit], tuple[Any, ...]]:
        """Send a memory-mapped file to other processes by its name; numpy would send its contents."""
        images: Any = self.images
        # A slice of a mapped file (its base is mapped too) does not say where in the file it begins.
        if type(images) is np.memmap and type(images.base) is not np.memmap and images.filename is not None:
            images = Path(images.filename), np.uint8, "r", images.offset, images.shape
        return _rebuild, (images, self.labels, self.rows, self.paths)


@dataclass(frozen=True)
class Dataset:
    """Named classes, a training and a test split. ``flip`` is False where mirroring changes the class.

    ``skipped`` lists images that could not be used: path and reason. ``crop_pct`` and ``interpolation`` are those of
    the ``Preprocessing`` that decoded the images, where they were decoded from files.
    """

    name: str
    classes: tuple[str, ...]
    train: ImageSplit
    test: ImageSplit
    flip: bool = True
    skipped: tuple[tuple[str, str], ...] = ()
    crop_pct: float = 1.0
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        if len(self.classes) < 2:
            raise DataError(f"{self.name} has {len(self.classes)} class: at least two are needed.")
        if len(set(self.classes)) < len(self.classes):
            twice = next(name for i, name in enumerate(self.classes) if name in self.classes[:i])
            raise DataError(f"{self.name} has two classes named {twice!r}: give every class its own name.")
        if len(self.train) == 0:
            raise DataError(f"{self.name} has no training images.")
        for name, split in {"train": self.train, "test": self.test}.items():
            bad = np.flatnonzero((split.labels < 0) | (split.labels >= len(self.classes)))
            if len(bad):
                raise DataError(
                    f"The {name} labels of {self.name} must lie between 0 and {len(self.classes) - 1}: "
                    f"found {split.labels[bad[0]]} in row {bad[0]}."
                )
        if self.train.size != self.test.size:
            raise DataError(
                f"All images of {self.name} must have one size: training images have {self.train.size}, "
                f"test images {self.test.size}."
            )

    def fingerprint(self) -> str:
        """16 hex digits that change with any label or pixel of either split, hashed once."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        for split in (self.train, self.test):
            digest.update(repr((len(split), split.size)).encode())
            digest.update(split.labels.astype("<i8").tobytes())
            for start in range(0, len(split), 1024):
                digest.update(split.take(np.arange(start, min(start + 1024, len(split)))).numpy().data)
        return digest.hexdigest()[:16]


def _rebuild(images: np.ndarray | tuple[Any, ...], *rest: Any) -> ImageSplit:
    return ImageSplit(np.memmap(*images) if isinstance(images, tuple) else images, *rest)


def _as_array(indices: Indices) -> np.ndarray:
    return np.asarray(indices, dtype=np.int64)
