"""Whether the table is as it was written: a CRC-32 checksum of every file, and which version is the last good one.

Checksums tell a damaged disk or an interrupted copy from what was written; they are no protection against forgery.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
from filelock import FileLock, Timeout

from kedge.errors import GalleryError, KedgeError
from kedge.gallery.location import LOCK, Location
from kedge.gallery.schema import CHECKSUM, damaged_rows, first_line, seal_text, unseal_text
from kedge.io import atomic_write

__all__ = ["Integrity", "missing_file", "repair_copy", "wrap_read_errors"]

_FILE = "checksums.json"
_CHUNK = 1 << 22
_CLOCK_SKEW = 1.0
"""Seconds between the clock of a file system and that of a version."""
_LANCE_ERRORS = (ValueError, OSError, RuntimeError, MemoryError, pa.ArrowException)
_log = logging.getLogger(__name__)


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


class Integrity:
    """Compares the table's files with their checksums, once a process: they never change once they are written.

    The rows of a file without one (its writer was killed just then) are compared with their own; those of the first
    release are taken as they are. At a URL nothing is compared: the store has checksums of its own.
    """

    def __init__(self, location: Location, dim: int) -> None:
        self.location = location
        self.dim = dim
        self.inode: int | None = None
        """Of the folder that was last written to: a copy has another one."""
        self.checksums: dict[str, int] = {}
        self._folder = location.folder
        self._mtime = 0
        self._intact: set[str] = set()
        self._lock = threading.RLock()
        self._load()

    # ------------------------------------------------------------------ the files of a version

    def manifests(self) -> dict[int, str]:
        """The manifest of each version."""
        manifests: dict[int, str] = {}
        if self.location.url is not None:
            return manifests
        for name in os.listdir(self._folder / "record.lance" / "_versions"):  # noqa: PTH208 - asked at every new version
            number, _, suffix = name.partition(".")
            if suffix == "manifest" and number.isdigit():
                # Lance counts down from 2^64 - 1, so that the newest is the first.
                version = int(number) if int(number) < 1 << 63 else (1 << 64) - 1 - int(number)
                manifests[version] = f"record.lance/_versions/{name}"
        return manifests

    def files(self, dataset: Any) -> set[str]:
        """The files of a version, but for its manifest."""
        return set[str]().union(*(names for _, names in self._fragments(dataset)))

    def _fragments(self, dataset: Any, data_files: Collection[str] | None = None) -> Iterator[tuple[Any, set[str]]]:
        """Fragments and their files: all, or those whose first data file is one of `data_files`."""
        for fragment in dataset.get_fragments() if self.location.url is None else ():
            if data_files is None or fragment.metadata.files[0].path in data_files:
                names = {f"record.lance/data/{file.path}" for file in fragment.metadata.files}
                if (deletions := fragment.deletion_file()) is not None:
                    names.add(f"record.lance/{deletions}")
                yield fragment, names

    # ------------------------------------------------------------------ comparing

    def damaged(self, names: Iterable[str], *, again: bool = False) -> list[str]:
        """Those of the files that are missing or whose bytes differ; with `again`, even if they did not before."""
        with self._lock:
            names = sorted(names if again else set(names) - self._intact)
            if not self.checksums.keys() >= set(names):
                self._load()
            damaged = [name for name in names if not self._is_intact(name)]
            self._intact |= self.checksums.keys() & names
            self._intact -= set(damaged)
            return damaged

    def _is_intact(self, name: str) -> bool:
        file = self._folder / name
        try:
            # A file without a checksum must at least exist.
            return file.exists() if name not in self.checksums else _file_checksum(file) == self.checksums[name]
        except OSError:
            return False

    def require(self, names: Iterable[str]) -> None:
        """Raise unless all these files are as they were written."""
        if damaged := self.damaged(names):
            more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
            raise GalleryError(
                f"{self._folder} is damaged: {damaged[0]}{more} is missing or not as it was written; "
                "kedge info --check names the items and the last good version."
            )

    def open_latest(self, **options: Any) -> Any:
        """The newest version as a Lance dataset, its manifest and deletions compared."""
        with wrap_read_errors(self.location):
            manifests = self.manifests()
            if manifests and self.damaged([manifests[max(manifests)]]):
                file = self._folder / manifests.pop(max(manifests))
                good = f"version {max(manifests)}" if manifests else "nothing"
                raise GalleryError(f"{self.location} is damaged: move {file} away to go back to {good}.")
            dataset = lance.dataset(self.location.table_uri, **options)
            self.require(name for name in self.files(dataset) if "/_deletions/" in name)
            return dataset

    def verify(self, dataset: Any, data_files: Collection[str] | None = None) -> None:
        """Raise unless these files are as they were written; what was compared before is not compared again."""
        with wrap_read_errors(self.location):
            fragments = [part for part in self._fragments(dataset, data_files) if not part[1] <= self._intact]
            self.require(set[str]().union(*(names for _, names in fragments)))
            for fragment, names in fragments:
                if CHECKSUM in dataset.schema.names and not names <= self._intact:
                    items = self._damaged_items(dataset, fragment)
                    if items is None or items:
                        what = f"item {items[0]} is not as it was written" if items else f"{min(names)} cannot be read"
                        raise GalleryError(f"{self.location} is damaged: {what}; kedge info --check says what to do.")
                self._intact |= names

    def trust(self, data_files: Iterable[str]) -> None:
        """Take files as verified: this process has just written them."""
        self._intact |= {f"record.lance/data/{name}" for name in data_files}

    def check(self, dataset: Any) -> None:
        """Compare a whole version once more; raise an error that names the items and the last good version.

        Rows are compared one by one only in files that differ or that have no checksum.
        """
        with wrap_read_errors(self.location):
            manifest = self.manifests().get(int(dataset.version))
            damaged = set(self.damaged(self.files(dataset) | ({manifest} if manifest else set()), again=True))
            items, unreadable = list[int](), 0
            for fragment, names in self._fragments(dataset):
                if names & damaged or not names <= self.checksums.keys():
                    in_fragment = self._damaged_items(dataset, fragment)
                    if in_fragment is None:
                        unreadable += fragment.physical_rows
                    if in_fragment is None or in_fragment:
                        damaged |= names & damaged or {max(names)}
                        items += in_fragment or []
            if not damaged:
                return
            what = f"{len(damaged)} of the files of its table differ from what was written ({min(damaged)})"
            if items:
                what += f"; damaged items: {', '.join(map(str, sorted(items)[:20]))}{' …' if len(items) > 20 else ''}"
            if unreadable:
                what += f"; {unreadable:,} items cannot be read"
            raise GalleryError(f"{self.location} is damaged: {what}; {self._last_good(damaged)}.")

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

    def _last_good(self, damaged: set[str]) -> str:
        """Which version, the newest such, needs none of these files nor others that differ."""
        for number, manifest in sorted(self.manifests().items(), reverse=True):
            try:
                with wrap_read_errors(self.location):
                    self.require([manifest])
                    dataset = lance.dataset(self.location.table_uri, version=number)
                    names = self.files(dataset) | {manifest}
                    if not names & damaged and not self.damaged(names):
                        items = f"{number} with {dataset.count_rows():,} items"
                        return f"the last good version is {items}, which Gallery.restore brings back"
            except GalleryError:
                continue
        return "no version is whole: bring back a backup"

    # ------------------------------------------------------------------ keeping checksums, under the gallery's lock

    def seal(self, dataset: Any, before: Collection[str], *, prune: bool = False) -> None:
        """Keep the checksums of files written since there were only the files `before`.

        With `prune`, of all files of this version, and forget those that are gone.
        """
        manifests = self.manifests()
        newest_before = max((number for number, name in manifests.items() if name in before), default=0)
        new = {name for number, name in manifests.items() if number > newest_before}
        new |= self.files(dataset) - (set() if prune else set(before))
        gone = [name for name in self.checksums if prune and not (self._folder / name).exists()]
        # What has a checksum never changes: another one would only hide damage.
        new -= self.checksums.keys()
        if new or gone:
            self.update(new, gone)

    def forget_lost_versions(self) -> None:
        """Forget the checksums of versions newer than the newest that exists, whose numbers will be used again.

        Such versions were moved away, or never came with a copy.
        """
        manifests = set(self.manifests().values())
        lost = [name for name in self.checksums if "/_versions/" in name and name not in manifests]
        if lost and self.location.url is None:
            self.update((), lost)

    def update(self, new: Iterable[str], gone: Iterable[str]) -> None:
        """Keep the checksums of new files and forget those of others."""
        with self._lock:
            self._load()
            self._intact -= set(gone)
            kept = {name: checksum for name, checksum in self.checksums.items() if name not in set(gone)}
            self.checksums = kept | {name: _file_checksum(self._folder / name) for name in new}
            self.inode = self._folder.stat().st_ino
            with atomic_write(self._folder / _FILE, at_once=False) as stream:
                stream.write(seal_text(json.dumps({"inode": self.inode, "files": self.checksums}, indent=0)))

    def _load(self) -> None:
        file = self._folder / _FILE
        try:
            mtime = os.stat(file).st_mtime_ns  # noqa: PTH116 - asked at every new version
            if mtime == self._mtime:
                return
            content = json.loads(unseal_text(file.read_bytes()))
            self.checksums = {str(name): int(value) for name, value in content["files"].items()}
            self.inode, self._mtime = int(content["inode"]), mtime
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            _log.warning("%s is damaged, and the table's files are not compared: kedge optimize renews it.", file)


def _file_checksum(file: Path) -> int:
    checksum = 0
    with file.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def missing_file(folder: Path, dataset: Any) -> Path | None:
    """A file of a version of the table that does not exist, or not in its full length."""
    for fragment in dataset.get_fragments():
        sizes = {f"data/{file.path}": file.file_size_bytes for file in fragment.metadata.files}
        if (deletions := fragment.deletion_file()) is not None:
            sizes[deletions] = None
        for name, size in sizes.items():
            file = folder / "record.lance" / name
            if not file.exists() or (size and file.stat().st_size != size):
                return file
    return None


# ---------------------------------------------------------------------- a copy that was made while somebody wrote


def repair_copy(location: Location) -> None:
    """Set aside the versions of a copy that were committed while it was made and whose files it lacks.

    Only these: where a file is missing for another reason, something is damaged, and an older version would hide it.
    """
    if location.url is not None:
        return
    integrity, folder = Integrity(location, dim=0), location.folder
    if integrity.inode in (None, folder.stat().st_ino) or not _incomplete_versions(integrity):
        return  # written here or by the first release, or whole
    try:
        with FileLock(folder / LOCK, timeout=0):
            incomplete = _incomplete_versions(integrity)
            # Their numbers will be used again, for other versions.
            integrity.update((), incomplete)
            (folder / "record.lance" / "_versions" / "latest_version_hint.json").unlink(missing_ok=True)
            (folder / "incomplete").mkdir(exist_ok=True)
            for name in incomplete:
                shutil.move(folder / name, folder / "incomplete" / Path(name).name)
    except (Timeout, OSError) as error:
        raise GalleryError(
            f"{location} was copied while it was written, and cannot be completed now: {error}."
        ) from error
    _log.warning("%s was copied while it was written: its last %d versions are left out.", folder, len(incomplete))


def _incomplete_versions(integrity: Integrity) -> list[str]:
    """The manifests of the newest versions that lack files and were committed when the copy had begun."""
    folder, incomplete = integrity.location.folder, list[str]()
    copy_began: float | None = None
    for number, manifest in sorted(integrity.manifests().items(), reverse=True):
        try:
            dataset = lance.dataset(integrity.location.table_uri, version=number)
            if missing_file(folder, dataset) is None:
                return incomplete
            versions: list[Any] = dataset.versions()
            committed = next(entry["timestamp"] for entry in versions if entry["version"] == number).timestamp()
        except (ValueError, OSError, RuntimeError):
            return incomplete  # damaged, which its readers report
        copy_began = copy_began or min(file.stat().st_ctime for file in folder.rglob("*") if file.is_file())
        if committed < copy_began - _CLOCK_SKEW:
            return incomplete
        incomplete.append(manifest)
    return []  # not one is whole
