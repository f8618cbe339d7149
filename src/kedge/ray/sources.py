"""What to index with Ray, in a fixed order: a folder, paths, Parquet files or WebDataset shards, cut into shards."""

from __future__ import annotations

import json
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.fs import FileSelector, FileType

from kedge.errors import ConfigError, DataError
from kedge.gallery.ingest import NOT_TEXT, Decoded, ExistingItem, decode, decode_file, is_text, list_images
from kedge.gallery.schema import COLUMNS
from kedge.images import EXTENSIONS, Preprocessing
from kedge.io import filesystem_of, is_url

__all__ = ["CHUNK", "FileShard", "Item", "Listing", "ParquetShard", "Shard", "TarShard", "list_source"]

T = TypeVar("T")
CHUNK = 256
"""Images that are read, embedded and written as one."""
_LABELS = (".cls", ".txt", ".json")
_OWN_COLUMNS = ("image", "path", "label")
_READERS = 16
"""Files whose metadata is read at a time."""


class Item(NamedTuple):
    """One image: a file or its content; None where there is none."""

    path: str
    content: Path | bytes | None
    label: str | None
    metadata: Mapping[str, Any]

    def decode(self, existing: ExistingItem | None, preprocessing: Preprocessing, thumbnails: int) -> Decoded:
        """Decode it for the encoder."""
        if isinstance(self.content, Path):
            return decode_file(self.content, existing, preprocessing, thumbnails)
        if not is_text(self.path):
            return Decoded(reason=NOT_TEXT)
        if self.content is None:
            return Decoded(reason="There is no image in this row.")
        return decode(self.content, existing, preprocessing, thumbnails)


@dataclass(frozen=True)
class Shard(ABC):
    """Images `first` … `first + len(paths)` of the listing, which one worker reads."""

    first: int
    paths: list[str]

    @abstractmethod
    def items(self) -> Iterator[Item]:
        """Its images, in order."""

    def chunks(self) -> Iterator[tuple[int, list[Item]]]:
        """The same in chunks, each with the number of its first image."""
        chunk: list[Item] = []
        for number, item in enumerate(self.items(), start=self.first):
            chunk.append(item)
            if len(chunk) == CHUNK:
                yield number + 1 - CHUNK, chunk
                chunk = []
        if chunk:
            yield self.first + len(self.paths) - len(chunk), chunk


@dataclass(frozen=True)
class Listing:
    """All images of a source, in order, as shards."""

    shards: list[Shard]
    metadata: dict[str, pa.DataType] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(len(shard.paths) for shard in self.shards)


def list_source(source: str | Path | Sequence[str | Path]) -> Listing:
    """The images of a source."""
    if not isinstance(source, (str, Path)):
        return Listing(_file_shards(source))
    name = str(source) if is_url(str(source)) else str(Path(source).expanduser())
    files = _list_files(name)
    if isinstance(files, Path):
        return Listing(_file_shards(files))
    if PurePosixPath(name).suffix.lower() in (".txt", ".lst"):
        lines = Path(name).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        return Listing(_file_shards([line.strip() for line in lines if line.strip()]))
    for suffix, list_shards in ((".parquet", _list_parquet), (".tar", _list_tar)):
        if matching := [file for file in files if file.lower().endswith(suffix)]:
            return list_shards(matching)
    raise DataError(
        f"{name} is nothing that can be indexed: give a folder of images, a .txt file with their paths, "
        "Parquet files or .tar shards."
    )


def _list_files(name: str) -> Path | list[str]:
    """A local folder or image, or else the files at this place."""
    system, path = filesystem_of(name)
    info = system.get_file_info(path)
    if info.type == FileType.NotFound:
        raise DataError(f"{name} is not there: give a folder of images, or files that name or hold them.")
    if info.type == FileType.File:
        local = not is_url(name)
        return Path(name) if local and Path(name).suffix.lower() in EXTENSIONS else [name]
    inside = [file.path for file in system.get_file_info(FileSelector(path)) if file.type == FileType.File]
    if is_url(name):
        return sorted(f"{name.rstrip('/')}/{PurePosixPath(file).name}" for file in inside)
    shards = sorted(file for file in inside if file.lower().endswith((".parquet", ".tar")))
    return shards if shards and not list_images(name)[0] else Path(name)


def _map_files(read: Callable[[str], T], files: Sequence[str]) -> list[T]:
    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(read, files))


# ---------------------------------------------------------------------- files


@dataclass(frozen=True)
class FileShard(Shard):
    """Files that every worker can open."""

    labels: list[str | None]

    def items(self) -> Iterator[Item]:
        """Files are opened where they are decoded."""
        for path, label in zip(self.paths, self.labels, strict=True):
            yield Item(path, Path(path), label, {})


def _file_shards(source: str | Path | Sequence[str | Path]) -> list[Shard]:
    files, labels = list_images(source)
    paths = list(map(str, files))
    slices = [slice(first, first + CHUNK) for first in range(0, len(paths), CHUNK)]
    return [FileShard(part.start, paths[part], labels[part]) for part in slices]


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
                    yield _parquet_item(next(paths), row)


