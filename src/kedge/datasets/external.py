"""Datasets that people have already, PyTorch's or Hugging Face's: images and labels by number, and Kedge's of them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, Subset

from kedge.datasets.base import Dataset, Label, Source
from kedge.datasets.cache import keep, stored
from kedge.datasets.digests import file_state
from kedge.deps import require
from kedge.errors import DataError, DownloadError, ImageError
from kedge.images import read_image, to_rgb, upright

__all__ = ["HuggingFaceSource", "as_dataset", "huggingface", "is_external", "sources_of", "train_and_test"]

_TEST_SPLITS = ("test", "validation", "val", "valid")
_LIBRARY = {"module": "datasets", "extra": "huggingface", "purpose": "A Hugging Face dataset"}


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
    path = keep(*train_and_test(source, image, label), size=size, most=most)
    dataset = stored(path, test_fraction=test_fraction, seed=seed, flip=flip)
    return dataset if classes is None else _reorder_classes(dataset, classes)


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
    source = _load_huggingface(str(path), name, revision)
    array = keep(*train_and_test(source, image, label, Path(path).name), size=size)
    return stored(array, test_fraction=test_fraction, seed=seed, flip=flip)


def is_external(source: Any) -> bool:
    """Whether this is a dataset of PyTorch or Hugging Face, or splits of one."""
    if isinstance(source, Mapping):
        return bool(source) and all(is_external(split) for split in source.values())
    return isinstance(source, TorchDataset) or _is_huggingface(source)


def sources_of(source: Any, image: str | None = None, label: str | None = None, name: str = "") -> list[Source]:
    """All the images, split by split."""
    splits = source.values() if isinstance(source, Mapping) else [source]
    return [
        HuggingFaceSource(split, image, label, name) if _is_huggingface(split) else TorchSource(split)
        for split in splits
    ]


def train_and_test(
    source: Any, image: str | None = None, label: str | None = None, name: str = ""
) -> tuple[Source, Source | None]:
    """The images to train on and, if there is a split of them with labels, those to test on."""
    mapping = source if isinstance(source, Mapping) else {"train": source}
    splits = {str(split): images for split, images in mapping.items()}
    if _is_huggingface(source) and len(splits) == 1:
        splits = {"train": next(iter(splits.values()))}
    # Others' dictionaries may have splits for other purposes; in one that was written for us, another name is a slip.
    unknown = not _is_huggingface(source) and splits.keys() - {"train", *_TEST_SPLITS}
    if "train" not in splits or unknown:
        raise DataError(f"Splits must be named train and optionally test or validation, found {', '.join(splits)}.")
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
        raise DataError(f"{dataset.name} has a class {unknown[0]!r}, which is not one of the {len(classes)} expected.")
    numbers = np.array([number_of.get(name, -1) for name in dataset.classes], dtype=np.int64)
    train, test = (replace(split, labels=numbers[split.labels]) for split in (dataset.train, dataset.test))
    return replace(dataset, classes=classes, train=train, test=test)


class TorchSource(Source):
    """A dataset that gives (PIL image, or uint8 tensor or array; whole number or name), such as torchvision's."""

    def __init__(self, dataset: Any) -> None:
        inner = dataset
        while isinstance(inner, Subset):
            inner = inner.dataset
        self.name = type(inner).__name__
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise DataError(f"{self.name} has no access by index; pass a map-style dataset.")
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
            if not isinstance(item, (tuple, list)) or len(item) < 2:
                raise DataError(f"{self.item(row)} must be an image and its label, found a {type(item).__name__}.")
            return to_rgb(upright(self._to_pil(item[0], row))), self.check_label(item[1], row)
        except DataError:
            raise
        except (OSError, SyntaxError, ValueError) as error:  # what Pillow makes of a damaged file
            raise ImageError(f"{self.item(row)} cannot be read: {error}") from error
        except Exception as error:
            raise DataError(f"{self.item(row)} could not be loaded ({type(error).__name__}: {error}).") from error

    def labels(self) -> list[Label]:
        """All labels: as torchvision's datasets tell them (``targets``), else with a look at every item."""
        targets: Any = getattr(self.dataset, "targets", None)
        is_plain = hasattr(targets, "__len__") and getattr(self.dataset, "target_transform", None) is None
        if is_plain and len(targets) == len(self):
            return [self.check_label(label, row) for row, label in enumerate(targets)]
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
        found = f"a {type(image).__name__}"
        if isinstance(image, (Tensor, np.ndarray)):
            found = f"{' x '.join(map(str, image.shape))} of {str(image.dtype).removeprefix('torch.')}"
            if image.dtype in (torch.uint8, np.uint8) and 0 not in image.shape:
                from torchvision.transforms.functional import to_pil_image  # takes a second, which few need

                with suppress(TypeError, ValueError):
                    pil: Image.Image = to_pil_image(image)
                    return pil
        raise DataError(
            f"{self.item(row)} must begin with a PIL image or with uint8 pixels (a tensor of 3 x H x W, an array of "
            f"H x W x 3, or H x W), found {found}: leave ToTensor and Normalize out of the dataset's transform, since "
            "Kedge prepares images itself."
        )


