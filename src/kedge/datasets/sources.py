"""What Kedge asks of a dataset that somebody has already, PyTorch's or Hugging Face's: images and labels by number."""

from __future__ import annotations

import io
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset, Subset
from torchvision.transforms.functional import to_pil_image

from kedge.datasets.digests import file_state
from kedge.deps import require
from kedge.errors import DataError, DownloadError, ImageError
from kedge.images import read_image, to_rgb, upright

__all__ = ["FileSource", "HuggingFaceSource", "Label", "Source", "TorchSource", "is_huggingface", "load_huggingface"]

Label = int | str | None
_LIBRARY = {"module": "datasets", "extra": "huggingface", "purpose": "A Hugging Face dataset"}


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

    def name_of(self, label: Label) -> str | None:
        """The class that a label stands for."""
        if label is None or isinstance(label, str):
            return label
        if self.classes is None:
            return str(label)
        if not 0 <= label < len(self.classes):
            raise DataError(f"{self.name} has a label {label} but {len(self.classes)} classes: check its labels.")
        return self.classes[label]


class FileSource(Source):
    """Files below a folder, each with the name of its class."""

    def __init__(
        self, name: str, base: Path, labelled: Sequence[tuple[Path, str]], classes: tuple[str, ...] | None = None
    ) -> None:
        self.name, self.classes, self.folder = name, classes, str(base.resolve())
        self.labelled = labelled
        self._base = base

    def __len__(self) -> int:
        return len(self.labelled)

    def read(self, row: int) -> tuple[Image.Image, Label]:
        """An image and its label."""
        file, label = self.labelled[row]
        return read_image(file), label

    def labels(self) -> list[Label]:
        """The classes, as listed."""
        return [label for _, label in self.labelled]

    def path(self, row: int) -> str | None:
        """The file."""
        return str(self.labelled[row][0])

    @property
    def identity(self) -> Any:
        """The listing: path, class, size and time of every file."""
        listing = [(str(file.relative_to(self._base)), label, *file_state(file)) for file, label in self.labelled]
        return [self.folder, self.classes, listing]


