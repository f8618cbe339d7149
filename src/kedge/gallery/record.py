"""The gallery of record: one Lance dataset, in which every commit is whole or not there."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import lance
import numpy as np
import pyarrow as pa
from lance import Session  # type: ignore[attr-defined]
from lance.fragment import FragmentMetadata, write_fragments

from kedge.errors import ConfigError, GalleryError
from kedge.gallery.place import Place

__all__ = ["COLUMNS", "MEMORY", "Record", "Version"]

COLUMNS = ("id", "path", "label", "hash", "embedding", "thumbnail")
"""The columns of every record; those of the user's come behind."""


MEMORY = 1 << 30
"""Bytes that a gallery may keep in memory beside what the system keeps of its files."""
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

    def __init__(self, place: Place | Path, dim: int, *, memory: int = MEMORY) -> None:
        self.place = Place.of(place)
        self._uri = self.place.record
        self._versions = f"{self._uri}/_versions"
        self._seen = 0
        self._refreshing = threading.Lock()
        self._memory = memory
        self.dim = dim
        # Left to itself, Lance may keep several GiB of what it has read.
        self._session = Session(index_cache_size_bytes=memory // 8, metadata_cache_size_bytes=memory // 8)
        try:
            self._dataset = self._newest()
        except (ValueError, OSError) as error:
            raise GalleryError(
                f"{self.place} is damaged: its record cannot be opened ({_first_line(error)})."
            ) from error

    @classmethod
    def create(cls, place: Place | Path, dim: int) -> Record:
        """An empty record."""
        lance.write_dataset(pa.table(_empty(dim)), Place.of(place).record)
        return cls(place, dim)

    def _newest(self) -> Any:
        return lance.dataset(self._uri, session=self._session)

    @property
    def version(self) -> int:
        """The number of the state this object sees."""
        return int(self._dataset.version)

    def refresh(self) -> int:
        """See the newest state; its number."""
        if self.place.address is not None:
            with self._refreshing:
                if self._dataset.latest_version != self._dataset.version:
                    self._dataset = self._newest()
            return self.version
        # A commit adds a file to this folder, and its time is much cheaper to ask for than the list of versions.
        # A time just past may still be that of the commit after the one that was seen.
        changed = os.stat(self._versions).st_mtime_ns  # noqa: PTH116 - Path.stat costs twice as much
        if changed != self._seen:
            with self._refreshing:  # of two threads, the later one must not put back what the earlier one saw
                self._dataset = self._newest()
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
        return self.place.reserve(count)

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
        lance.LanceDataset.commit(self._uri, operation, read_version=self._dataset.version)
        self._dataset = self._newest()

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

    def ids_where(self, where: str, version: int) -> Iterator[np.ndarray]:
        """The ids that match in one version, some at a time."""
        try:
            dataset = lance.dataset(self._uri, version=version, session=self._session)
            for batch in self._scan(dataset, columns=["id"], filter=where).to_batches():
                yield np.asarray(batch.column("id"))
        except (ValueError, OSError) as error:
            raise ConfigError(f"where={where!r} cannot be understood: {_first_line(error)}") from error

    def batches(self, names: Sequence[str], where: str | None = None) -> Iterator[pa.RecordBatch]:
        """The same a batch at a time, for what does not fit in memory."""
        yield from self._scan(self._dataset, columns=list(names), filter=where).to_batches()

    def pieces(self) -> dict[str, str]:
        """The files that hold the rows and, for each, the file that says which of its rows were removed.

        Neither is ever changed or named anew: where both are the same, so are the rows.
        """
        return {one.metadata.files[0].path: one.deletion_file() or "" for one in self._dataset.get_fragments()}

    def ids_in(self, files: Collection[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The ids in some of these files, and which of them were removed."""
        for batch in self._scan_pieces(files, ["id"], with_row_id=True, include_deleted_rows=True):
            yield np.asarray(batch.column("id")), np.asarray(batch.column("_rowid").is_null())

    def rows_in(self, files: Collection[str], names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Some columns of the rows in some of these files."""
        yield from self._scan_pieces(files, names)

    def _scan_pieces(self, files: Collection[str], names: Sequence[str], **options: Any) -> Iterator[pa.RecordBatch]:
        some = [one for one in self._dataset.get_fragments() if one.metadata.files[0].path in files]
        if some:
            yield from self._scan(self._dataset, columns=list(names), fragments=some, **options).to_batches()

    def _scan(self, dataset: Any, **options: Any) -> Any:
        buffer = max(32 << 20, self._memory // 8)
        return dataset.scanner(batch_size=8192, io_buffer_size=buffer, batch_readahead=8, **options)

    def compact(self) -> None:
        """Join the small files that many additions leave."""
        self._dataset.optimize.compact_files()
        self.refresh()

    def forget(self, days: float) -> None:
        """Remove the states that are older, and the files that no other one needs."""
        self._dataset.cleanup_old_versions(older_than=timedelta(days=days), error_if_tagged_old_versions=False)
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
