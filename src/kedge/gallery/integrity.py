"""Whether the table is as it was written: a CRC-32 checksum of every file, and which version is the last good one.

Checksums tell a damaged disk or an interrupted copy from what was written; they are no protection against forgery.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
from filelock import FileLock, Timeout

from kedge.errors import GalleryError, KedgeError
from kedge.gallery.distances import in_threads
from kedge.gallery.location import LOCK, Location
from kedge.gallery.schema import CHECKSUM, damaged_rows, seal_json, unseal_json
from kedge.io import atomic_write

__all__ = ["Integrity", "system_reason", "wrap_read_errors"]

_FILE = "checksums.json"
_CHUNK = 1 << 18
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
        raise GalleryError(
            f"The table of gallery '{location}' cannot be read{system_reason(error)}; run kedge info --check."
        ) from error


def system_reason(error: BaseException) -> str:
    """In brackets, why the system refused something, also through Lance, which says the rest about its own source."""
    wrapped = re.search(r"([\w ]+) \(os error \d+\)", str(error))
    reason = getattr(error, "strerror", None) or (wrapped[1].strip() if wrapped else "")
    reason = "out of memory" if isinstance(error, MemoryError) else reason
    return f" ({reason})" if reason else ""


class Integrity:
    """Compares the table's files with their checksums, once a process: they never change once they are written.

    The rows of a file without one (its writer was killed just then) are compared with their own; those of the first
    release are taken as they are. At a URL nothing is compared: the store has checksums of its own.
    """

    def __init__(self, location: Location) -> None:
        self.location = location
        self.checksums: dict[str, int] = {}
        self._inode: int | None = None
        """Of the folder that was last written to: a copy has another one."""
        self._folder = location.folder
        self._mtime = 0
        self._intact: set[str] = set()
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
        """The files of a version, its manifest among them."""
        manifest = {name for number, name in self.manifests().items() if number == dataset.version}
        return manifest.union(*(names for _, names in self._fragments(dataset)))

    def _fragments(self, dataset: Any, data_files: Collection[str] | None = None) -> Iterator[tuple[Any, set[str]]]:
        """Fragments and their files: all, or those whose first data file is one of `data_files`."""
        for fragment in dataset.get_fragments() if self.location.url is None else ():
            if data_files is None or fragment.metadata.files[0].path in data_files:
                names = {f"record.lance/data/{file.path}" for file in fragment.metadata.files}
                if (deletions := fragment.deletion_file()) is not None:
                    names.add(f"record.lance/{deletions}")
                yield fragment, names

    def missing_file(self, dataset: Any) -> Path | None:
        """A file of a version that does not exist, or not in its full length."""
        for fragment, names in self._fragments(dataset):
            sizes = {f"record.lance/data/{file.path}": file.file_size_bytes for file in fragment.metadata.files}
            for name in names:
                file, size = self._folder / name, sizes.get(name)
                if not file.exists() or (size and file.stat().st_size != size):
                    return file
        return None

    # ------------------------------------------------------------------ comparing

    def damaged(self, names: Iterable[str], *, again: bool = False) -> list[str]:
        """Those of the files that are missing or whose bytes differ; with `again`, even if they did not before."""
        names = set(names) if again else set(names) - self._intact
        if not self.checksums.keys() >= names:
            self._load()
        compared = in_threads(lambda name: (name, _is_intact(self._folder / name, self.checksums.get(name))), [*names])
        damaged = sorted(name for name, is_intact in compared if not is_intact)
        self._intact = (self._intact | (self.checksums.keys() & names)) - set(damaged)
        return damaged

    def require(self, names: Iterable[str]) -> None:
        """Raise unless all these files are as they were written."""
        if damaged := self.damaged(names):
            raise self._error(damaged, "run kedge info --check to see the items and the last good version")

    def _error(self, damaged: Collection[str], *more: str) -> GalleryError:
        others = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        what = f"{min(damaged)}{others} is missing or differs from its checksum"
        return GalleryError(f"Gallery '{self.location}' is damaged: {'; '.join((what, *more))}.")

    def open_latest(self, **options: Any) -> Any:
        """The newest version as a Lance dataset, its manifest and deletions compared."""
        with wrap_read_errors(self.location):
            manifests = self.manifests()
            if manifests and self.damaged([manifests[max(manifests)]]):
                file = self._folder / manifests.pop(max(manifests))
                good = f"version {max(manifests)}" if manifests else "nothing"
                raise GalleryError(f"Gallery '{self.location}' is damaged; move {file} away to go back to {good}.")
            dataset = lance.dataset(self.location.table_uri, **options)
            self.require(name for name in self.files(dataset) if "/_deletions/" in name)
            return dataset

    def verify(self, dataset: Any, data_files: Collection[str] | None = None, *, again: bool = False) -> None:
        """Raise unless a version, or some data files of it, is as it was written; name items and last good version.

        What was compared before is compared only `again`. Rows are compared one by one in files that differ, so as to
        name them, or that have no checksum.
        """
        with wrap_read_errors(self.location):
            damaged = set(self.damaged(self.files(dataset), again=True)) if again else set[str]()
            damaged_items, unreadable = list[int](), 0
            for fragment, names in self._fragments(dataset, data_files):
                if not again and names <= self._intact:
                    continue
                differing = names & damaged if again else set(self.damaged(names))
                has_checksums = names <= self.checksums.keys() or not (again or CHECKSUM in dataset.schema.names)
                if differing or not has_checksums:
                    items = self._damaged_items(dataset, fragment)
                    if items is None:
                        unreadable += fragment.physical_rows
                    if items is None or items:
                        differing = differing or {max(names)}
                        damaged_items += items or []
                damaged |= differing
                if not differing:
                    self._intact |= names
            if not damaged:
                return
            more = []
            if damaged_items:
                listed = ", ".join(map(str, sorted(damaged_items)[:20]))
                more.append(f"damaged items: {listed}{' …' if len(damaged_items) > 20 else ''}")
            if unreadable:
                more.append(f"{unreadable:,} items cannot be read")
            raise self._error(damaged, *more, self._last_good(damaged))

    def trust(self, data_files: Iterable[str]) -> None:
        """Take files as verified: this process has just written them."""
        self._intact |= {f"record.lance/data/{name}" for name in data_files}

    def _damaged_items(self, dataset: Any, fragment: Any) -> list[int] | None:
        """The ids of rows that differ from their checksum; None where the rows cannot be read."""
        items: list[int] = []
        try:
            with wrap_read_errors(self.location):
                scanner = dataset.scanner(fragments=[fragment], batch_size=8192, io_buffer_size=32 << 20)
                for batch in scanner.to_batches():
                    items += np.asarray(batch.column("id"))[damaged_rows(batch)].tolist()
        except GalleryError:
            return None
        return items

    def _last_good(self, damaged: set[str]) -> str:
        """Which version, the newest such, needs none of these files nor others that differ."""
        for number, manifest in sorted(self.manifests().items(), reverse=True):
            with suppress(GalleryError), wrap_read_errors(self.location):
                self.require([manifest])
                dataset = lance.dataset(self.location.table_uri, version=number)
                names = self.files(dataset)
                if not names & damaged and not self.damaged(names):
                    items = f"{number} with {dataset.count_rows():,} items"
                    return f"the last good version is {items}, which kedge restore brings back"
        return "no version is intact: restore a backup"

    # ------------------------------------------------------------------ keeping checksums, under the gallery's lock

    def seal(self, dataset: Any, before: Collection[str], *, prune: bool = False) -> None:
        """Keep the checksums of files written since there were only the files `before`.

        With `prune`, of all files of this version, and forget those that are gone.
        """
        manifests = self.manifests()
        newest_before = max((number for number, name in manifests.items() if name in before), default=0)
        new = {name for number, name in manifests.items() if number > newest_before}
        new |= self.files(dataset) - (set() if prune else set(before))
        gone = {name for name in self.checksums if prune and not (self._folder / name).exists()}
        # What has a checksum never changes: another one would only hide damage.
        self._update(new - self.checksums.keys(), gone)

    def forget_lost_versions(self) -> None:
        """Forget the checksums of versions newer than the newest that exists, whose numbers will be used again.

        Such versions were moved away, or never came with a copy.
        """
        if self.location.url is None:
            lost = {name for name in self.checksums if "/_versions/" in name}
            self._update(set(), lost - set(self.manifests().values()))

    def _update(self, new: set[str], gone: set[str]) -> None:
        """Keep the checksums of new files and forget those of others."""
        if not new and not gone:
            return
        self._load()
        self._intact -= gone
        kept = {name: checksum for name, checksum in self.checksums.items() if name not in gone}
        self.checksums = kept | dict(in_threads(lambda name: (name, _file_checksum(self._folder / name)), [*new]))
        self._intact |= new
        self._inode = self._folder.stat().st_ino
        with atomic_write(self._folder / _FILE, at_once=False) as stream:
            stream.write(seal_json({"inode": self._inode, "files": self.checksums}, indent=0))

    def _load(self) -> None:
        file = self._folder / _FILE
        try:
            mtime = os.stat(file).st_mtime_ns  # noqa: PTH116 - asked at every new version
            if mtime == self._mtime:
                return
            content = unseal_json(file.read_bytes())
            self.checksums = {str(name): int(value) for name, value in content["files"].items()}
            self._inode, self._mtime = int(content["inode"]), mtime
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            _log.warning("%s is damaged, so the table's files are not checked; kedge optimize renews it.", file)

    # ------------------------------------------------------------------ a copy that was made while somebody wrote

    def repair_copy(self) -> None:
        """Set aside the versions of a copy that were committed while it was made and whose files it lacks.

        Only these: where a file is missing for another reason, something is damaged, and an older version would hide
        it. A folder that was written here or by the first release is no such copy.
        """
        folder = self._folder
        if self.location.url is not None or self._inode in (None, folder.stat().st_ino):
            return
        if not self._incomplete_versions():
            return
        try:
            with FileLock(folder / LOCK, timeout=0):
                incomplete = self._incomplete_versions()
                (folder / "record.lance" / "_versions" / "latest_version_hint.json").unlink(missing_ok=True)
                (folder / "incomplete").mkdir(exist_ok=True)
                for name in incomplete:
                    shutil.move(folder / name, folder / "incomplete" / Path(name).name)
        except (Timeout, OSError) as error:
            raise GalleryError(
                f"{self.location} was copied while it was being written, and cannot be repaired now: {error}."
            ) from error
        _log.warning(
            "%s was copied while it was being written; its last %d versions are left out.", folder, len(incomplete)
        )

    def _incomplete_versions(self) -> list[str]:
        """The manifests of the newest versions that lack files and were committed when the copy had begun."""
        incomplete: list[str] = []
        for number, manifest in sorted(self.manifests().items(), reverse=True):
            try:
                dataset = lance.dataset(self.location.table_uri, version=number)
                if self.missing_file(dataset) is None:
                    return incomplete
                versions: list[Any] = dataset.versions()
                committed = next(entry["timestamp"] for entry in versions if entry["version"] == number).timestamp()
            except (ValueError, OSError, RuntimeError):
                return incomplete  # damaged, which its readers report
            copy_began = min(file.stat().st_ctime for file in self._folder.rglob("*") if file.is_file())
            if committed < copy_began - _CLOCK_SKEW:
                return incomplete
            incomplete.append(manifest)
        return []  # not one is whole


def _is_intact(file: Path, checksum: int | None) -> bool:
    """Whether a file has this checksum; one without a checksum must at least exist."""
    try:
        return file.exists() if checksum is None else _file_checksum(file) == checksum
    except OSError:
        return False


def _file_checksum(file: Path) -> int:
    checksum, chunk = 0, memoryview(bytearray(_CHUNK))
    with file.open("rb", buffering=0) as stream:
        while size := stream.readinto(chunk):
            checksum = zlib.crc32(chunk[:size], checksum)
    return checksum
