"""The gallery of record: one Lance dataset, in which every commit is whole or not there."""

from __future__ import annotations

import logging
import os
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
from lance import Session  # type: ignore[attr-defined]
from lance.fragment import FragmentMetadata, write_fragments

from kedge.errors import ConfigError, GalleryError, KedgeError
from kedge.gallery.checksums import CHECKSUM, FileChecksums, row_checksums
from kedge.gallery.labels import stored_labels
from kedge.gallery.place import Place

__all__ = ["COLUMNS", "LOCK", "MEMORY", "Damage", "Record", "Version", "require_valid"]

COLUMNS = ("id", "path", "label", "hash", "embedding", "thumbnail", CHECKSUM)
"""The columns of every record; those of the user's come behind. Earlier releases wrote no checksums."""


LOCK = "writer.lock"
"""The file in a gallery's folder that its writer locks."""
MEMORY = 1 << 30
"""Bytes that a gallery may keep in memory beside what the system keeps of its files."""
_SETTLED = 50_000_000
"""Nanoseconds: coarser than any file system's clock."""
_AT_ONCE = 256 << 20
"""A table up to so many bytes is compared with its checksums before one of its rows is read; of others, the row is."""
_SENTINEL = "987654321987"
_MOST_IDS = 1 << 40
"""A byte is kept for each: more cannot be meant."""
_FAILURES = (ValueError, OSError, RuntimeError, MemoryError, pa.ArrowException)
_log = logging.getLogger(__name__)


class Version(NamedTuple):
    """A state of the record that can be restored."""

    number: int
    time: datetime


class Damage(NamedTuple):
    """What is not as it was written: files, the items in them, and the newest version without any of these files."""

    files: list[str]
    items: list[int]
    unreadable: int
    """Rows that cannot be read at all."""
    last_good: tuple[int, int] | None
    """Its number, and how many items it holds."""

    def sentence(self, where: object) -> str:
        """What was found and what to do."""
        what = f"{len(self.files)} of the files of its table differ from what was written ({self.files[0]})"
        if self.items:
            some = ", ".join(map(str, self.items[:20])) + (" …" if len(self.items) > 20 else "")
            what += f"; damaged items: {some}"
        if self.unreadable:
            what += f"; {self.unreadable:,} items cannot be read"
        if self.last_good is None:
            return f"{where} is damaged: {what}; no version is whole: bring back a backup."
        number, items = self.last_good
        good = f"the last good version is {number} with {items:,} items, which Gallery.restore brings back"
        return f"{where} is damaged: {what}; {good}."