class TorchSource(Source):
    """A dataset that gives (PIL image, or uint8 tensor or array; whole number or name), such as torchvision's."""

    def __init__(self, dataset: Any) -> None:
        inner = dataset
        while isinstance(inner, Subset):
            inner = inner.dataset
        self.name = type(inner).__name__
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise DataError(f"{self.name} cannot be asked for an image by number: pass a map-style dataset.")
        self.dataset = dataset
        classes = getattr(inner, "classes", None)
        if isinstance(classes, Sequence) and not isinstance(classes, str):
            self.classes = tuple(map(str, classes))
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, row: int) -> tuple[Image.Image, Label]:
        """An image and its label; one at a time, since a dataset may read from one open file."""
        try:
            with self._lock:
                item = self.dataset[row]
        except (OSError, SyntaxError) as error:  # what Pillow makes of a damaged file
            raise ImageError(f"{self._item(row)} cannot be read: {error}") from error
        except Exception as error:
            raise DataError(f"{self._item(row)} cannot be had ({type(error).__name__}: {error}).") from error
        if not isinstance(item, (tuple, list)) or len(item) < 2:
            raise DataError(f"{self._item(row)} must be an image and its label, found a {type(item).__name__}.")
        label = self._label(item[1], row)
        try:
            return to_rgb(upright(self._to_pil(item[0], row))), label
        except (OSError, SyntaxError, ValueError) as error:
            raise ImageError(f"{self._item(row)} cannot be read: {error}") from error

    def labels(self) -> list[Label]:
        """All labels: as torchvision's datasets tell them (``targets``), else with a look at every item."""
        targets: Any = getattr(self.dataset, "targets", None)
        usable = targets is not None and getattr(self.dataset, "target_transform", None) is None
        if usable and hasattr(targets, "__len__") and len(targets) == len(self):
            return [self._label(label, row) for row, label in enumerate(targets)]
        return super().labels()

    def path(self, row: int) -> str | None:
        """The file, where the dataset is one of torchvision's folders and shows images as they are."""
        samples = getattr(self.dataset, "samples", None)
        if getattr(self.dataset, "transform", None) is not None or not isinstance(samples, list):
            return None
        file = samples[row][0] if len(samples) == len(self) and isinstance(samples[row], tuple) else None
        return str(Path(file).absolute()) if isinstance(file, str) and Path(file).is_file() else None

    def _to_pil(self, image: Any, row: int) -> Image.Image:
        if isinstance(image, Image.Image):
            return image
        if not isinstance(image, (Tensor, np.ndarray)):
            raise DataError(
                f"{self._item(row)} must begin with a PIL image or with uint8 pixels, found a {type(image).__name__}."
            )
        shape = " x ".join(map(str, image.shape))
        if image.dtype not in (torch.uint8, np.uint8):
            raise DataError(
                f"{self._item(row)} is an image of {str(image.dtype).removeprefix('torch.')} ({shape}): leave ToTensor "
                "and Normalize out of the dataset's transform, since Kedge takes PIL images or uint8 and prepares them "
                "itself."
            )
        try:
            pil: Image.Image = to_pil_image(image)
        except (TypeError, ValueError):
            pil = Image.new("RGB", (0, 0))
        if 0 in pil.size:
            layout = "3 x H x W" if isinstance(image, Tensor) else "H x W x 3"
            raise DataError(f"{self._item(row)} must be an image of {layout} or H x W, found {shape}.")
        return pil

    def _label(self, label: Any, row: int) -> Label:
        single = isinstance(label, (Tensor, np.ndarray, np.generic)) and int(np.prod(label.shape)) == 1
        value = label.item() if single else label
        if isinstance(value, (int, str)) and not isinstance(value, bool):
            return value
        raise DataError(f"{self._item(row)} must have a whole number or a name as its label, found {label!r}.")

    def _item(self, row: int) -> str:
        return f"item {row} of {self.name}"


