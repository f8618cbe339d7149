"""Fetching a dataset's files: whole and checked, or not at all."""

from __future__ import annotations

import hashlib
import http.client
import io
import os
import shutil
import stat
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from kedge.console import stderr
from kedge.errors import DataError, DownloadError
from kedge.io import atomic_write

__all__ = ["Source", "data_root", "extract", "fetch", "obtain", "read_lines", "without_downloads"]

ATTEMPTS = 4
PAUSE = 1.0
"""Seconds before the second attempt; it doubles with each further one."""
_TIMEOUT = 30.0
_CHUNK = 1 << 20
_allowed: ContextVar[bool] = ContextVar("downloads", default=True)


@dataclass(frozen=True)
class Source:
    """Where a file comes from, and its checksum: ``md5:...`` or ``sha256:...``."""

    url: str
    checksum: str

    @property
    def filename(self) -> str:
        """The file's name, as in the URL."""
        return PurePosixPath(self.url).name


def data_root(root: str | Path | None = None) -> Path:
    """Where datasets are kept: ``root``, or $KEDGE_DATA, or ~/.cache/kedge/datasets."""
    return Path(root or os.environ.get("KEDGE_DATA") or "~/.cache/kedge/datasets").expanduser()


def obtain(source: Source, folder: Path) -> Path:
    """The folder with an archive's contents: fetched and extracted beside it unless it is there already."""
    if not folder.is_dir():
        extract(fetch(source.url, folder.parent / source.filename, checksum=source.checksum), folder)
    return folder


@contextmanager
def without_downloads() -> Iterator[None]:
    """Datasets are loaded where they are there, and are missing where they are not."""
    before = _allowed.set(False)
    try:
        yield
    finally:
        _allowed.reset(before)


def read_lines(folder: Path, name: str) -> list[str]:
    """The lines of one text file of an obtained folder, without empty ones."""
    try:
        return [line for line in (folder / name).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{folder} is not whole ({name} cannot be read): delete the folder to have it made again."
        ) from error


def fetch(url: str, destination: str | Path, *, checksum: str) -> Path:
    """Download a file, unless it is there already; either way its checksum is verified.

    A transfer that breaks off is resumed where the server can. The file appears under its name only when
    it is complete; nothing is left behind otherwise.
    """
    destination = Path(destination)
    if destination.exists():
        with destination.open("rb") as stream:
            found = _checksum(stream, checksum)
        if found != checksum:
            raise DownloadError(
                f"{destination} is damaged (checksum {found}, not {checksum}): delete it to have it fetched again."
            )
        return destination
    if not _allowed.get():
        raise DownloadError(f"{destination} is not there, and nothing is downloaded for this.")
    by_hand = f"check the network, or put the file there by hand: {destination} ({checksum})"
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(destination) as stream:
            _transfer(url, stream)
            if (found := _checksum(stream, checksum)) != checksum:
                raise DownloadError(f"{url} arrived damaged (checksum {found}); {by_hand}.")
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise DownloadError(f"{url} could not be fetched ({_reason(error)}); {by_hand}.") from error
    return destination


