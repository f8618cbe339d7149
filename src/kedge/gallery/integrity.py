"""Whether the table is as it was written: checksums of its files and rows, and the last good version."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import lance
import numpy as np
import pyarrow as pa

from kedge.errors import GalleryError, KedgeError
from kedge.gallery.checksums import CHECKSUM, FileChecksums
from kedge.gallery.location import Location
from kedge.gallery.schema import damaged_rows, first_line

__all__ = ["Damage", "Integrity", "manifests_of", "missing_file", "wrap_read_errors"]

_LANCE_ERRORS = (ValueError, OSError, RuntimeError, MemoryError, pa.ArrowException)


class Damage(NamedTuple):
    """What is not as it was written: files, the items in them, and the newest version without any of these files."""

    files: list[str]
    items: list[int]
    unreadable: int
    """Rows that cannot be read at all."""
    last_good: tuple[int, int] | None
    """Its number, and how many items it holds."""

    def sentence(self, where: object) -> str:
        """What is damaged and what to do."""
        what = f"{len(self.files)} of the files of its table differ from what was written ({self.files[0]})"
        if self.items:
            what += f"; damaged items: {', '.join(map(str, self.items[:20]))}{' …' if len(self.items) > 20 else ''}"
        if self.unreadable:
            what += f"; {self.unreadable:,} items cannot be read"
        if self.last_good is None:
            return f"{where} is damaged: {what}; no version is whole: bring back a backup."
        number, items = self.last_good
        good = f"the last good version is {number} with {items:,} items, which Gallery.restore brings back"
        return f"{where} is damaged: {what}; {good}."


class Integrity:
    """Compares versions of a table with checksums; at a URL nothing is compared, the store has checksums of its own."""

    def __init__(self, location: Location, dim: int) -> None:
        self.location = location
        self.dim = dim
        self.checksums = FileChecksums(location.folder)
        self._verified_rows: set[frozenset[str]] = set()
        """Files of those fragments whose rows were compared one by one."""

    def manifests(self) -> dict[int, str]:
        """The manifest of each version."""
        return {} if self.location.url is not None else manifests_of(self.location.folder)

    def files(self, dataset: Any, *, deletions_only: bool = False) -> set[str]:
        """The files of a version, but for its manifest."""
        names = set[str]().union(*(names for _, names in self._fragments(dataset)))
        return {name for name in names if name.startswith("record.lance/_deletions/")} if deletions_only else names

    def _fragments(self, dataset: Any, data_files: Collection[str] | None = None) -> Iterator[tuple[Any, set[str]]]:
        """Fragments and their files: all, or those whose first data file is one of `data_files`."""
        if self.location.url is not None:
            return
        for fragment in dataset.get_fragments():
            if data_files is None or fragment.metadata.files[0].path in data_files:
                names = {f"record.lance/data/{file.path}" for file in fragment.metadata.files}
                if (deletions := fragment.deletion_file()) is not None:
                    names.add(f"record.lance/{deletions}")
                yield fragment, names

    def require_newest(self) -> None:
        """Raise where the newest manifest is damaged."""
        manifests = self.manifests()
        if manifests and self.checksums.damaged([manifests[max(manifests)]]):
            file = self.location.folder / manifests.pop(max(manifests))
            good = f"version {max(manifests)}" if manifests else "nothing"
            raise GalleryError(f"{self.location} is damaged: move {file} away to go back to {good}.")

    def verify(self, dataset: Any, data_files: Collection[str] | None = None) -> None:
        """Compare files with their checksums, unless this process has done so; raise where one differs.

        Of a file that has none, since its writer was killed just then, each row is compared with its own.
        """
        with wrap_read_errors(self.location):
            fragments = list(self._fragments(dataset, data_files))
            self.checksums.require(set[str]().union(*(names for _, names in fragments)))
            if CHECKSUM not in dataset.schema.names:
                return
            for fragment, names in fragments:
                if all(map(self.checksums.known, names)) or frozenset(names) in self._verified_rows:
                    continue
                items = self._damaged_items(dataset, fragment)
                if items is None or items:
                    file = fragment.metadata.files[0].path
                    what = f"{file} cannot be read" if items is None else f"item {items[0]} is not as it was written"
                    raise GalleryError(f"{self.location} is damaged: {what}; kedge info --check says what to do.")
                self._verified_rows.add(frozenset(names))

    def trust(self, data_files: Collection[str]) -> None:
        """Take the rows of a fragment as verified: this process has just written them."""
        self._verified_rows.add(frozenset(f"record.lance/data/{name}" for name in data_files))

    def seal(self, dataset: Any, before: Collection[str], *, prune: bool = False) -> None:
        """Keep the checksums of files written since there were only the files `before`.

        With `prune`, of all files of this version, and forget those that are gone. The caller must hold the lock.
        """
        manifests = self.manifests()
        known = max((number for number, name in manifests.items() if name in before), default=0)
        new = {name for number, name in manifests.items() if number > known}
        new |= self.files(dataset) - (set() if prune else set(before))
        gone = [name for name in self.checksums.names() if prune and not (self.location.folder / name).exists()]
        # What has a checksum never changes: another one would only hide damage.
        new = {name for name in new if not self.checksums.known(name)}
        if new or gone:
            self.checksums.add(new, gone)

    def forget_lost_versions(self) -> None:
        """Forget the checksums of versions newer than the newest that exists, whose numbers will be used again.

        Such versions were moved away, or never came with a copy. The caller must hold the gallery's lock.
        """
        manifests = set(self.manifests().values())
        lost = [name for name in self.checksums.names() if "/_versions/" in name and name not in manifests]
        if lost and self.location.url is None:
            self.checksums.add((), lost)

    def check(self, dataset: Any, manifest: str | None) -> Damage | None:
        """Compare a whole version with its checksums, also what was compared before; None where all is well.

        Rows are compared one by one only in files that differ or that have no checksum.
        """
        with wrap_read_errors(self.location):
            names = self.files(dataset) | ({manifest} if manifest is not None else set())
            damaged = set(self.checksums.damaged(names, again=True))
            items: list[int] = []
            unreadable = 0
            for fragment, names in self._fragments(dataset):
                if not names & damaged and all(map(self.checksums.known, names)):
                    continue
                rows = self._damaged_items(dataset, fragment)
                if rows is None:
                    unreadable += fragment.physical_rows
                items += rows or []
                if rows is None or rows:
                    damaged |= names & damaged or {sorted(names)[-1]}
            if not damaged:
                return None
            return Damage(sorted(damaged), sorted(items), unreadable, self._last_good(damaged))

    def _damaged_items(self, dataset: Any, fragment: Any) -> list[int] | None:
        """The ids of rows that differ from their checksum; None where the rows cannot be read."""
        items: list[int] = []
        try:
            with wrap_read_errors(self.location):
                scanner = dataset.scanner(fragments=[fragment], batch_size=8192, io_buffer_size=32 << 20)
                for batch in scanner.to_batches():
                    items += np.asarray(batch.column("id"))[damaged_rows(batch, self.dim)].tolist()
        except GalleryError:
            return None
        return items

    def _last_good(self, damaged: set[str]) -> tuple[int, int] | None:
        """The newest version that needs none of these files, nor others that differ."""
        manifests = self.manifests()
        for number in sorted(manifests, reverse=True):
            try:
                with wrap_read_errors(self.location):
                    self.checksums.require([manifests[number]])
                    dataset = lance.dataset(self.location.table_uri, version=number)
                    names = self.files(dataset)
                    if not (names | {manifests[number]}) & damaged and not self.checksums.damaged(names):
                        return number, int(dataset.count_rows())
            except GalleryError:
                continue
        return None


@contextmanager
def wrap_read_errors(location: Location) -> Iterator[None]:
    """Errors of Lance while the table is read, as `GalleryError`: they are the gallery's, not the query's."""
    try:
        yield
    except KedgeError:
        raise
    except BaseException as error:
        # Lance panics where its own files contradict themselves.
        if not isinstance(error, _LANCE_ERRORS) and type(error).__name__ != "PanicException":
            raise
        raise GalleryError(f"The table of {location} cannot be read: {first_line(error)}") from error


def manifests_of(folder: Path) -> dict[int, str]:
    """The manifest of each version of the gallery in a folder."""
    manifests = {}
    for name in os.listdir(folder / "record.lance" / "_versions"):  # noqa: PTH208 - asked at every new version
        number, _, suffix = name.partition(".")
        if suffix == "manifest" and number.isdigit():
            # Lance counts down from 2^64 - 1, so that the newest is the first.
            version = int(number) if int(number) < 1 << 63 else (1 << 64) - 1 - int(number)
            manifests[version] = f"record.lance/_versions/{name}"
    return manifests


def missing_file(folder: Path, dataset: Any) -> Path | None:
    """A file of a version of the table that does not exist, or not in its full length."""
    for fragment in dataset.get_fragments():
        for file in fragment.metadata.files:
            path = folder / "record.lance" / "data" / str(file.path)
            if not path.exists() or (file.file_size_bytes and path.stat().st_size != file.file_size_bytes):
                return path
        if fragment.deletion_file() is not None:
            path = folder / "record.lance" / str(fragment.deletion_file())
            if not path.exists():
                return path
    return None