def _parquet_item(path: str, row: dict[str, Any]) -> Item:
    row.pop("path", None)
    label = row.pop("label", None)
    content = row.pop("image") if "image" in row else Path(path)
    if isinstance(content, dict):  # as the datasets of Hugging Face have it
        content = content.get("bytes")
    return Item(path, content, None if label is None else str(label), row)


def _list_parquet(files: Sequence[str]) -> Listing:
    shards: list[Shard] = []
    metadata: dict[str, pa.DataType] = {}
    first = 0
    for file, (schema, groups, paths) in zip(files, _map_files(_read_footer, files), strict=True):
        _check_columns(file, schema, metadata)
        names = paths if paths is not None else [f"{file}#{row}" for row in range(sum(groups))]
        start = 0
        for group, count in enumerate(groups):
            shards.append(ParquetShard(first, names[start : start + count], file, group, list(schema.names)))
            first, start = first + count, start + count
    return Listing(shards, metadata)


def _read_footer(file: str) -> tuple[pa.Schema, list[int], list[str] | None]:
    """Columns, rows of each group and, if they have any, the paths of a Parquet file."""
    system, path = filesystem_of(file)
    try:
        with system.open_input_file(path) as stream:
            opened = pq.ParquetFile(stream)
            groups = [opened.metadata.row_group(group).num_rows for group in range(opened.num_row_groups)]
            schema = opened.schema_arrow
            has_paths = "path" in schema.names
            paths = opened.read(columns=["path"]).column("path").to_pylist() if has_paths else None
    except pa.ArrowInvalid as error:
        raise DataError(f"{file} is no Parquet file, or damaged.") from error
    if paths is not None:
        has_images = "image" in schema.names
        paths = [
            f"{file}#{row}" if path is None else path if has_images else str(Path(path).absolute())
            for row, path in enumerate(paths)
        ]
    return schema, groups, paths


def _check_columns(file: str, schema: pa.Schema, metadata: dict[str, pa.DataType]) -> None:
    if "image" not in schema.names and "path" not in schema.names:
        raise DataError(f"{file} has neither a column image nor path, found {', '.join(schema.names)}.")
    for column in schema:
        if column.name in _OWN_COLUMNS:
            continue
        if column.name in COLUMNS:
            raise ConfigError(f"{file} has a column {column.name!r}, which the gallery has itself: rename it.")
        if metadata.setdefault(column.name, column.type) != column.type:
            raise DataError(
                f"{file} has {column.name} as {column.type}, another file as {metadata[column.name]}: make them one."
            )


# ---------------------------------------------------------------------- WebDataset


class Sample(NamedTuple):
    """Where a tar file holds an image and its label: offset and size in bytes."""

    image: tuple[int, int]
    label: tuple[int, int] | None = None
    suffix: str = ""


@dataclass(frozen=True)
class TarShard(Shard):
    """Samples of a WebDataset shard."""

    file: str
    samples: list[Sample]

    def items(self) -> Iterator[Item]:
        """Each is read from its offset."""
        system, path = filesystem_of(self.file)
        with system.open_input_file(path) as stream:
            for name, sample in zip(self.paths, self.samples, strict=True):
                label = None
                if sample.label is not None:
                    label = _parse_label(stream.read_at(sample.label[1], sample.label[0]), sample.suffix)
                yield Item(name, stream.read_at(sample.image[1], sample.image[0]), label, {})


def _parse_label(content: bytes, suffix: str) -> str | None:
    text = content.decode("utf-8", "replace").strip()
    if suffix == ".json":
        try:
            label = json.loads(text)
        except ValueError:
            return None
        label = label.get("label") if isinstance(label, dict) else label
        return None if label is None else str(label)
    return text or None


def _list_tar(files: Sequence[str]) -> Listing:
    shards: list[Shard] = []
    first = 0
    for file, samples in zip(files, _map_files(_read_samples, files), strict=True):
        for start in range(0, len(samples), CHUNK):
            names, offsets = zip(*samples[start : start + CHUNK], strict=True)
            shards.append(TarShard(first, [f"{file}#{name}" for name in names], file, list(offsets)))
            first += len(names)
    return Listing(shards)


def _read_samples(file: str) -> list[tuple[str, Sample]]:
    """The images of a tar file: members that share a name up to its first dot belong together."""
    members: dict[str, dict[str, tarfile.TarInfo]] = {}
    for member in _read_members(file):
        path = PurePosixPath(member.name)
        stem, dot, suffix = path.name.partition(".")
        if member.isfile() and dot and stem:
            members.setdefault(str(path.with_name(stem)), {}).setdefault(f".{suffix}".lower(), member)
    samples = []
    for by_suffix in members.values():
        image = next((member for suffix, member in by_suffix.items() if suffix in EXTENSIONS), None)
        if image is None:
            continue
        suffix = next((suffix for suffix in _LABELS if suffix in by_suffix), "")
        label = (by_suffix[suffix].offset_data, by_suffix[suffix].size) if suffix else None
        samples.append((image.name, Sample((image.offset_data, image.size), label, suffix)))
    return samples


def _read_members(file: str) -> Iterator[tarfile.TarInfo]:
    system, path = filesystem_of(file)
    with system.open_input_file(path) as stream:
        try:
            with tarfile.open(fileobj=stream, mode="r:") as archive:
                yield from archive
        except tarfile.TarError as error:
            raise DataError(f"{file} is no .tar shard, or damaged.") from error