def extract(archive: str | Path, destination: str | Path) -> Path:
    """Unpack a tar or zip archive into a folder that appears only when it is complete.

    Where the archive holds a single folder, that folder becomes the destination. Members that point outside
    (absolute paths, "..") and links are refused.
    """
    archive, destination = Path(archive), Path(destination)
    try:
        with tempfile.TemporaryDirectory(dir=destination.parent, prefix=f".{destination.name}.") as temporary:
            unpacked = Path(temporary) / "unpacked"
            unpacked.mkdir()
            for name, content in _members(archive):
                target = unpacked.joinpath(*_safe_parts(name, archive))
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as stream:
                    shutil.copyfileobj(content, stream)
            inside = list(unpacked.iterdir())
            whole = inside[0] if len(inside) == 1 and inside[0].is_dir() else unpacked
            _move(whole, destination)
    except (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise DownloadError(
            f"{archive} could not be unpacked ({_reason(error)}): check the free space, "
            "or delete it to have it fetched again."
        ) from error
    return destination


def _transfer(url: str, part: BinaryIO) -> None:
    with _progress(TransferSpeedColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task(PurePosixPath(url).name, total=None)
        for attempt in range(ATTEMPTS):
            try:
                for received, total in _receive(url, part):
                    progress.update(task, completed=received, total=total)
                return
            except (OSError, http.client.HTTPException) as error:
                refused = isinstance(error, urllib.error.HTTPError) and error.code < 500 and error.code != 429
                if refused or isinstance(error, PermissionError) or attempt == ATTEMPTS - 1:
                    raise
                time.sleep(PAUSE * 2**attempt)


def _receive(url: str, part: BinaryIO) -> Iterator[tuple[int, int | None]]:
    """Append what is missing to ``part``; yields the bytes there are and the bytes there will be."""
    have = part.seek(0, os.SEEK_END)
    request = urllib.request.Request(url, headers={"User-Agent": "kedge"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and have:
            part.truncate(0)
            raise ConnectionError("the server cannot resume the transfer") from error
        raise
    with response:
        resumed = response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        if not (have and response.status == http.HTTPStatus.PARTIAL_CONTENT and resumed):
            part.truncate(0)
            have = part.seek(0)
        length = response.headers.get("Content-Length")
        total = have + int(length) if length is not None else None
        while chunk := response.read(_CHUNK):
            part.write(chunk)
            have += len(chunk)
            yield have, total
        if total is not None and have < total:
            raise ConnectionError(f"the connection broke off after {have:,} of {total:,} bytes")


def _checksum(stream: io.BufferedReader | io.BufferedRandom, like: str) -> str:
    algorithm = like.partition(":")[0]
    if algorithm not in ("md5", "sha256"):
        raise ValueError(f"checksum must start with md5: or sha256:, not {like!r}")
    stream.seek(0)
    return f"{algorithm}:{hashlib.file_digest(stream, algorithm).hexdigest()}"


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Names and contents of an archive's files, with a progress bar over the archive's bytes."""
    with archive.open("rb") as raw, _progress() as progress:
        task = progress.add_task(f"unpacking {archive.name}", total=archive.stat().st_size)
        members = _zip_members(raw, archive) if zipfile.is_zipfile(raw) else _tar_members(raw, archive)
        for member in members:
            yield member
            progress.update(task, completed=raw.tell())


def _tar_members(raw: BinaryIO, archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    raw.seek(0)
    with tarfile.open(fileobj=raw, mode="r:*") as tar:
        for member in tar:
            if member.isdir():
                continue
            content = tar.extractfile(member) if member.isfile() else None
            if content is None:
                raise DownloadError(f"{archive} was refused: {member.name!r} in it is a link or a device.")
            yield member.name, content


def _zip_members(raw: BinaryIO, archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(raw) as whole:
        for member in whole.infolist():
            if member.is_dir():
                continue
            if stat.S_ISLNK(member.external_attr >> 16):
                raise DownloadError(f"{archive} was refused: {member.filename!r} in it is a link.")
            with whole.open(member) as content:
                yield member.filename, content


def _safe_parts(name: str, archive: Path) -> tuple[str, ...]:
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or ":" in path.parts[0]:
        raise DownloadError(f"{archive} was refused: {name!r} in it points outside the folder.")
    return path.parts


def _move(whole: Path, destination: Path) -> None:
    try:
        whole.rename(destination)
    except OSError:
        if not destination.is_dir():  # else another process was faster, with the same contents
            raise


def _progress(*columns: BarColumn | TransferSpeedColumn | TimeRemainingColumn) -> Progress:
    console = stderr()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _reason(error: Exception) -> str:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return str(reason) or type(error).__name__