class Record:
    """Rows of a gallery: id, path, label, content hash, embedding, thumbnail and the user's metadata.

    Whoever writes must hold the gallery's lock; reading needs none.
    """

    def __init__(
        self, place: Place | Path, dim: int, *, memory: int = MEMORY, checksums: FileChecksums | None = None
    ) -> None:
        self.place = Place.of(place)
        self.checksums = checksums or FileChecksums(self.place.folder)
        self._uri = self.place.record
        self._versions = f"{self._uri}/_versions"
        self._seen = 0
        self._refreshing = threading.Lock()
        self._memory = memory
        self.dim = dim
        # Left to itself, Lance may keep several GiB of what it has read.
        self._session = Session(index_cache_size_bytes=memory // 8, metadata_cache_size_bytes=memory // 8)
        self._largest, self._counted = -1, set[str]()
        """The largest id in those files that were looked at."""
        self._compared: set[frozenset[str]] = set()
        """Files whose rows were compared one by one."""
        self._dataset = self._newest()

    @classmethod
    def create(cls, place: Place | Path, dim: int) -> Record:
        """An empty record."""
        lance.write_dataset(pa.table(_empty(dim)), Place.of(place).record)
        record = cls(place, dim)
        record.seal(set())
        return record

    def _newest(self) -> Any:
        with self._reading():
            manifests = self._manifests()
            if manifests and self.checksums.damaged([manifests[max(manifests)]]):
                file = self.place.folder / manifests.pop(max(manifests))
                good = f"version {max(manifests)}" if manifests else "nothing"
                raise GalleryError(f"{self.place} is damaged: move {file} away to go back to {good}.")
            dataset = lance.dataset(self._uri, session=self._session)
            self.checksums.require(self._names(dataset, deletions_only=True))
        return dataset

    def _manifests(self) -> dict[int, str]:
        """The file of each version; none at an address, whose store compares checksums of its own."""
        if self.place.address is not None:
            return {}
        return manifests_of(self.place.folder)

    def _names(self, dataset: Any, files: Collection[str] | None = None, *, deletions_only: bool = False) -> set[str]:
        """The files of a state, or of those fragments that begin with one of `files`."""
        if self.place.address is not None:
            return set()
        names = set()
        for one in dataset.get_fragments():
            if files is not None and one.metadata.files[0].path not in files:
                continue
            if (deletions := one.deletion_file()) is not None:
                names.add(f"record.lance/{deletions}")
            if not deletions_only:
                names |= {f"record.lance/data/{file.path}" for file in one.metadata.files}
        return names

    def files(self) -> set[str]:
        """The files that hold the newest state."""
        with self._reading():
            manifest = self._manifests().get(self.version)
            return self._names(self._dataset) | ({manifest} if manifest is not None else set())

    def verify(self, *, files: Collection[str] | None = None, dataset: Any = None) -> None:
        """Compare files of the table with their checksums, unless this process has done so; raise where one differs.

        Of a file that has none, since its writer was killed just then, each row is compared with its own.
        """
        with self._reading():
            state = self._dataset if dataset is None else dataset
            self.checksums.require(names := self._names(state, files))
            if CHECKSUM in state.schema.names and not all(map(self.checksums.known, names)):
                self._verify_rows(state, files)

    def _verify_rows(self, dataset: Any, files: Collection[str] | None) -> None:
        for fragment in dataset.get_fragments():
            first = fragment.metadata.files[0].path
            names = frozenset(self._names(dataset, {first}))
            if (files is not None and first not in files) or names in self._compared:
                continue
            if not all(map(self.checksums.known, names)):
                items = self._damaged_items(dataset, fragment)
                if items is None or items:
                    what = f"{first} cannot be read" if items is None else f"item {items[0]} is not as it was written"
                    raise GalleryError(f"{self.place} is damaged: {what}; kedge info --check says what to do.")
                self._compared.add(names)

    def seal(self, before: Collection[str], *, everything: bool = False) -> None:
        """Keep the checksums of what was written since there were only the files `before`, or of all files."""
        if self.place.address is not None:
            return
        try:
            self.refresh()
            manifests = self._manifests()
            known = max((number for number, name in manifests.items() if name in before), default=0)
            new = {name for number, name in manifests.items() if number > known}
            new |= self.files() - (set() if everything else set(before))
            gone = [name for name in self.checksums.names() if everything and not (self.place.folder / name).exists()]
            # What has a checksum never changes: another one would only hide damage.
            new = {name for name in new if not self.checksums.known(name)}
            if new or gone:
                self.checksums.add(new, gone)
        except (OSError, GalleryError) as error:
            # What was committed is safe, and only not compared later.
            _log.warning("The checksums of %s could not be written: %s", self.place, error)

    def forget_lost_versions(self) -> None:
        """Forget the checksums of versions newer than the newest that is there, whose numbers will be given again.

        Such versions were moved away, or never came with a copy. Whoever calls must hold the gallery's lock.
        """
        manifests = self._manifests()
        lost = [name for name in self.checksums.names() if "/_versions/" in name and name not in manifests.values()]
        if lost and self.place.address is None:
            self.checksums.add((), lost)

    def touch(self) -> None:
        """Raise unless the newest state can be read: its files are there, as long as they were written."""
        self.refresh()
        with self._reading():
            if self.place.address is None and (file := missing_file(self.place.folder, self._dataset)) is not None:
                raise GalleryError(f"{self.place} is damaged: {file} is missing or was cut off.")
            self._dataset.head(1, columns=["id"])

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Whatever goes wrong while the table is read is an error of the gallery, not of the question."""
        try:
            yield
        except KedgeError:
            raise
        except _FAILURES as error:
            raise GalleryError(f"The table of {self.place} cannot be read: {_first_line(error)}") from error
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # what Lance raises where its own files contradict themselves
                raise
            raise GalleryError(f"The table of {self.place} cannot be read: {_first_line(error)}") from error

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
        with self._reading():
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
        try:
            with self._reading():
                entries: list[Any] = self._dataset.versions()
                return [Version(int(entry["version"]), entry["timestamp"]) for entry in entries]
        except GalleryError:
            # One of them is damaged, the others are not.
            manifests = self._manifests()
            damaged = self.checksums.damaged(manifests.values())
            if not damaged:
                raise
            times = {number: (self.place.folder / name).stat().st_mtime for number, name in manifests.items()}
            good = sorted(number for number, name in manifests.items() if name not in damaged)
            return [Version(number, datetime.fromtimestamp(times[number])) for number in good]

    def restore(self, number: int) -> None:
        """Make an old state the newest one; nothing between is lost, it stays a version too."""
        known = [version.number for version in self.versions()]
        if number not in known:
            raise ConfigError(f"version must be one of {known[0]} … {known[-1]}, found {number}.")
        with self._reading():
            if number in (manifests := self._manifests()):
                self.checksums.require([manifests[number]])
            old = lance.dataset(self._uri, version=number)
            self.verify(dataset=old)
            old.restore()  # type: ignore[no-untyped-call]
        self.refresh()

    def reserve(self, count: int) -> int:
        """The first of `count` ids that nobody has had or will have, not even after a kill.

        Whoever calls must hold the gallery's lock.
        """
        return self.place.reserve(count, self._largest_id() + 1)

    def _largest_id(self) -> int:
        """The largest id in the table, removed or not; files never change, so that each is read once."""
        new = set(self.pieces()) - self._counted
        for ids, _ in self.ids_in(new):
            self._largest = max(self._largest, int(ids.max(initial=-1)))
        self._counted |= new
        return self._largest

    def write(self, rows: Mapping[str, Any]) -> list[FragmentMetadata]:
        """Write rows that nobody sees until they are committed."""
        if "label" in rows:
            rows = {**rows, "label": stored_labels(_values(rows["label"]))}
        table = _table({name: values for name, values in rows.items() if name != CHECKSUM}, self.dim)
        schema = self._dataset.schema
        for name in table.column_names:
            if name not in schema.names:
                raise ConfigError(f"There is no metadata column {name!r}: add it first.")
        for field in schema:
            if field.name not in table.column_names and field.name != CHECKSUM:
                table = table.append_column(field.name, pa.nulls(len(table), field.type))
        try:
            others = pa.schema([field for field in schema if field.name != CHECKSUM])
            table = table.select(others.names).cast(others)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
            raise ConfigError(f"metadata does not fit the columns that are there: {_first_line(error)}") from error
        if CHECKSUM in schema.names:
            table = table.append_column(CHECKSUM, pa.array(row_checksums(table, self.dim))).select(schema.names)
        return list(write_fragments(table, self._uri, mode="append"))

    def commit(self, fragments: Sequence[FragmentMetadata]) -> None:
        """Make written rows visible, all at once."""
        operation = lance.LanceOperation.Append(list(fragments))
        lance.LanceDataset.commit(self._uri, operation, read_version=self._dataset.version)
        self._dataset = self._newest()
        for one in fragments:  # written just now
            self._compared.add(frozenset(f"record.lance/data/{file.path}" for file in one.files))

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
        dataset = self._dataset
        if where is not None:
            self.check_filter(where, dataset)
        self.verify(dataset=dataset)
        with self._reading():
            return dataset.to_table(columns=list(names), filter=where)

    def row(self, id: int) -> dict[str, Any] | None:
        """What the table holds of one item, compared with the checksum of its row; None where there is no such item."""
        dataset = self._dataset
        small = self.checksums.pending(self._names(dataset)) <= _AT_ONCE
        for verified in (True,) if small else (False, True):
            if verified:  # before it is said that an item is not there, all of the table was compared
                self.verify(dataset=dataset)
            with self._reading():
                table = dataset.to_table(filter=f"id = {int(id)}")
                damaged = _damaged_rows(table, self.dim)
            if damaged.any():
                raise GalleryError(
                    f"{self.place} is damaged: item {id} is not as it was written; kedge info --check says what to do."
                )
            if len(table):
                return {
                    name: embeddings_of(table, self.dim)[0] if name == "embedding" else table.column(name)[0].as_py()
                    for name in table.column_names
                }
        return None

    def check_filter(self, where: str, dataset: Any = None) -> None:
        """Raise unless Lance understands all of a filter: it reads one expression and ignores whatever follows."""
        try:
            state = self._dataset if dataset is None else dataset
            scanner = state.scanner(columns=["id"], filter=f"({where}\n) AND id <> -{_SENTINEL}")
            complete = _SENTINEL in scanner.explain_plan()
        except (ValueError, OSError) as error:
            raise ConfigError(f"where={where!r} cannot be understood: {_first_line(error)}") from error
        if not complete:
            raise ConfigError(f"where={where!r} cannot be understood: it must be one expression and nothing behind it.")

    def ids_where(self, where: str, version: int) -> Iterator[np.ndarray]:
        """The ids that match in one version, some at a time."""
        with self._reading():
            dataset = lance.dataset(self._uri, version=version, session=self._session)
            self.check_filter(where, dataset)
            self.verify(dataset=dataset)
            for batch in self._scan(dataset, columns=["id"], filter=where).to_batches():
                yield np.asarray(batch.column("id"))

    def batches(self, names: Sequence[str], where: str | None = None) -> Iterator[pa.RecordBatch]:
        """The same a batch at a time, for what does not fit in memory."""
        dataset = self._dataset
        self.verify(dataset=dataset)
        with self._reading():
            yield from self._scan(dataset, columns=list(names), filter=where).to_batches()

    def pieces(self) -> dict[str, str]:
        """The files that hold the rows and, for each, the file that says which of its rows were removed.

        Neither is ever changed or named anew: where both are the same, so are the rows.
        """
        with self._reading():
            return {one.metadata.files[0].path: one.deletion_file() or "" for one in self._dataset.get_fragments()}

    def ids_in(self, files: Collection[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The ids in some of these files, and which of them were removed."""
        for batch in self._scan_pieces(files, ["id"], with_row_id=True, include_deleted_rows=True):
            ids = np.asarray(batch.column("id"))
            _require_ids(ids)
            yield ids, np.asarray(batch.column("_rowid").is_null())

    def rows_in(self, files: Collection[str], names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Some columns of the rows in some of these files."""
        yield from self._scan_pieces(files, names)

    def _scan_pieces(self, files: Collection[str], names: Sequence[str], **options: Any) -> Iterator[pa.RecordBatch]:
        dataset = self._dataset
        self.verify(files=files, dataset=dataset)
        with self._reading():
            some = [one for one in dataset.get_fragments() if one.metadata.files[0].path in files]
            if some:
                yield from self._scan(dataset, columns=list(names), fragments=some, **options).to_batches()

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

    def check(self) -> Damage | None:
        """Compare the whole table with its checksums, also what was compared before; None where all is well.

        Rows are looked at one by one only in files that differ or that have no checksum.
        """
        with self._reading():
            dataset = self._dataset
            damaged = set(self.checksums.damaged(self.files(), again=True))
            items: list[int] = []
            unreadable = 0
            for fragment in dataset.get_fragments():
                names = self._names(dataset, {fragment.metadata.files[0].path})
                if not names & damaged and all(map(self.checksums.known, names)):
                    continue
                found = self._damaged_items(dataset, fragment)
                if found is None:
                    unreadable += fragment.physical_rows
                items += found or []
                if found is None or found:
                    damaged |= names & damaged or {sorted(names)[-1]}
            if not damaged:
                return None
            return Damage(sorted(damaged), sorted(items), unreadable, self._last_good(damaged))

    def _damaged_items(self, dataset: Any, fragment: Any) -> list[int] | None:
        """The ids of rows that differ from their checksum; None where the rows cannot be read."""
        found: list[int] = []
        try:
            with self._reading():
                for batch in self._scan(dataset, fragments=[fragment]).to_batches():
                    found += np.asarray(batch.column("id"))[_damaged_rows(batch, self.dim)].tolist()
        except GalleryError:
            return None
        return found

    def _last_good(self, damaged: set[str]) -> tuple[int, int] | None:
        """The newest version that needs none of these files, nor others that differ."""
        manifests = self._manifests()
        for number in sorted(manifests, reverse=True):
            try:
                with self._reading():
                    self.checksums.require([manifests[number]])
                    dataset = lance.dataset(self._uri, version=number)
                    names = self._names(dataset)
                    if not (names | {manifests[number]}) & damaged and not self.checksums.damaged(names):
                        return number, int(dataset.count_rows())
            except GalleryError:
                continue
        return None

    def add_checksums(self) -> None:
        """Give a checksum to the rows that an earlier release wrote."""
        names = self._dataset.schema.names
        if CHECKSUM in names:
            if self._dataset.count_rows(f"{CHECKSUM} IS NULL") == 0:
                return
            self._dataset.drop_columns([CHECKSUM])
            self.refresh()
            names = self._dataset.schema.names
        dim = self.dim

        def checksums(batch: pa.RecordBatch) -> pa.RecordBatch:
            return pa.record_batch({CHECKSUM: pa.array(row_checksums(batch, dim))})

        if len(self):
            self._dataset.add_columns(checksums, read_columns=names)
        else:
            self._dataset.add_columns(pa.schema([(CHECKSUM, pa.int64())]))
        self.refresh()

    @property
    def metadata_columns(self) -> list[str]:
        """The user's columns."""
        return [name for name in self._dataset.schema.names if name not in COLUMNS]


def manifests_of(folder: Path) -> dict[int, str]:
    """The file of each version of a gallery in a folder."""
    found = {}
    for name in os.listdir(folder / "record.lance" / "_versions"):  # noqa: PTH208 - asked at every new version
        number, _, kind = name.partition(".")
        if kind == "manifest" and number.isdigit():
            # Lance counts down from 2^64 - 1, so that the newest is the first.
            version = int(number) if int(number) < 1 << 63 else (1 << 64) - 1 - int(number)
            found[version] = f"record.lance/_versions/{name}"
    return found


def missing_file(folder: Path, dataset: Any) -> Path | None:
    """A file of a state of the table that is not there, or not as long as it was written."""
    for one in dataset.get_fragments():
        for file in one.metadata.files:
            path = folder / "record.lance" / "data" / str(file.path)
            if not path.exists() or (file.file_size_bytes and path.stat().st_size != file.file_size_bytes):
                return path
        if one.deletion_file() is not None:
            path = folder / "record.lance" / str(one.deletion_file())
            if not path.exists():
                return path
    return None


def embeddings_of(batch: pa.RecordBatch | pa.Table, dim: int) -> np.ndarray:
    """The embedding column as a matrix."""
    column = batch.column("embedding")
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # an empty table has no chunk
        return np.empty((0, dim), np.float32)
    return np.asarray(column.flatten()).reshape(-1, dim)


def require_valid(ids: np.ndarray, embeddings: np.ndarray) -> None:
    """Raise where an id or a vector holds what none can: it would be nearest to nothing, or to everything."""
    _require_ids(ids)
    finite = np.isfinite(embeddings).all(axis=1)
    if not finite.all():
        raise GalleryError(
            f"The vector of item {ids[~finite][0]} is damaged, it is not finite: kedge info --check says what to do."
        )


def _require_ids(ids: np.ndarray) -> None:
    if len(ids) and not 0 <= ids.min() <= ids.max() < _MOST_IDS:
        raise GalleryError("The table is damaged, it holds ids that no item can have: kedge info --check names them.")


def _damaged_rows(rows: pa.RecordBatch | pa.Table, dim: int) -> np.ndarray:
    """Which rows differ from their checksum or hold numbers that none can hold."""
    damaged: np.ndarray = ~np.isfinite(embeddings_of(rows, dim)).all(axis=1)
    ids = np.asarray(rows.column("id"))
    damaged |= (ids < 0) | (ids >= _MOST_IDS)
    if CHECKSUM in rows.schema.names:
        written = rows.column(CHECKSUM).to_numpy(zero_copy_only=False) if len(rows) else np.empty(0)
        # An earlier release leaves the cells empty.
        damaged |= ~np.isnan(written.astype(np.float64)) & (written != row_checksums(rows, dim))
    return damaged


def _values(column: Any) -> list[Any]:
    return column.to_pylist() if isinstance(column, (pa.Array, pa.ChunkedArray)) else list(column)


def _empty(dim: int) -> dict[str, pa.Array]:
    types = {
        "id": pa.int64(),
        "path": pa.string(),
        "label": pa.string(),
        "hash": pa.string(),
        "embedding": pa.list_(pa.float32(), dim),
        "thumbnail": pa.binary(),
        CHECKSUM: pa.int64(),
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


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
