"""What every loader returns: two splits of uint8 images of one size, and the names of their classes; and what the
cache of decoded images is made from."""

from __future__ import annotations

import hashlib
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kedge.datasets.digests import file_digests
from kedge.errors import DataError

__all__ = ["Dataset", "FileImages", "ImageSplit", "Indices", "Label", "Source"]

Label = int | str | None
Indices = Sequence[int] | np.ndarray | Tensor
_FEW = 16
"""Images that are read each time; to decode all, once, is worth it for more."""
_OF_FILES = "files-"
"""Begins the fingerprint of a dataset of files."""


class FileImages:
    """Files in the place of an array of pixels, M x 3 x H x W: decoded into one when more than a few are asked for.

    Args:
        shape: that of the array.
        read: decodes one image.
        decode: decodes all, or opens the array where that was done.
    """

    dtype, ndim = np.dtype(np.uint8), 4

    def __init__(
        self, shape: tuple[int, ...], read: Callable[[int], np.ndarray], decode: Callable[[], np.ndarray]
    ) -> None:
        self.shape, self._read, self._decode = shape, read, decode

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        if "array" not in self.__dict__ and len(rows) <= _FEW:
            return np.array([self._read(row) for row in rows.tolist()], np.uint8).reshape(-1, *self.shape[1:])
        pixels: np.ndarray = self.array[rows]
        return pixels

    @cached_property
    def array(self) -> np.ndarray:
        """The decoded images."""
        return self._decode()


@dataclass(frozen=True, eq=False)
class ImageSplit:
    """One split: images, M x 3 x H x W, in memory, memory-mapped or in files, and a label for each.

    With ``rows`` it is a view: image i is ``images[rows[i]]``, while labels and paths are the view's own.
    A torch DataLoader fetches whole batches from it (``__getitems__``): give it an identity ``collate_fn``.
    """

    images: np.ndarray | FileImages
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

    @property
    def files(self) -> tuple[str, ...] | None:
        """The files, where these are what the images are read from."""
        return self.paths if isinstance(self.images, FileImages) else None

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
        images: Any = self.images.array if isinstance(self.images, FileImages) else self.images
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
    unseen: tuple[ImageSplit, ...] = ()
    """Images of classes that are none of `classes`, with labels of their own: kept out of training altogether."""
    unseen_gallery: ImageSplit | None = None
    """Images of the same classes that those of `unseen` are searched in; None: each is searched among the others."""

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
        """16 hex digits that change with any label or pixel of either split, or any byte of its files; hashed once."""
        return self._fingerprint

    def matches(self, fingerprint: str) -> bool:
        """Whether a fingerprint is that of these images; 0.1 hashed the pixels of files."""
        is_of_files = fingerprint.startswith(_OF_FILES)
        return fingerprint == (
            self._fingerprint if is_of_files or self.train.files is None else self._hash(pixels=True)
        )

    @cached_property
    def _fingerprint(self) -> str:
        return self._hash(pixels=False)

    def _hash(self, *, pixels: bool) -> str:
        digest = hashlib.sha256()
        gallery = () if self.unseen_gallery is None else (self.unseen_gallery,)
        for split in (self.train, self.test, *self.unseen, *gallery):
            digest.update(repr((len(split), split.size)).encode())
            digest.update(split.labels.astype("<i8").tobytes())
            if split.files is not None and not pixels:
                digest.update("".join(file_digests(split.files)).encode())
                continue
            for start in range(0, len(split), 1024):
                digest.update(split.take(np.arange(start, min(start + 1024, len(split)))).numpy().data)
        kind = "" if self.train.files is None or pixels else _OF_FILES
        return kind + digest.hexdigest()[:16]


class Source(ABC):
    """One split of a dataset. It is read from several threads."""

    name: str
    classes: tuple[str, ...] | None = None
    """The names of the classes in the order of their numbers, where the dataset says them."""
    folder: str | None = None
    """The folder that holds the images, where they are one: what it held earlier need not be kept."""

    @abstractmethod
    def __len__(self) -> int:
        """How many images there are."""

    @abstractmethod
    def read(self, row: int) -> tuple[Image.Image, Label]:
        """An image, upright RGB, and its label; an ImageError if it cannot be read."""

    def labels(self) -> list[Label]:
        """The labels of all images; None where there is none."""
        return [self.read(row)[1] for row in range(len(self))]

    @property
    def identity(self) -> Any:
        """Plain values that change when the images do; None where only a look at all of them could tell."""
        return None

    def content(self, row: int) -> bytes:
        """An image as a file would hold it."""
        stream = io.BytesIO()
        self.read(row)[0].save(stream, "PPM")
        return stream.getvalue()

    def path(self, row: int) -> str | None:
        """The file an image comes from, where that is on this machine and holds just the image."""
        del row
        return None

    def check_label(self, label: Any, row: int) -> Label:
        """A label as a plain number or name; None where there is none."""
        if isinstance(label, (Tensor, np.ndarray, np.generic)) and int(np.prod(label.shape)) == 1:
            label = label.item()
        if label is None or (isinstance(label, (int, str)) and not isinstance(label, bool)):
            return label
        raise DataError(f"{self.item(row)} must have a whole number or a name as its label, found {label!r}.")

    def item(self, row: int) -> str:
        """An image, as messages name it."""
        return f"item {row} of {self.name}"

    def name_of(self, label: Label) -> str | None:
        """The class that a label stands for."""
        if label is None or isinstance(label, str):
            return label
        if self.classes is None:
            return str(label)
        if not 0 <= label < len(self.classes):
            raise DataError(f"{self.name} has a label {label} but {len(self.classes)} classes: check its labels.")
        return self.classes[label]


def _rebuild(images: np.ndarray | tuple[Any, ...], *rest: Any) -> ImageSplit:
    return ImageSplit(np.memmap(*images) if isinstance(images, tuple) else images, *rest)


def _as_array(indices: Indices) -> np.ndarray:
    return np.asarray(indices, dtype=np.int64)
