"""What there is to index, in an order that stays: a folder, paths, Parquet files or WebDataset shards."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.fs import FileSelector, FileType

from kedge.errors import ConfigError, DataError
from kedge.gallery.pictures import listed
from kedge.gallery.record import COLUMNS
from kedge.images import EXTENSIONS
from kedge.io import filesystem_of, is_url
from kedge.scale.pieces import CHUNK, FilePiece, ParquetPiece, Piece, Sample, TarPiece

__all__ = ["Listing", "list_source"]

T = TypeVar("T")
_LABELS = (".cls", ".txt", ".json")
_OWN = ("image", "path", "label")
_READERS = 16
"""So many files are asked at a time what they hold."""


@dataclass(frozen=True)
class Listing:
    """All pictures of a source, in order, as pieces."""

    pieces: list[Piece]
    metadata: dict[str, pa.DataType] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(len(piece.paths) for piece in self.pieces)


def list_source(source: str | Path | Sequence[str | Path]) -> Listing:
    """The pictures of a source."""
    if not isinstance(source, (str, Path)):
        return Listing(_files(source))
    name = str(source) if is_url(str(source)) else str(Path(source).expanduser())
    found = _found(name)
    if isinstance(found, Path):
        return Listing(_files(found))
    if PurePosixPath(name).suffix.lower() in (".txt", ".lst"):
        lines = Path(name).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        return Listing(_files([line.strip() for line in lines if line.strip()]))
    for suffix, list_files in ((".parquet", _parquet), (".tar", _shards)):
        if files := [file for file in found if file.lower().endswith(suffix)]:
            return list_files(files)
    raise DataError(
        f"{name} is nothing that can be indexed: give a folder of pictures, a .txt file with their paths, "
        "Parquet files or .tar shards."
    )


def _found(name: str) -> Path | list[str]:
    """A local folder or picture, or else the files there are."""
    system, path = filesystem_of(name)
    info = system.get_file_info(path)
    if info.type == FileType.NotFound:
        raise DataError(f"{name} is not there: give a folder of pictures, or files that name or hold them.")
    if info.type == FileType.File:
        local = not is_url(name)
        return Path(name) if local and Path(name).suffix.lower() in EXTENSIONS else [name]
    inside = [one.path for one in system.get_file_info(FileSelector(path)) if one.type == FileType.File]
    if is_url(name):
        return sorted(f"{name.rstrip('/')}/{PurePosixPath(one).name}" for one in inside)
    shards = sorted(one for one in inside if one.lower().endswith((".parquet", ".tar")))
    return shards if shards and not listed(name, None)[0] else Path(name)


def _files(source: str | Path | Sequence[str | Path]) -> list[Piece]:
    files, labels = listed(source, None)
    paths = [str(file) for file in files]
    return [
        FilePiece(first, paths[first : first + CHUNK], labels[first : first + CHUNK])
        for first in range(0, len(paths), CHUNK)
    ]


def _each(ask: Callable[[str], T], files: Sequence[str]) -> list[T]:
    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(ask, files))


# ---------------------------------------------------------------------- Parquet


def _parquet(files: Sequence[str]) -> Listing:
    pieces: list[Piece] = []
    metadata: dict[str, pa.DataType] = {}
    first = 0
    for file, (schema, groups, paths) in zip(files, _each(_footer, files), strict=True):
        _check(file, schema, metadata)
        names = paths if paths is not None else [f"{file}#{row}" for row in range(sum(groups))]
        start = 0
        for group, count in enumerate(groups):
            pieces.append(ParquetPiece(first, names[start : start + count], file, group, list(schema.names)))
            first, start = first + count, start + count
    return Listing(pieces, metadata)


def _footer(file: str) -> tuple[pa.Schema, list[int], list[str] | None]:
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
        whole = "image" in schema.names
        paths = [
            f"{file}#{row}" if path is None else path if whole else str(Path(path).absolute())
            for row, path in enumerate(paths)
        ]
    return schema, groups, paths


def _check(file: str, schema: pa.Schema, metadata: dict[str, pa.DataType]) -> None:
    if "image" not in schema.names and "path" not in schema.names:
        raise DataError(f"{file} has neither a column image nor path, found {', '.join(schema.names)}.")
    for column in schema:
        if column.name in _OWN:
            continue
        if column.name in COLUMNS:
            raise ConfigError(f"{file} has a column {column.name!r}, which the gallery has itself: rename it.")
        if metadata.setdefault(column.name, column.type) != column.type:
            raise DataError(
                f"{file} has {column.name} as {column.type}, another file as {metadata[column.name]}: make them one."
            )


# ---------------------------------------------------------------------- WebDataset


def _shards(files: Sequence[str]) -> Listing:
    pieces: list[Piece] = []
    first = 0
    for file, samples in zip(files, _each(_samples, files), strict=True):
        for start in range(0, len(samples), CHUNK):
            names, places = zip(*samples[start : start + CHUNK], strict=True)
            pieces.append(TarPiece(first, [f"{file}#{name}" for name in names], file, list(places)))
            first += len(names)
    return Listing(pieces)


def _samples(file: str) -> list[tuple[str, Sample]]:
    """The pictures of a shard: members that share a name up to its first dot belong together."""
    found: dict[str, dict[str, tarfile.TarInfo]] = {}
    for member in _members(file):
        path = PurePosixPath(member.name)
        stem, dot, kind = path.name.partition(".")
        if member.isfile() and dot and stem:
            found.setdefault(str(path.with_name(stem)), {}).setdefault(f".{kind}".lower(), member)
    samples = []
    for parts in found.values():
        picture = next((one for kind, one in parts.items() if kind in EXTENSIONS), None)
        if picture is None:
            continue
        kind = next((kind for kind in _LABELS if kind in parts), "")
        label = (parts[kind].offset_data, parts[kind].size) if kind else None
        samples.append((picture.name, Sample((picture.offset_data, picture.size), label, kind)))
    return samples


def _members(file: str) -> Iterator[tarfile.TarInfo]:
    system, path = filesystem_of(file)
    with system.open_input_file(path) as stream:
        try:
            with tarfile.open(fileobj=stream, mode="r:") as shard:
                yield from shard
        except tarfile.TarError as error:
            raise DataError(f"{file} is no .tar shard, or damaged.") from error
