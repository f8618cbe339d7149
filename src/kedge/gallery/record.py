"""The gallery of record: one Lance dataset, in which every commit is whole or not there."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import lance
import numpy as np
import pyarrow as pa
from lance.fragment import FragmentMetadata, write_fragments

from kedge.errors import ConfigError, GalleryError
from kedge.files import whole_file

__all__ = ["COLUMNS", "Record", "Version"]

COLUMNS = ("id", "path", "label", "hash", "embedding", "thumbnail")
"""The columns of every record; those of the user's come behind."""


_SETTLED = 50_000_000
"""Nanoseconds: coarser than any file system's clock."""


class Version(NamedTuple):
    """A state of the record that can be restored."""

    number: int
    time: datetime


class Record:
    """Rows of a gallery: id, path, label, content hash, embedding, thumbnail and the user's metadata.

    Whoever writes must hold the gallery's lock; reading needs none.
    """

    def __init__(self, folder: Path, dim: int) -> None:
        self._uri = str(folder / "record.lance")
        self._versions = f"{self._uri}/_versions"
        self._seen = 0
        self._refreshing = threading.Lock()
        self._counter = folder / "next_id"
        self.dim = dim
        try:
            self._dataset = lance.dataset(self._uri)
        except (ValueError, OSError) as error:
            raise GalleryError(f"{folder} is damaged: its record cannot be opened ({_first_line(error)}).") from error

    @classmethod
    def create(cls, folder: Path, dim: int) -> Record:
        """An empty record in `folder`."""
        lance.write_dataset(pa.table(_empty(dim)), str(folder / "record.lance"))
        return cls(folder, dim)

    @property
    def version(self) -> int:
        """The number of the state this object sees."""
        return int(self._dataset.version)

    def refresh(self) -> int:
        """See the newest state; its number."""
        # A commit adds a file to this folder, and its time is much cheaper to ask for than the list of versions.
        # A time just past may still be that of the commit after the one that was seen.
        changed = os.stat(self._versions).st_mtime_ns  # noqa: PTH116 - Path.stat costs twice as much
        if changed != self._seen:
            with self._refreshing:  # of two threads, the later one must not put back what the earlier one saw
                self._dataset = lance.dataset(self._uri)
                self._seen = changed if time.time_ns() - changed > _SETTLED else 0
        return self.version

    def __len__(self) -> int:
        return int(self._dataset.count_rows())

    def versions(self) -> list[Version]:
        """All states that can be restored, oldest first."""
        entries: list[Any] = self._dataset.versions()
        return [Version(int(entry["version"]), entry["timestamp"]) for entry in entries]

    def restore(self, number: int) -> None:
        """Make an old state the newest one; nothing between is lost, it stays a version too."""
        known = [version.number for version in self.versions()]
        if number not in known:
            raise ConfigError(f"version must be one of {known[0]} … {known[-1]}, found {number}.")
        lance.dataset(self._uri, version=number).restore()  # type: ignore[no-untyped-call]
        self.refresh()

    def reserve(self, count: int) -> int:
        """The first of `count` ids that nobody has had or will have, not even after a kill."""
        first = int(self._counter.read_text()) if self._counter.exists() else 0
        with whole_file(self._counter) as stream:
            stream.write(str(first + count).encode())
        return first

    def write(self, rows: Mapping[str, Any]) -> list[FragmentMetadata]:
        """Write rows that nobody sees until they are committed."""
        table = _table(rows, self.dim)
        schema = self._dataset.schema
        for name in table.column_names:
            if name not in schema.names:
                raise ConfigError(f"There is no metadata column {name!r}: add it first.")
        for field in schema:
            if field.name not in table.column_names:
                table = table.append_column(field.name, pa.nulls(len(table), field.type))
        try:
            table = table.select(schema.names).cast(schema)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
            raise ConfigError(f"metadata does not fit the columns that are there: {_first_line(error)}") from error
        return list(write_fragments(table, self._uri, mode="append"))

    def commit(self, fragments: Sequence[FragmentMetadata]) -> None:
        """Make written rows visible, all at once."""
        operation = lance.LanceOperation.Append(list(fragments))
        self._dataset = lance.LanceDataset.commit(self._uri, operation, read_version=self._dataset.version)

    def add_columns(self, rows: Mapping[str, Any]) -> None:
        """Make room for metadata that the record has not seen, empty for the rows that are there."""
        known = set(self._dataset.schema.names)
        fields = [pa.field(name, pa.array(values).type) for name, values in rows.items() if name not in known]
        if fields:
            self._dataset.add_columns(pa.schema(fields))
            self.refresh()

    def delete(self, ids: Iterable[int]) -> int:
        """Remove rows; how many there were."""
        wanted = sorted({int(one) for one in ids})
        before = len(self)
        if wanted:
            self._dataset.delete(f"id IN ({', '.join(map(str, wanted))})")
            self.refresh()
        return before - len(self)

    def columns(self, names: Sequence[str], where: str | None = None) -> pa.Table:
        """Some columns of the rows that match, in the order they were added."""
        try:
            return self._dataset.to_table(columns=list(names), filter=where)
        except (ValueError, OSError) as error:
            if where is None:
                raise GalleryError(f"The record cannot be read: {_first_line(error)}") from error
            raise ConfigError(f"where={where!r} cannot be understood: {_first_line(error)}") from error

    def ids_where(self, where: str, version: int) -> np.ndarray:
        """The ids that match in one version."""
        try:
            table = lance.dataset(self._uri, version=version).to_table(columns=["id"], filter=where)
        except (ValueError, OSError) as error:
            raise ConfigError(f"where={where!r} cannot be understood: {_first_line(error)}") from error
        return np.asarray(table.column("id"))

    def batches(self, names: Sequence[str], where: str | None = None) -> Iterator[pa.RecordBatch]:
        """The same a batch at a time, for what does not fit in memory."""
        yield from self._dataset.to_batches(columns=list(names), filter=where, batch_size=8192)

    def compact(self) -> None:
        """Join the small files that many additions leave."""
        self._dataset.optimize.compact_files()
        self.refresh()

    @property
    def metadata_columns(self) -> list[str]:
        """The user's columns."""
        return [name for name in self._dataset.schema.names if name not in COLUMNS]


def embeddings_of(batch: pa.RecordBatch | pa.Table, dim: int) -> np.ndarray:
    """The embedding column as a matrix."""
    column = batch.column("embedding")
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # an empty table has no chunk
        return np.empty((0, dim), np.float32)
    return np.asarray(column.flatten()).reshape(-1, dim)


def _empty(dim: int) -> dict[str, pa.Array]:
    types = {
        "id": pa.int64(),
        "path": pa.string(),
        "label": pa.string(),
        "hash": pa.string(),
        "embedding": pa.list_(pa.float32(), dim),
        "thumbnail": pa.binary(),
    }
    return {name: pa.array([], kind) for name, kind in types.items()}


def _table(rows: Mapping[str, Any], dim: int) -> pa.Table:
    types = {name: column.type for name, column in _empty(dim).items()}
    columns = {}
    for name, values in rows.items():
        if name == "embedding":
            flat = pa.array(np.ascontiguousarray(values, np.float32).reshape(-1))
            columns[name] = pa.FixedSizeListArray.from_arrays(flat, dim)
        else:
            try:
                columns[name] = pa.array(values, types.get(name))
            except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
                raise ConfigError(f"metadata {name!r} cannot be stored: {_first_line(error)}") from error
    return pa.table(columns)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