class HuggingFaceSource(Source):
    """One split of Hugging Face's: the files' bytes as they are stored, decoded by Kedge."""

    def __init__(self, dataset: Any, image: str | None = None, label: str | None = None, name: str = "") -> None:
        datasets = require(**_LIBRARY)
        self.name = name or str(getattr(dataset.info, "dataset_name", None) or "huggingface")
        if not isinstance(dataset, datasets.Dataset):
            kind = type(dataset).__name__
            raise DataError(f"{self.name} is a {kind}: load it without streaming, so that images have numbers.")
        features = dataset.features
        self.image = self._column(features, "image", image, datasets.Image)
        self.label = self._column(features, "label", label, datasets.ClassLabel)
        label_type = features[self.label]
        self.classes = tuple(label_type.names) if isinstance(label_type, datasets.ClassLabel) else None
        if not isinstance(features[self.image], datasets.Image):
            raise DataError(f"the column {self.image!r} of {self.name} holds {features[self.image]}, not images.")
        rows = dataset.with_format(None).select_columns([self.image, self.label])
        self._rows = rows.cast_column(self.image, datasets.Image(decode=False))
        self._fingerprint = dataset._fingerprint
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, row: int) -> tuple[Image.Image, Label]:
        """An image and its label."""
        values = self._row(row)
        try:
            image = read_image(_stored_bytes(values[self.image]))
        except (OSError, ImageError) as error:
            reason = str(error).removeprefix("The image cannot be read: ")
            raise ImageError(f"row {row} of {self.name} cannot be read: {reason}") from error
        return image, self._label(values[self.label])

    def labels(self) -> list[Label]:
        """The column of labels."""
        return [self._label(label) for label in self._rows[self.label]]

    def content(self, row: int) -> bytes:
        """The stored file."""
        return _stored_bytes(self._row(row)[self.image])

    def path(self, row: int) -> str | None:
        """The file, where the dataset only refers to it."""
        image = self._row(row)[self.image] if self._has_references else None
        is_reference = image and image["bytes"] is None and image["path"] and Path(image["path"]).is_file()
        return str(Path(image["path"]).absolute()) if image and is_reference else None

    @property
    def identity(self) -> Any:
        """The library's own fingerprint and, of files that are only referred to, their sizes and times."""
        chunks = self._rows.data.column(self.image).chunks  # the bytes themselves are not read
        references = [chunk.field("path").filter(chunk.field("bytes").is_null()) for chunk in chunks]
        paths = [path for chunk in references for path in chunk.drop_null().to_pylist()]
        return [self._fingerprint, self.image, self.label, [[path, *file_state(Path(path))] for path in paths]]

    @cached_property
    def _has_references(self) -> bool:
        """Whether some images are not in the dataset itself."""
        return any(chunk.field("bytes").null_count for chunk in self._rows.data.column(self.image).chunks)

    def _row(self, row: int) -> Mapping[str, Any]:
        with self._lock:
            values: Mapping[str, Any] = self._rows[row]
        return values

    def _label(self, label: Any) -> Label:
        if label is None or (self.classes is not None and label == -1):  # the Hub's way to hide test labels
            return None
        if isinstance(label, (int, str)) and not isinstance(label, bool):
            return label
        raise DataError(f"the column {self.label!r} of {self.name} must hold whole numbers or names, found {label!r}.")

    def _column(self, features: Mapping[str, Any], option: str, column: str | None, kind: type) -> str:
        """The column of that name or, without one, of that type; for labels, strings or one called so will do."""
        if column is not None:
            if column not in features:
                raise DataError(
                    f"{self.name} has no column {column!r}: dataset.{option} must be one of {', '.join(features)}."
                )
            return column
        candidates = [name for name, feature in features.items() if isinstance(feature, kind)]
        if not candidates and option == "label":
            named = [name for name in ("label", "labels", "class") if name in features]
            texts = ("string", "large_string")
            candidates = named[:1] or [name for name in features if getattr(features[name], "dtype", "") in texts]
        if len(candidates) == 1:
            return candidates[0]
        raise DataError(
            f"{self.name} has {'several' if candidates else 'no'} {option} column{'s' if candidates else ''}: "
            f"say which one with dataset.{option}=…, of {', '.join(candidates or features)}."
        )


def is_huggingface(source: Any) -> bool:
    """Whether this is an object of the library `datasets`; it is not imported for that."""
    return any(kind.__module__.partition(".")[0] == "datasets" for kind in type(source).__mro__)


def load_huggingface(path: str, name: str | None, revision: str | None) -> Any:
    """The library's object, from a folder or from the Hub."""
    datasets, local = require(**_LIBRARY), Path(path).expanduser()
    if not local.is_dir() and path.startswith((".", "/", "~")):
        raise DataError(f"There is no folder {path}: check dataset.path.")
    try:
        if (local / "dataset_dict.json").is_file() or (local / "state.json").is_file():
            return datasets.load_from_disk(str(local))
        return datasets.load_dataset(str(local) if local.is_dir() else path, name, revision=revision)
    except Exception as error:  # the library, the Hub and the network raise errors of many kinds
        reason = str(error).strip().split("\n")[0].rstrip(".:") or type(error).__name__
        if local.is_dir():
            raise DataError(f"{path} cannot be read as a Hugging Face dataset ({reason}).") from error
        raise DownloadError(
            f"The dataset {path} could not be had from the Hugging Face Hub ({reason}): check its name or, without a "
            "network, load it elsewhere, save it with save_to_disk and pass that folder as dataset.path."
        ) from error


def _stored_bytes(image: Mapping[str, Any] | None) -> bytes:
    if image is None:
        raise ImageError("there is no image.")
    return bytes(image["bytes"]) if image["bytes"] is not None else Path(image["path"]).read_bytes()
