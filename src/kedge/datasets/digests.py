"""SHA-256 of files, remembered by path, size and time: a file that did not change is read once."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import time
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from pathlib import Path

from kedge.datasets.download import data_root
from kedge.images import prefetch

__all__ = ["FileState", "file_digests", "file_state", "known_digests", "remember_digests"]

FileState = tuple[int, int]
"""Size in bytes, and time of the last change in nanoseconds."""
_FRESH = 2_000_000_000
"""A file changed within the last two seconds may change again and keep its time, so it is not remembered."""
_FILE = "digests.sqlite"
_TABLE = "CREATE TABLE IF NOT EXISTS digests (path BLOB PRIMARY KEY, digest TEXT, seal TEXT)"


def file_state(file: str | Path) -> FileState:
    """What changes when a file does: its size and time; reading one that is not there will say why."""
    try:
        status = os.stat(file)  # noqa: PTH116 - Path.stat costs twice as much
    except OSError:
        return -1, 0
    return status.st_size, status.st_mtime_ns


def file_digests(files: Sequence[str | Path]) -> list[str]:
    """The SHA-256 of each file's content, 64 hexadecimal digits; OSError where one cannot be read."""
    digests, states = known_digests(files)
    missing = [row for row, digest in enumerate(digests) if digest is None]
    for row, digest in zip(missing, prefetch(_hash, (files[row] for row in missing)), strict=True):
        digests[row] = digest
    remember_digests((files[row], states[row], digests[row]) for row in missing)
    return [digest for digest in digests if digest is not None]


def known_digests(files: Sequence[str | Path]) -> tuple[list[str | None], list[FileState]]:
    """The digests of those files that are as they were when they were hashed; and the state of all files."""
    states = [file_state(file) for file in files]
    digests: list[str | None] = [None] * len(files)
    with suppress(OSError, sqlite3.Error), closing(_connect()) as memo:  # else they are hashed anew
        for row, (key, state) in enumerate(zip(map(_key, files), states, strict=True)):
            known = memo.execute("SELECT digest, seal FROM digests WHERE path = ?", (key,)).fetchone()
            if known is not None and known[1] == _seal(key, state, known[0]):
                digests[row] = known[0]
    return digests, states


def remember_digests(hashed: Iterable[tuple[str | Path, FileState, str | None]]) -> None:
    """Remember the digests of files, whose state was taken before they were read."""
    now = time.time_ns()
    rows = [
        (key := _key(file), digest, _seal(key, state, digest))
        for file, state, digest in hashed
        if digest and now - state[1] > _FRESH
    ]
    try:
        if rows:
            with closing(_connect()) as memo, memo:
                memo.executemany("INSERT OR REPLACE INTO digests VALUES (?, ?, ?)", rows)
    except (OSError, sqlite3.OperationalError):
        pass  # a full disk, or somebody who writes for long
    except sqlite3.DatabaseError:
        with suppress(OSError):  # damaged: a new one is begun next time
            (data_root() / _FILE).unlink()


def _connect() -> sqlite3.Connection:
    folder = data_root()
    folder.mkdir(parents=True, exist_ok=True)
    memo = sqlite3.connect(folder / _FILE, timeout=30)
    memo.execute(_TABLE)
    return memo


def _key(file: str | Path) -> bytes:
    # Most are absolute, and to make a Path of each takes longer than all else.
    return os.fsencode(file if str(file)[:1] == os.sep else Path(file).absolute())


def _seal(key: bytes, state: FileState, digest: object) -> str:
    """Checksum of a row: one that was damaged, or written for another state of the file, has another."""
    return hashlib.blake2b(repr((key, state, digest)).encode(), digest_size=16).hexdigest()


def _hash(file: str | Path) -> str:
    with Path(file).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
