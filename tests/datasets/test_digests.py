from __future__ import annotations

import hashlib
import os
import sqlite3
from pathlib import Path

import pytest

from kedge.datasets import digests
from kedge.datasets.digests import file_digests


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Three files of last year, one with a name that is no text, and a data root of the test's own."""
    monkeypatch.setenv("KEDGE_DATA", str(tmp_path / "data"))
    files = [tmp_path / "a", tmp_path / "größe", Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))]
    for number, file in enumerate(files):
        file.write_bytes(bytes([number]) * 1000)
        os.utime(file, (1e9, 1e9))
    return files


def expected(files: list[Path]) -> list[str]:
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def test_a_file_is_hashed_again_only_where_it_changed(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert file_digests(files) == expected(files)
    read: list[str | Path] = []
    monkeypatch.setattr(digests, "_hash", lambda file: read.append(file) or expected([Path(file)])[0])
    assert file_digests(files) == expected(files)
    assert read == []
    files[1].write_bytes(b"\x09" * 1000)  # of the same size
    assert file_digests(files) == expected(files)
    assert read == [files[1]]


def test_a_file_of_just_now_is_not_remembered(files: list[Path]) -> None:
    """It may be written again and keep its time."""
    files[0].write_bytes(b"one")
    stamp = files[0].stat().st_mtime_ns
    assert file_digests(files) == expected(files)
    files[0].write_bytes(b"two")
    os.utime(files[0], ns=(stamp, stamp))
    assert file_digests(files) == expected(files)


def test_a_damaged_memo_is_hashed_anew_and_replaced(files: list[Path], tmp_path: Path) -> None:
    file_digests(files)
    memo = tmp_path / "data/digests.sqlite"
    with sqlite3.connect(memo) as connection:
        wrong = hashlib.sha256(b"another").hexdigest()
        connection.execute("UPDATE digests SET digest = ? WHERE path = ?", (wrong, os.fsencode(files[0])))
    connection.close()
    assert file_digests(files) == expected(files)
    memo.write_bytes(b"no database" * 1000)
    assert file_digests(files) == expected(files)
    assert not memo.exists()
    assert file_digests(files) == expected(files)
    assert digests.known_digests(files)[0] == expected(files)


def test_a_data_root_that_cannot_be_written(files: list[Path], tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")
    assert file_digests(files) == expected(files)


def test_a_file_that_is_not_there(files: list[Path], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        file_digests([*files, tmp_path / "nothing"])