class HuggingFaceSource(Source):
    """One split of Hugging Face's: the files' bytes as they are stored, decoded by Kedge."""

    def __init__(self, dataset: Any, image: str | None = None, label: str | None = None, name: str = "") -> None:
        datasets = require(**_LIBRARY)
        self.name = name or str(getattr(dataset.info, "dataset_name", None) or "huggingface")
        if not isinstance(dataset, datasets.Dataset):
            kind = type(dataset).__name__
            raise DataError(f"{self.name} is a {kind}; load it without streaming.")
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
            raise ImageError(f"{self.item(row)} cannot be read: {reason}") from error
        return image, self.check_label(values[self.label], row)

    def labels(self) -> list[Label]:
        """The column of labels."""
        return [self.check_label(label, row) for row, label in enumerate(self._rows[self.label])]

    def check_label(self, label: Any, row: int) -> Label:
        """A label; of named classes, -1 is the Hub's way to hide the labels of a test split."""
        return None if self.classes is not None and label == -1 else super().check_label(label, row)

    def content(self, row: int) -> bytes:
        """The stored file."""
        return _stored_bytes(self._row(row)[self.image])

    def path(self, row: int) -> str | None:
        """The file, where the dataset only refers to it."""
        if not self._references:  # else the bytes of every image would be read
            return None
        image = self._row(row)[self.image]
        is_file = image and image["bytes"] is None and image["path"] and Path(image["path"]).is_file()
        return str(Path(image["path"]).absolute()) if is_file else None

    @property
    def identity(self) -> Any:
        """The library's own fingerprint and, of files that are only referred to, their sizes and times."""
        states = [[path, *file_state(path)] for path in self._references]
        return [self._fingerprint, self.image, self.label, states]

    @cached_property
    def _references(self) -> list[str]:
        """Files of images that are not in the dataset itself."""
        chunks = self._rows.data.column(self.image).chunks  # the bytes themselves are not read
        missing = [chunk.field("path").filter(chunk.field("bytes").is_null()) for chunk in chunks]
        return [path for chunk in missing for path in chunk.drop_null().to_pylist()]

    def _row(self, row: int) -> Mapping[str, Any]:
        with self._lock:
            values: Mapping[str, Any] = self._rows[row]
        return values

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
            f"choose one with dataset.{option}=…, of {', '.join(candidates or features)}."
        )


def _is_huggingface(source: Any) -> bool:
    """Whether this is an object of the library `datasets`; it is not imported for that."""
    return any(kind.__module__.partition(".")[0] == "datasets" for kind in type(source).__mro__)


def _load_huggingface(path: str, name: str | None, revision: str | None) -> Any:
    """The library's object, from a folder or from the Hub."""
    datasets, local = require(**_LIBRARY), Path(path).expanduser()
    if not local.is_dir() and path.startswith((".", "/", "~")):
        raise DataError(f"Folder {path} does not exist; check dataset.path.")
    try:
        if (local / "dataset_dict.json").is_file() or (local / "state.json").is_file():
            return datasets.load_from_disk(str(local))
        return datasets.load_dataset(str(local) if local.is_dir() else path, name, revision=revision)
    except Exception as error:  # the library, the Hub and the network raise errors of many kinds
        reason = str(error).strip().split("\n")[0].rstrip(".:") or type(error).__name__
        if local.is_dir():
            raise DataError(f"{path} cannot be read as a Hugging Face dataset ({reason}).") from error
        raise DownloadError(
            f"The dataset {path} could not be loaded from the Hugging Face Hub ({reason}): check its name or, without "
            "a network, load it elsewhere, save it with save_to_disk and pass that folder as dataset.path."
        ) from error


def _stored_bytes(image: Mapping[str, Any] | None) -> bytes:
    if image is None:
        raise ImageError("there is no image.")
    return bytes(image["bytes"]) if image["bytes"] is not None else Path(image["path"]).read_bytes()
