"""The Lance table of a gallery: every commit is atomic and a version that can be restored."""

from __future__ import annotations

import copy
import logging
import os
import re
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import lance
import numpy as np
import pyarrow as pa
from filelock import FileLock, Timeout
from lance import Session  # type: ignore[attr-defined]
from lance.fragment import FragmentMetadata, write_fragments

from kedge.errors import ConfigError, GalleryError
from kedge.gallery.integrity import Integrity, system_reason, wrap_read_errors
from kedge.gallery.location import LOCK, Location
from kedge.gallery.schema import (
    CHECKSUM,
    VECTORS,
    arrow_array,
    arrow_batches,
    column_types,
    damaged_rows,
    own_columns,
    require_valid,
    vectors_of,
)

__all__ = ["LOCK", "MEMORY", "Change", "Table", "Version"]

MEMORY = 1 << 30
"""Bytes that a gallery may keep in memory beside the page cache."""
_LOCK_SECONDS = 10.0
_SMALL_FILE = 1 << 15
"""Files of fewer rows are joined; to write larger ones anew takes longer than it saves."""
_SENTINEL = "987654321987"
_MTIME_RESOLUTION = 50_000_000
"""Nanoseconds: coarser than any file system's clock."""
_log = logging.getLogger(__name__)


class Version(NamedTuple):
    """A version of the table that can be restored."""

    number: int
    time: datetime


class Change(NamedTuple):
    """What a version of the table changed."""

    number: int
    time: datetime
    items: int
    """That it holds."""
    added: int = 0
    removed: int = 0
    relabelled: int = 0
    restored: int | None = None
    """The version that it brought back."""

    def __str__(self) -> str:
        if self.restored is not None:
            return f"restored version {self.restored}"
        counts = {"added": self.added, "removed": self.removed, "relabelled": self.relabelled}
        return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count) or "no item changed"


