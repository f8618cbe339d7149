"""What Kedge asks of a dataset that somebody has already: images with labels, one by one; PyTorch's give them so."""

from __future__ import annotations

import io
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset, Subset

from kedge.errors import DataError, ImageError
from kedge.images import to_rgb, upright

__all__ = ["Label", "Source", "TorchSource"]

Label = int | str | None


class Source(ABC):
    """One split of a dataset. It is read from several threads."""

    name: str
    classes: tuple[str, ...] | None = None
    """The names of the classes in the order of their numbers, where the dataset says them."""

    @abstractmethod
    def __len__(self) -> int:
        """How many pictures there are."""

    @abstractmethod
    def read(self, row: int) -> tuple[Image.Image, Label]:
        """A picture, upright RGB, and its label; a ImageError if it cannot be read."""

    @abstractmethod
    def labels(self) -> list[Label]:
        """The labels of all pictures; None where there is none."""

    @property
    def identity(self) -> Any:
        """Plain values that change when the pictures do; None where only a look at all of them could tell."""
        return None

    def content(self, row: int) -> bytes:
        """A picture as a file would hold it."""
        stream = io.BytesIO()
        self.read(row)[0].save(stream, "PPM")
        return stream.getvalue()

    def path(self, row: int) -> str | None:
        """The file a picture comes from, where that is on this machine and holds just the picture."""
        del row
        return None

    def name_of(self, label: Label) -> str | None:
        """The class that a label stands for."""
        if label is None or isinstance(label, str):
            return label
        if self.classes is None:
            return str(label)
        if not 0 <= label < len(self.classes):
            raise DataError(f"{self.name} has a label {label} but {len(self.classes)} classes: check its labels.")
        return self.classes[label]


class TorchSource(Source):
    """A dataset that gives (PIL image, or uint8 tensor or array; whole number or name), such as torchvision's."""

    def __init__(self, dataset: Any) -> None:
        inner = dataset
        while isinstance(inner, Subset):
            inner = inner.dataset
        self.name = type(inner).__name__
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise DataError(f"{self.name} cannot be asked for a picture by number: pass a map-style dataset.")
        self.dataset = dataset
        classes = getattr(inner, "classes", None)
        if isinstance(classes, Sequence) and not isinstance(classes, str):
            self.classes = tuple(name if isinstance(name, str) else str(name) for name in classes)
        self._alone = threading.Lock()

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, row: int) -> tuple[Image.Image, Label]:
        """A picture and its label; one at a time, since a dataset may read from one open file."""
        try:
            with self._alone:
                item = self.dataset[row]
        except (OSError, SyntaxError) as error:  # what Pillow makes of a damaged file
            raise ImageError(f"{self._item(row)} cannot be read: {error}") from error
        except Exception as error:
            raise DataError(f"{self._item(row)} cannot be had ({type(error).__name__}: {error}).") from error
        if not isinstance(item, (tuple, list)) or len(item) < 2:
            found = type(item).__name__
            raise DataError(f"{self._item(row)} must be a picture and its label, found a {found}.")
        return self._picture(item[0], row), self._label(item[1], row)

    def labels(self) -> list[Label]:
        """All labels: as torchvision's datasets tell them (``targets``), else with a look at every item."""
        targets: Any = getattr(self.dataset, "targets", None)
        usable = targets is not None and getattr(self.dataset, "target_transform", None) is None
        if usable and hasattr(targets, "__len__") and len(targets) == len(self):
            return [self._label(label, row) for row, label in enumerate(targets)]
        return [self.read(row)[1] for row in range(len(self))]

    def path(self, row: int) -> str | None:
        """The file, where the dataset is one of torchvision's folders and shows pictures as they are."""
        samples = getattr(self.dataset, "samples", None)
        if getattr(self.dataset, "transform", None) is not None or not isinstance(samples, list):
            return None
        file = samples[row][0] if len(samples) == len(self) and isinstance(samples[row], tuple) else None
        return str(Path(file).absolute()) if isinstance(file, str) and Path(file).is_file() else None

    def _picture(self, picture: Any, row: int) -> Image.Image:
        if isinstance(picture, Image.Image):
            try:
                return to_rgb(upright(picture))
            except (OSError, SyntaxError, ValueError) as error:
                raise ImageError(f"{self._item(row)} cannot be read: {error}") from error
        if not isinstance(picture, (Tensor, np.ndarray)):
            found = type(picture).__name__
            raise DataError(f"{self._item(row)} must begin with a PIL image or with uint8 pixels, found a {found}.")
        shape = " x ".join(map(str, picture.shape))
        if picture.dtype not in (torch.uint8, np.uint8):
            raise DataError(
                f"{self._item(row)} is a picture of {str(picture.dtype).removeprefix('torch.')} ({shape}): leave "
                "ToTensor and Normalize out of the dataset's transform, since Kedge takes PIL images or uint8 and "
                "prepares them itself."
            )
        pixels = picture.cpu().numpy() if isinstance(picture, Tensor) else picture
        if isinstance(picture, Tensor) and picture.ndim == 3:
            pixels = pixels.transpose(1, 2, 0)
        if pixels.ndim == 3 and pixels.shape[2] == 1:
            pixels = pixels[..., 0]
        if 0 in pixels.shape or not (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] == 3)):
            wanted = "3 x H x W" if isinstance(picture, Tensor) else "H x W x 3"
            raise DataError(f"{self._item(row)} must be a picture of {wanted} or H x W, found {shape}.")
        return Image.fromarray(np.ascontiguousarray(pixels)).convert("RGB")

    def _label(self, label: Any, row: int) -> Label:
        single = isinstance(label, (Tensor, np.ndarray, np.generic)) and int(np.prod(label.shape)) == 1
        value = label.item() if single else label
        if isinstance(value, (int, str)) and not isinstance(value, bool):
            return value
        raise DataError(f"{self._item(row)} must have a whole number or a name as its label, found {label!r}.")

    def _item(self, row: int) -> str:
        return f"item {row} of {self.name}"
