"""What to index with Ray, in a fixed order: a folder, paths, Parquet files or WebDataset shards, cut into shards."""

from __future__ import annotations

import json
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.fs import FileSelector, FileType

from kedge.errors import ConfigError, DataError
from kedge.gallery.ingest import list_with_labels
from kedge.gallery.schema import COLUMNS
from kedge.images import EXTENSIONS, prefetch
from kedge.io import filesystem_of, is_url

__all__ = ["CHUNK", "READERS", "FileShard", "Item", "Listing", "Shard", "list_source"]

CHUNK = 256
"""Images that are read, embedded and written as one."""
_LABELS = (".cls", ".txt", ".json")
_OWN_COLUMNS = ("image", "path", "label")
READERS = 16
"""Small files that are read at a time."""


class Item(NamedTuple):
    """One image: a file or its content; None where there is none."""

    path: str
    content: Path | bytes | None
    label: str | None
    metadata: Mapping[str, Any]

    def __str__(self) -> str:
        return self.path

    def read_bytes(self) -> bytes:
        """The content of the image; an OSError where it cannot be read."""
        if self.content is None:
            raise OSError("There is no image in this row.")
        return self.content if isinstance(self.content, bytes) else self.content.read_bytes()


@dataclass(frozen=True)
class Shard(ABC):
    """Images `first` … `first + len(paths)` of the listing, which one worker reads."""

    first: int
    paths: list[str]

    @abstractmethod
    def items(self) -> Iterator[Item]:
        """Its images, in order."""

    @property
    def starts(self) -> range:
        """The first image of each of its chunks."""
        return range(self.first, self.first + len(self.paths), CHUNK)

    def chunks(self) -> Iterator[tuple[int, list[Item]]]:
        """Its images in chunks, each with the number of its first image."""
        items = self.items()
        for start in self.starts:
            yield start, list(islice(items, CHUNK))


@dataclass(frozen=True)
class Listing:
    """All images of a source, in order, as shards."""

    shards: Sequence[Shard]
    metadata: dict[str, pa.DataType] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(len(shard.paths) for shard in self.shards)


def list_source(source: str | Path | Sequence[str | Path]) -> Listing:
    """The images of a source."""
    if not isinstance(source, (str, Path)):
        return _list_images(source)
    is_local = not is_url(str(source))
    name = str(Path(source).expanduser()) if is_local else str(source)
    suffix = PurePosixPath(name).suffix.lower()
    system, path = filesystem_of(name)
    kind = system.get_file_info(path).type
    if kind == FileType.NotFound:
        raise DataError(f"{name} does not exist; pass a folder of images, or files that name or hold them.")
    if kind == FileType.File and suffix in (".txt", ".lst"):
        lines = Path(name).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        return _list_images([line.strip() for line in lines if line.strip()])
    is_folder = kind == FileType.Directory
    listing = _list_images(name) if is_local and (is_folder or suffix in EXTENSIONS) else Listing([])
    if len(listing):  # a folder of images may hold other files, too
        return listing
    files = [name]
    if is_folder:
        root = path if is_local else name.rstrip("/")
        inside = system.get_file_info(FileSelector(path))
        files = sorted(f"{root}/{file.base_name}" for file in inside if file.type == FileType.File)
    for ending, list_shards in ((".parquet", _list_parquet), (".tar", _list_tar)):
        if matching := [file for file in files if file.lower().endswith(ending)]:
            return list_shards(matching)
    if is_local and is_folder:
        return listing
    raise DataError(
        f"{name} cannot be indexed; pass a folder of images, a .txt file with their paths, "
        "Parquet files or .tar shards."
    )


# ---------------------------------------------------------------------- files


@dataclass(frozen=True)
class FileShard(Shard):
    """Files that every worker can open, or images of a WebDataset shard with their places in it."""

    labels: list[str | None]
    tar: str = ""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """Offset and size in bytes of each image in `tar`."""

    def items(self) -> Iterator[Item]:
        """Files are opened where they are decoded; images of a tar file are read from their offsets."""
        if not self.tar:
            yield from (Item(path, Path(path), label, {}) for path, label in zip(self.paths, self.labels, strict=True))
            return
        system, path = filesystem_of(self.tar)
        with system.open_input_file(path) as stream:
            for name, label, (offset, size) in zip(self.paths, self.labels, self.spans, strict=True):
                yield Item(name, stream.read_at(size, offset), label, {})


def _list_images(source: str | Sequence[str | Path]) -> Listing:
    files, labels = list_with_labels(source)
    paths = list(map(str, files))
    slices = [slice(first, first + CHUNK) for first in range(0, len(paths), CHUNK)]
    return Listing([FileShard(part.start, paths[part], labels[part]) for part in slices])


# ---------------------------------------------------------------------- Parquet


