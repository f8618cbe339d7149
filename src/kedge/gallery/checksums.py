"""CRC-32 checksums of what a gallery keeps on disk: damaged bytes are noticed before they are searched.

They tell a damaged disk or an interrupted copy from what was written; they are no protection against forgery.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from kedge.errors import GalleryError
from kedge.io import atomic_write

__all__ = [
    "CHECKSUM",
    "BlockChecksums",
    "DamagedLists",
    "FileChecksums",
    "block_checksums",
    "json_checksum",
    "row_checksums",
    "seal_text",
    "unseal_text",
]

CHECKSUM = "checksum"
"""The column of the table with the checksum of each row, and the key of a JSON file with that of its other keys."""
BLOCK = 256
"""Rows of the inverted lists that share a checksum."""
_FILE = "checksums.json"
_CHUNK = 1 << 22
_log = logging.getLogger(__name__)


class DamagedLists(GalleryError):
    """Inverted lists whose bytes are not those that were written: they are rebuilt from the table."""


# ---------------------------------------------------------------------- JSON


def json_checksum(values: Mapping[str, Any]) -> int:
    """The checksum of a JSON object without its own entry, whatever the order and spacing of the file."""
    rest = {name: value for name, value in values.items() if name != CHECKSUM}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def seal_text(text: str) -> bytes:
    """A text behind a line with its checksum."""
    content = text.encode()
    return f"{zlib.crc32(content):08x}\n".encode() + content


def unseal_text(content: bytes) -> bytes:
    """The text behind the checksum; a ValueError where they do not agree."""
    checksum, _, text = content.partition(b"\n")
    if checksum != f"{zlib.crc32(text):08x}".encode():
        raise ValueError("The checksum differs.")
    return text


# ---------------------------------------------------------------------- rows of the table


def row_checksums(rows: pa.RecordBatch | pa.Table, dim: int) -> np.ndarray:
    """The checksum of each row of the table, over all columns that have a value.

    A column that was added later is empty for the rows before it, and so changes nothing for them.
    """
    checksums = [0] * len(rows)
    if not checksums:
        return np.empty(0, np.int64)
    for name in sorted(set(rows.schema.names) - {CHECKSUM}):
        column, key = rows.column(name), zlib.crc32(name.encode())
        if column.null_count == len(rows):
            continue
        if pa.types.is_temporal(column.type):  # as a number: how Python shows it depends on what is installed
            column = column.cast(pa.int32() if column.type.bit_width == 32 else pa.int64())
        cells: Iterable[bytes | memoryview | None]
        if name == "embedding":
            flat = column.combine_chunks().flatten() if isinstance(column, pa.ChunkedArray) else column.flatten()
            content = np.ascontiguousarray(flat, dtype="<f4").data.cast("B")
            width = 4 * dim
            cells = (content[start : start + width] for start in range(0, width * len(rows), width))
        else:
            cells = map(_encode_cell, column.to_pylist())
        for row, cell in enumerate(cells):
            if cell is not None:
                checksums[row] = zlib.crc32(cell, checksums[row] ^ key)
    return np.array(checksums, dtype=np.int64)


def _encode_cell(value: Any) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, (str, int, float)):
        return str(value).encode("utf-8", "surrogatepass")
    return json.dumps(value, sort_keys=True, default=str).encode()


# ---------------------------------------------------------------------- inverted lists


def block_checksums(arrays: Sequence[np.ndarray], rows: int) -> np.ndarray:
    """One checksum for every `BLOCK` rows of arrays that lie side by side."""
    return np.array([_block_checksum(arrays, start) for start in range(0, rows, BLOCK)], dtype=np.uint32)


def _block_checksum(arrays: Sequence[np.ndarray], start: int) -> int:
    checksum = 0
    for array in arrays:
        checksum = zlib.crc32(array[start : start + BLOCK].data, checksum)
    return checksum


class BlockChecksums:
    """Memory-mapped arrays whose bytes are compared with their checksums once, before they are first used."""

    def __init__(
        self, rows: Sequence[np.ndarray], checksums: np.ndarray, arrays: Sequence[tuple[np.ndarray, int]]
    ) -> None:
        self._rows = rows
        self._checksums = checksums
        self._intact = np.zeros(len(checksums), bool)
        self._arrays = arrays
        """Those that every search reads, with a checksum each."""
        self.all_intact = False

    def check(self, start: int, end: int) -> None:
        """Compare the blocks that hold these rows, unless they were compared before."""
        for array, checksum in self._arrays:
            if zlib.crc32(array.data) != checksum:
                raise DamagedLists("The inverted lists are damaged: their anchors are not those that were written.")
        self._arrays = []
        for block in range(start // BLOCK, -(-end // BLOCK)):
            if not self._intact[block]:
                if _block_checksum(self._rows, block * BLOCK) != self._checksums[block]:
                    raise DamagedLists("The inverted lists are damaged: their bytes are not those that were written.")
                self._intact[block] = True

    def check_all(self) -> None:
        """Compare everything that was not compared before."""
        if not self.all_intact:
            self.check(0, BLOCK * len(self._checksums))
            self.all_intact = True


# ---------------------------------------------------------------------- files of the table


class FileChecksums:
    """Checksums of the table's files, which never change once they are written: one comparison per process will do.

    Files without one (of the first releases, or of a writer that was killed just then) are taken as they are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.inode: int | None = None
        """Of the folder that was last written to: a copy has another one."""
        self._file = folder / _FILE
        self._mtime = 0
        self._checksums: dict[str, int] = {}
        self._intact: set[str] = set()
        self._lock = threading.RLock()
        self._load()

    def pending(self, names: Iterable[str]) -> int:
        """Bytes of those files that are still to be compared."""
        files = [self.folder / name for name in set(names) - self._intact]
        return sum(file.stat().st_size for file in files if file.exists())

    def damaged(self, names: Iterable[str], *, again: bool = False) -> list[str]:
        """Those of the files that are missing or whose bytes differ; with `again`, even if they did not before."""
        with self._lock:
            names = sorted(names if again else set(names) - self._intact)
            if any(name not in self._checksums for name in names):
                self._load()
            damaged = [name for name in names if not self._is_intact(name)]
            self._intact |= set(names)
            self._intact -= set(damaged)
            return damaged

    def _is_intact(self, name: str) -> bool:
        file = self.folder / name
        try:
            # A file without a checksum must at least exist.
            return file.exists() if name not in self._checksums else _file_checksum(file) == self._checksums[name]
        except OSError:
            return False

    def require(self, names: Iterable[str]) -> None:
        """Raise unless all these files are as they were written."""
        if damaged := self.damaged(names):
            more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
            raise GalleryError(
                f"{self.folder} is damaged: {damaged[0]}{more} is missing or not as it was written; "
                "kedge info --check names the items and the last good version."
            )

    def known(self, name: str) -> bool:
        """Whether this file has a checksum."""
        return name in self._checksums

    def names(self) -> list[str]:
        """The files that have a checksum."""
        return list(self._checksums)

    def add(self, names: Iterable[str], gone: Iterable[str] = ()) -> None:
        """Keep the checksums of new files and forget those of others. The caller must hold the gallery's lock."""
        with self._lock:
            self._load()
            for name in gone:
                self._checksums.pop(name, None)
                self._intact.discard(name)
            self._checksums |= {name: _file_checksum(self.folder / name) for name in names}
            self.inode = self.folder.stat().st_ino
            with atomic_write(self._file, at_once=False) as stream:
                stream.write(seal_text(json.dumps({"inode": self.inode, "files": self._checksums}, indent=0)))

    def _load(self) -> None:
        try:
            mtime = os.stat(self._file).st_mtime_ns  # noqa: PTH116 - asked at every new version
            if mtime == self._mtime:
                return
            content = json.loads(unseal_text(self._file.read_bytes()))
            self._checksums = {str(name): int(value) for name, value in content["files"].items()}
            self.inode, self._mtime = int(content["inode"]), mtime
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            _log.warning("%s is damaged, and the table's files are not compared: kedge optimize renews it.", self._file)


def _file_checksum(file: Path) -> int:
    checksum = 0
    with file.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK):
            checksum = zlib.crc32(chunk, checksum)
    return checksum
