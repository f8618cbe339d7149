"""Datasets of Hugging Face: by name or folder, or as an object of its library `datasets`."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from PIL import Image

from kedge.datasets.sources import Label, Source
from kedge.deps import require
from kedge.errors import DataError, DownloadError, ImageError
from kedge.images import read_image

__all__ = ["HuggingFaceSource", "is_huggingface", "load_huggingface", "splits_of"]

_TESTS = ("test", "validation", "val", "valid")


class HuggingFaceSource(Source):
    """One split: the files' bytes as they are stored, decoded by Kedge."""

    def __init__(self, dataset: Any, image: str | None = None, label: str | None = None, called: str = "") -> None:
        datasets = _library()
        self.name = called or str(getattr(dataset.info, "dataset_name", None) or "huggingface")
        if not isinstance(dataset, datasets.Dataset):
            found = type(dataset).__name__
            raise DataError(f"{self.name} is a {found}: load it without streaming, so that pictures have numbers.")
        features = dataset.features
        self.image = image or self._only(features, ("Image",), "image")
        self.label = label or self._only(features, ("ClassLabel",), "label")
        for column, option in ((self.image, "image"), (self.label, "label")):
            if column not in features:
                known = _names(features)
                raise DataError(f"{self.name} has no column {column!r}: dataset.{option} must be one of {known}.")
        kind = features[self.label]
        self.classes = tuple(kind.names) if isinstance(kind, datasets.ClassLabel) else None
        if not isinstance(features[self.image], datasets.Image):
            raise DataError(f"the column {self.image!r} of {self.name} holds {features[self.image]}, not pictures.")
        rows = dataset.with_format(None).select_columns([self.image, self.label])
        self._rows = rows.cast_column(self.image, datasets.Image(decode=False))
        self._fingerprint = dataset._fingerprint
        self._alone = threading.Lock()

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, row: int) -> tuple[Image.Image, Label]:
        """A picture and its label."""
        found = self._row(row)
        try:
            picture = read_image(self._content(found[self.image]))
        except (OSError, ImageError) as error:
            reason = str(error).removeprefix("The image cannot be read: ")
            raise ImageError(f"row {row} of {self.name} cannot be read: {reason}") from error
        return picture, self._known(found[self.label])

    def labels(self) -> list[Label]:
        """The column of labels."""
        return [self._known(label) for label in self._rows[self.label]]

    def content(self, row: int) -> bytes:
        """The stored file."""
        return self._content(self._row(row)[self.image])

    def path(self, row: int) -> str | None:
        """The file, where the dataset only refers to it."""
        if not self._refers:
            return None
        found = self._row(row)[self.image]
        here = found and found["bytes"] is None and found["path"] and Path(found["path"]).is_file()
        return str(Path(found["path"]).absolute()) if here else None

    @property
    def identity(self) -> Any:
        """The library's own fingerprint and, of files that are only referred to, their sizes and times."""
        chunks = self._rows.data.column(self.image).chunks  # the bytes themselves are not looked at
        paths = [chunk.field("path").filter(chunk.field("bytes").is_null()) for chunk in chunks]
        outside = [_state(Path(path)) for some in paths for path in some.drop_null().to_pylist()]
        return [self._fingerprint, self.image, self.label, outside]

    @cached_property
    def _refers(self) -> bool:
        """Whether some pictures are not in the dataset itself."""
        return any(chunk.field("bytes").null_count for chunk in self._rows.data.column(self.image).chunks)

    def _row(self, row: int) -> Mapping[str, Any]:
        with self._alone:
            found: Mapping[str, Any] = self._rows[row]
        return found

    def _content(self, picture: Mapping[str, Any] | None) -> bytes:
        if picture is None:
            raise ImageError("there is no picture.")
        content = picture["bytes"]
        return bytes(content) if content is not None else Path(picture["path"]).read_bytes()

    def _known(self, label: Any) -> Label:
        if label is None or (self.classes is not None and label == -1):  # the Hub's way to hide test labels
            return None
        if isinstance(label, (int, str)) and not isinstance(label, bool):
            return label
        raise DataError(f"the column {self.label!r} of {self.name} must hold whole numbers or names, found {label!r}.")

    def _only(self, features: Mapping[str, Any], kinds: tuple[str, ...], option: str) -> str:
        """The column of the wanted type; for labels, strings or one called so will do."""
        found = [name for name, kind in features.items() if type(kind).__name__ in kinds]
        if not found and option == "label":
            named = [name for name in ("label", "labels", "class") if name in features]
            texts = ("string", "large_string")
            found = named[:1] or [name for name, kind in features.items() if getattr(kind, "dtype", "") in texts]
        if len(found) == 1:
            return found[0]
        what = f"several {option} columns" if found else f"no {option} column"
        raise DataError(
            f"{self.name} has {what}: say which one with dataset.{option}=…, of {_names(found or features)}."
        )


def is_huggingface(source: Any) -> bool:
    """Whether this is an object of the library `datasets`; it is not imported for that."""
    return any(kind.__module__.partition(".")[0] == "datasets" for kind in type(source).__mro__)


def splits_of(
    source: Any, image: str | None = None, label: str | None = None, called: str = ""
) -> tuple[HuggingFaceSource, HuggingFaceSource | None]:
    """The pictures to train on and, if there is a split of them with labels, those to test on."""
    if not isinstance(source, Mapping):
        return HuggingFaceSource(source, image, label, called), None
    splits = {str(name): split for name, split in source.items()}
    if "train" not in splits and len(splits) > 1:
        raise DataError(f"{called or 'the dataset'} has the splits {_names(splits)}: one must be called train.")
    name = "train" if "train" in splits else next(iter(splits))
    train = HuggingFaceSource(splits[name], image, label, called)
    for name in _TESTS:
        if name in splits:
            test = HuggingFaceSource(splits[name], train.image, train.label, train.name)
            if any(known is not None for known in test.labels()):
                return train, test
    return train, None


def load_huggingface(path: str, name: str | None, revision: str | None) -> Any:
    """The library's object, from a folder or from the Hub."""
    datasets, local = _library(), Path(path).expanduser()
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


def _library() -> ModuleType:
    return require("datasets", extra="huggingface", purpose="A Hugging Face dataset")


def _state(file: Path) -> list[Any]:
    try:
        status = file.stat()
    except OSError:
        return [str(file)]
    return [str(file), status.st_size, status.st_mtime_ns]


def _names(values: Any) -> str:
    return ", ".join(map(str, values))
