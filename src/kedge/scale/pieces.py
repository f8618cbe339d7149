"""The parts of a source that are read on their own: some files, a row group of Parquet, some samples of a shard."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kedge.gallery.pictures import Known, Read, is_text, read_content, read_file
from kedge.images import Preprocessing
from kedge.io import filesystem_of

__all__ = ["CHUNK", "FilePiece", "Item", "ParquetPiece", "Piece", "Sample", "TarPiece"]

CHUNK = 256
"""So many pictures are read, embedded and written as one."""


class Item(NamedTuple):
    """One picture: a file or what it holds; None where there is none."""

    path: str
    content: Path | bytes | None
    label: str | None
    metadata: Mapping[str, Any]

    def read(self, known: Known | None, preprocessing: Preprocessing, thumbnails: int) -> Read:
        """As the encoder wants it."""
        if isinstance(self.content, Path):
            return read_file(self.content, known, preprocessing, thumbnails)
        if not is_text(self.path):
            return Read(reason="Its name is not valid UTF-8: rename it.")
        if self.content is None:
            return Read(reason="There is no picture in this row.")
        return read_content(self.content, known, preprocessing, thumbnails)


@dataclass(frozen=True)
class Piece(ABC):
    """Pictures `first` … `first + len(paths)` of the listing."""

    first: int
    paths: list[str]

    @abstractmethod
    def items(self) -> Iterator[Item]:
        """Its pictures, in order."""

    def chunks(self) -> Iterator[tuple[int, list[Item]]]:
        """The same, some at a time, each time with the number of the first."""
        some: list[Item] = []
        for number, item in enumerate(self.items(), start=self.first):
            some.append(item)
            if len(some) == CHUNK:
                yield number + 1 - CHUNK, some
                some = []
        if some:
            yield self.first + len(self.paths) - len(some), some


@dataclass(frozen=True)
class FilePiece(Piece):
    """Files that every worker can open."""

    labels: list[str | None]

    def items(self) -> Iterator[Item]:
        """Files are opened where they are read."""
        for path, label in zip(self.paths, self.labels, strict=True):
            yield Item(path, Path(path), label, {})


@dataclass(frozen=True)
class ParquetPiece(Piece):
    """One row group: its columns are `image` or `path`, perhaps `label`; what else there is, is metadata."""

    file: str
    group: int
    columns: list[str]

    def items(self) -> Iterator[Item]:
        """Read a few rows at a time, however large the group is."""
        import pyarrow.parquet as pq

        system, path = filesystem_of(self.file)
        paths = iter(self.paths)
        with system.open_input_file(path) as stream:
            for batch in pq.ParquetFile(stream).iter_batches(CHUNK, row_groups=[self.group], columns=self.columns):
                for row in batch.to_pylist():
                    yield _item(next(paths), row)


def _item(path: str, row: dict[str, Any]) -> Item:
    row.pop("path", None)
    label = row.pop("label", None)
    content = row.pop("image") if "image" in row else Path(path)
    if isinstance(content, dict):  # as the datasets of Hugging Face have it
        content = content.get("bytes")
    return Item(path, content, None if label is None else str(label), row)


class Sample(NamedTuple):
    """Where a shard holds a picture, and its label: the place of the first byte and how many there are."""

    picture: tuple[int, int]
    label: tuple[int, int] | None = None
    kind: str = ""


@dataclass(frozen=True)
class TarPiece(Piece):
    """Samples of a WebDataset shard."""

    file: str
    samples: list[Sample]

    def items(self) -> Iterator[Item]:
        """Each is read from its place, wherever in the shard that is."""
        system, path = filesystem_of(self.file)
        with system.open_input_file(path) as stream:
            for name, sample in zip(self.paths, self.samples, strict=True):
                label = None
                if sample.label is not None:
                    label = _label(stream.read_at(sample.label[1], sample.label[0]), sample.kind)
                yield Item(name, stream.read_at(sample.picture[1], sample.picture[0]), label, {})


def _label(content: bytes, kind: str) -> str | None:
    text = content.decode("utf-8", "replace").strip()
    if kind == ".json":
        try:
            found = json.loads(text)
        except ValueError:
            return None
        found = found.get("label") if isinstance(found, dict) else found
        return None if found is None else str(found)
    return text or None