class Table:
    """Rows of a gallery: id, path, label, content hash, embedding, features, thumbnail and the user's metadata.

    A writer must hold the gallery's lock; reading needs none. `refresh` moves this handle on to the newest version;
    a copy made by `pin` stays at its version.
    """

    def __init__(self, location: Location | Path, dim: int, *, memory: int = MEMORY) -> None:
        self.location = Location.of(location)
        self.dim = dim
        self.memory = memory
        self.integrity = Integrity(self.location)
        self.integrity.repair_copy()
        self._uri = self.location.table_uri
        self._mtime = 0
        """Of the folder of versions, by which a new one is noticed: asking Lance costs far more."""
        self._lock = threading.Lock()
        # Left to itself, Lance may cache several GiB.
        self._session = Session(index_cache_size_bytes=memory // 8, metadata_cache_size_bytes=memory // 8)
        self._max_id, self._counted_files = -1, set[str]()
        """The largest id in the data files that were counted."""
        self._reload()

    @classmethod
    def create(cls, location: Location | Path, dim: int, features: int = 0) -> Table:
        """An empty table, for features of so many numbers beside the embeddings (0: for embeddings alone)."""
        empty = {name: pa.array([], kind) for name, kind in column_types(dim, features).items()}
        lance.write_dataset(pa.table(empty), Location.of(location).table_uri)
        table = cls(location, dim)
        table.seal(())
        return table

    # ------------------------------------------------------------------ versions

    def _reload(self) -> None:
        with self._lock:  # of two threads, the later one must not put back what the earlier one saw
            self._dataset = self.integrity.open_latest(session=self._session)

    @property
    def version(self) -> int:
        """The version this handle is at."""
        return int(self._dataset.version)

    def refresh(self) -> int:
        """Move to the newest version; its number."""
        with wrap_read_errors(self.location):
            if self.location.url is None:
                mtime = os.stat(f"{self._uri}/_versions").st_mtime_ns  # noqa: PTH116 - Path.stat costs twice as much
                if mtime != self._mtime:
                    self._reload()
                    # A recent mtime may still be that of the next change.
                    self._mtime = mtime if time.time_ns() - mtime > _MTIME_RESOLUTION else 0
            elif self._dataset.latest_version != self._dataset.version:
                self._reload()
        return self.version

    def pin(self) -> Table:
        """A handle at the version of this one that no writer moves on."""
        return copy.copy(self)

    def latest(self) -> Table:
        """A handle that stays at the version that is the newest now."""
        self.refresh()
        return self.pin()

    def at(self, version: int) -> Table:
        """A handle that stays at a version."""
        table = self.pin()
        if table.version != version:
            with wrap_read_errors(self.location):
                table._dataset = lance.dataset(self._uri, version=version, session=self._session)
        return table

    def versions(self) -> list[Version]:
        """All versions that can be restored, oldest first."""
        try:
            with wrap_read_errors(self.location):
                entries: list[Any] = self._dataset.versions()
                return [Version(int(entry["version"]), entry["timestamp"]) for entry in entries]
        except GalleryError:
            # One of the manifests is damaged, the others are not.
            manifests = self.integrity.manifests()
            damaged = self.integrity.damaged(manifests.values())
            if not damaged:
                raise
            good = sorted((number, name) for number, name in manifests.items() if name not in damaged)
            times = [(self.location.folder / name).stat().st_mtime for _, name in good]
            return [Version(number, datetime.fromtimestamp(at)) for (number, _), at in zip(good, times, strict=True)]

    def history(self, count: int | None = None) -> list[Change]:
        """The last versions that can be restored, oldest first, and what each changed.

        From Lance's manifests and transactions alone: no row is read.
        """
        self.refresh()
        changes: list[Change] = []
        with wrap_read_errors(self.location):
            entries: list[Any] = self._dataset.versions()
            before = [0, *(int(entry["metadata"]["total_rows"]) for entry in entries)]
            first = 0 if count is None else max(0, len(entries) - count)
            for entry, items in list(zip(entries, before, strict=False))[first:]:
                now = int(entry["metadata"]["total_rows"])
                change = Change(
                    int(entry["version"]), entry["timestamp"], now, max(0, now - items), max(0, items - now)
                )
                transaction = self._dataset.read_transaction(change.number)
                operation = None if transaction is None else transaction.operation
                if isinstance(operation, lance.LanceOperation.Restore):
                    change = change._replace(restored=int(operation.version))
                elif isinstance(
                    operation, lance.LanceOperation.Update
                ):  # `replace`: an item with a new label has a new id
                    change = change._replace(relabelled=sum(part.physical_rows for part in operation.new_fragments))
                changes.append(change)
        return changes

    def restore(self, number: int) -> None:
        """Make an old version the newest one; those between stay versions too."""
        numbers = [version.number for version in self.versions()]
        if number not in numbers:
            span = f"versions go from {numbers[0]} to {numbers[-1]}"
            raise ConfigError(f"There is no version {number}; {span}, and kedge versions lists them.")
        with wrap_read_errors(self.location):
            if number in (manifests := self.integrity.manifests()):
                self.integrity.require([manifests[number]])
            old = lance.dataset(self._uri, version=number)
            self.integrity.verify(old)
            old.restore()  # type: ignore[no-untyped-call]
        self._reload()

    # ------------------------------------------------------------------ integrity

    def files(self) -> set[str]:
        """The files of this version, its manifest among them."""
        with wrap_read_errors(self.location):
            return self.integrity.files(self._dataset)

    def verify(self, *, again: bool = False) -> None:
        """Raise unless this version is as it was written; see `Integrity.verify`."""
        self.integrity.verify(self._dataset, again=again)

    def seal(self, before: Collection[str], *, prune: bool = False) -> None:
        """Keep the checksums of what was written since there were only the files `before`; see `Integrity.seal`."""
        if self.location.url is not None:
            return
        try:
            self.refresh()
            self.integrity.seal(self._dataset, before, prune=prune)
        except (OSError, GalleryError) as error:
            # What was committed is safe, and only not compared later.
            _log.warning("The checksums of %s could not be written: %s", self.location, error)

    def touch(self) -> None:
        """Raise unless the newest version can be read: its files exist in their full length."""
        table = self.latest()
        with wrap_read_errors(self.location):
            if (file := self.integrity.missing_file(table._dataset)) is not None:
                raise GalleryError(f"Gallery '{self.location}' is damaged: {file} is missing or truncated.")
            table._dataset.head(1, columns=["id"])

    # ------------------------------------------------------------------ writing

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the gallery's lock, which the system releases when its holder dies; seal what is new."""
        try:
            with FileLock(self.location.folder / LOCK, timeout=_LOCK_SECONDS):
                self.refresh()
                self.integrity.forget_lost_versions()
                before = self.files()
                try:
                    yield
                finally:
                    self.seal(before)
        except Timeout as error:
            raise GalleryError(f"Another process is writing to {self.location}; try again when it is done.") from error
        except OSError as error:
            message = f"{self.location} could not be written{system_reason(error)}; what it held before is kept."
            raise GalleryError(message) from error

    @contextmanager
    def _modifying(self) -> Iterator[Any]:
        """A Lance handle for an operation that moves it on: pinned handles must not move with it."""
        yield lance.dataset(self._uri, session=self._session)
        self._reload()

    def reserve_ids(self, count: int) -> int:
        """The first of `count` ids that were never used and never will be, not even after a kill."""
        # Data files never change, so that each is read once; removed rows count too.
        new = set(self.data_files()) - self._counted_files
        for ids, _ in self.ids_in(new):
            self._max_id = max(self._max_id, int(ids.max(initial=-1)))
        self._counted_files |= new
        return self.location.reserve_ids(count, self._max_id + 1)

    def write(self, rows: Mapping[str, Any]) -> list[FragmentMetadata]:
        """Write rows, which nobody sees until they are committed."""
        return list(write_fragments(arrow_batches(rows, self._dataset.schema), self._uri, mode="append"))

    def commit(self, fragments: Sequence[FragmentMetadata]) -> None:
        """Make written rows visible, all at once."""
        operation = lance.LanceOperation.Append(list(fragments))
        lance.LanceDataset.commit(self._uri, operation, read_version=self.version)
        self._reload()
        for fragment in fragments:
            self.integrity.trust(file.path for file in fragment.files)

    def replace(self, ids: Iterable[int], fragments: Sequence[FragmentMetadata]) -> None:
        """Delete rows and make written ones visible, in one commit."""
        where = f"id IN ({', '.join(map(str, sorted(ids)))})"
        holders = {part.fragment_id: part for part in self._dataset.get_fragments() if part.count_rows(where)}
        left = {number: part.delete(where) for number, part in holders.items()}  # None where no row is left
        operation = lance.LanceOperation.Update(
            removed_fragment_ids=[number for number, part in left.items() if part is None],
            updated_fragments=[part for part in left.values() if part is not None],
            new_fragments=list(fragments),
        )
        lance.LanceDataset.commit(self._uri, operation, read_version=self.version)
        self._reload()

    def add_columns(self, rows: Mapping[str, Any]) -> None:
        """Add metadata columns that the table lacks, empty for the rows that it has."""
        existing = set(self._dataset.schema.names)
        new = {name: arrow_array(name, values) for name, values in rows.items() if name not in existing}
        if new:
            with self._modifying() as dataset:
                dataset.add_columns(pa.schema([pa.field(name, array.type) for name, array in new.items()]))

    def delete(self, ids: Iterable[int]) -> int:
        """Delete rows; how many there were."""
        numbers = sorted(set(map(int, ids)))
        before = len(self)
        if numbers:
            with self._modifying() as dataset:
                dataset.delete(f"id IN ({', '.join(map(str, numbers))})")
        return before - len(self)

    def compact(self) -> None:
        """Join the small files that many additions leave."""
        with self._modifying() as dataset:
            dataset.optimize.compact_files(target_rows_per_fragment=_SMALL_FILE)

    def forget(self, days: float) -> None:
        """Remove older versions, and the files that no other version needs."""
        with self._modifying() as dataset:
            dataset.cleanup_old_versions(older_than=timedelta(days=days), error_if_tagged_old_versions=False)

    # ------------------------------------------------------------------ reading

    def __len__(self) -> int:
        return int(self._dataset.count_rows())

    @property
    def metadata_columns(self) -> list[str]:
        """The user's columns."""
        return [name for name in self._dataset.schema.names if name not in self.own_columns]

    @property
    def own_columns(self) -> tuple[str, ...]:
        """The columns that are not the user's."""
        return own_columns(self._dataset.schema)

    def row(self, id: int) -> dict[str, Any]:
        """One item, compared with the checksum of its row."""
        if CHECKSUM not in self._dataset.schema.names:
            self.verify()
        try:
            with wrap_read_errors(self.location):
                rows = self._dataset.to_table(filter=f"id = {int(id)}")
                damaged = damaged_rows(rows)
        except GalleryError:
            self.verify()  # names the file that is damaged
            raise
        if damaged.any():
            raise GalleryError(
                f"Gallery '{self.location}' is damaged: item {id} differs from its checksum; run kedge info --check."
            )
        if not len(rows):
            self.verify()  # the id itself may be what is damaged
            raise ConfigError(f"There is no item {id} in {self.location}.")
        vectors = {name: vectors_of(rows, name)[0] for name in VECTORS if name in self.own_columns}
        return {name: rows.column(name)[0].as_py() for name in rows.column_names if name not in vectors} | vectors

    def check_filter(self, where: str) -> None:
        """Raise unless Lance understands all of a filter: it parses one expression and ignores whatever follows."""
        try:
            # In parentheses it must parse as a whole; an appended term reaches the plan only if nothing was ignored.
            _, plan = (
                self._dataset.scanner(columns=["id"], filter=text).explain_plan()
                for text in (f"({where}\n)", f"{where}\nAND abs(id) <> {_SENTINEL}")
            )
            complete = _SENTINEL in plan
        except (ValueError, OSError) as error:
            raise ConfigError(f"where={where!r} is not valid: {self._filter_reason(str(error))}.") from error
        if not complete:
            raise ConfigError(f"where={where!r} is not valid: it must be one condition with nothing behind it.")

    def _filter_reason(self, message: str) -> str:
        """What is wrong with a filter, taken from what Lance says of it."""
        if match := re.search(r"No field named \"?([^\s.\"]+)", message):
            columns = ", ".join(("id", "path", "label", *self.metadata_columns))
            return f"there is no column {match[1]}; the columns are {columns}, and text stands in single quotes"
        if match := re.search(r"Invalid function '(\w+)'", message):
            return f"there is no function {match[1]}"
        if "could not convert to literal" in message:
            return "it compares a column with a value of another type"
        return "write a condition such as label = 'cat'"

    def columns(self, names: Sequence[str], where: str | None = None) -> pa.Table:
        """Columns of the rows that match, in the order they were added."""
        if where is not None:
            self.check_filter(where)
        self.verify()
        with wrap_read_errors(self.location):
            return self._dataset.to_table(columns=list(names), filter=where)

    def ids(self, where: str | None = None) -> list[int]:
        """The items that match, in order."""
        return sorted(self.columns(["id"], where).column("id").to_pylist())

    def batches(
        self, names: Sequence[str], where: str | None = None, data_files: Collection[str] | None = None, **options: Any
    ) -> Iterator[pa.RecordBatch]:
        """Columns a batch at a time, for what does not fit in memory; all rows, or those in some data files."""
        dataset = self._dataset
        self.integrity.verify(dataset, data_files)
        with wrap_read_errors(self.location):
            if data_files is not None:
                fragments = [part for part in dataset.get_fragments() if part.metadata.files[0].path in data_files]
                if not fragments:
                    return
                options["fragments"] = fragments
            buffer = max(32 << 20, self.memory // 8)
            options = {"batch_size": 8192, "io_buffer_size": buffer, "batch_readahead": 8} | options
            yield from dataset.scanner(columns=list(names), filter=where, **options).to_batches()

    def data_files(self) -> dict[str, str]:
        """The data file of each fragment and, for each, its deletion file or "".

        Neither is ever changed or renamed: where both are the same, so are the rows.
        """
        with wrap_read_errors(self.location):
            fragments = self._dataset.get_fragments()
            return {fragment.metadata.files[0].path: fragment.deletion_file() or "" for fragment in fragments}

    def ids_in(self, data_files: Collection[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The ids in some data files, and the mask of those that were deleted."""
        for batch in self.batches(["id"], data_files=data_files, with_row_id=True, include_deleted_rows=True):
            ids = np.asarray(batch.column("id"))
            require_valid(ids)
            yield ids, np.asarray(batch.column("_rowid").is_null())