@dataclass(frozen=True)
class ParquetShard(Shard):
    """One row group: its columns are `image` or `path`, perhaps `label`; all others are metadata."""

    file: str
    group: int
    columns: list[str]

    def items(self) -> Iterator[Item]:
        """Read a few rows at a time, however large the group is."""
        system, path = filesystem_of(self.file)
        paths = iter(self.paths)
        with system.open_input_file(path) as stream:
            for batch in pq.ParquetFile(stream).iter_batches(CHUNK, row_groups=[self.group], columns=self.columns):
                for row in batch.to_pylist():
                    name, label = next(paths), row.pop("label", None)
                    content = row.pop("image", Path(name))
                    if isinstance(content, dict):  # as the datasets of Hugging Face have it
                        content = content.get("bytes")
                    row.pop("path", None)
                    yield Item(name, content, None if label is None else str(label), row)


def _list_parquet(files: Sequence[str]) -> Listing:
    listing = Listing(shards := list[Shard]())
    first = 0
    for file, (schema, groups, paths) in zip(files, prefetch(_read_footer, files, workers=READERS), strict=True):
        for column in schema:
            if column.name in _OWN_COLUMNS:
                continue
            if column.name in COLUMNS:
                raise ConfigError(f"{file} has a column {column.name!r}, which galleries have themselves; rename it.")
            if (kind := listing.metadata.setdefault(column.name, column.type)) != column.type:
                raise DataError(f"{file} has {column.name} as {column.type}, another file as {kind}; use one type.")
        remaining = iter(paths)
        for group, count in enumerate(groups):
            shards.append(ParquetShard(first, list(islice(remaining, count)), file, group, list(schema.names)))
            first += count
    return listing


def _read_footer(file: str) -> tuple[pa.Schema, list[int], list[str]]:
    """The columns, the rows of each group and the names of all images of a Parquet file."""
    system, path = filesystem_of(file)
    try:
        with system.open_input_file(path) as stream:
            opened = pq.ParquetFile(stream)
            groups = [opened.metadata.row_group(group).num_rows for group in range(opened.num_row_groups)]
            schema = opened.schema_arrow
            paths: list[str | None] = [None] * sum(groups)
            if "path" in schema.names:
                paths = opened.read(columns=["path"]).column("path").to_pylist()
    except pa.ArrowInvalid as error:
        raise DataError(f"{file} is not a Parquet file, or is damaged.") from error
    has_images = "image" in schema.names
    if not has_images and "path" not in schema.names:
        raise DataError(f"{file} has no column image or path, found {', '.join(schema.names)}.")
    names = [
        f"{file}#{row}" if path is None else path if has_images else str(Path(path).absolute())
        for row, path in enumerate(paths)
    ]
    return schema, groups, names


# ---------------------------------------------------------------------- WebDataset


def _list_tar(files: Sequence[str]) -> Listing:
    shards: list[Shard] = []
    first = 0
    for file, samples in zip(files, prefetch(_read_samples, files, workers=READERS), strict=True):
        for start in range(0, len(samples), CHUNK):
            paths, labels, spans = map(list, zip(*samples[start : start + CHUNK], strict=True))
            shards.append(FileShard(first, paths, labels, file, spans))
            first += len(paths)
    return Listing(shards)


def _read_samples(file: str) -> list[tuple[str, str | None, tuple[int, int]]]:
    """Name, label and place of the images of a tar file: members with one name up to its first dot belong together."""
    members: dict[str, dict[str, tarfile.TarInfo]] = {}
    samples = []
    system, path = filesystem_of(file)
    with system.open_input_file(path) as stream:
        try:
            with tarfile.open(fileobj=stream, mode="r:") as archive:
                for member in archive:
                    folder, _, name = member.name.rpartition("/")
                    stem, dot, suffix = name.partition(".")
                    if member.isfile() and dot and stem:
                        members.setdefault(f"{folder}/{stem}", {}).setdefault(f".{suffix}".lower(), member)
        except tarfile.TarError as error:
            raise DataError(f"{file} is not a .tar shard, or is damaged.") from error
        for by_suffix in members.values():
            labels = (
                _parse_label(stream.read_at(by_suffix[suffix].size, by_suffix[suffix].offset_data), suffix)
                for suffix in _LABELS
                if suffix in by_suffix
            )
            for image in [member for suffix, member in by_suffix.items() if suffix in EXTENSIONS][:1]:
                samples.append((f"{file}#{image.name}", next(labels, None), (image.offset_data, image.size)))
    return samples


def _parse_label(content: bytes, suffix: str) -> str | None:
    text = content.decode("utf-8", "replace").strip()
    if suffix != ".json":
        return text or None
    try:
        label = json.loads(text)
    except ValueError:
        return None
    label = label.get("label") if isinstance(label, dict) else label
    return None if label is None else str(label)
