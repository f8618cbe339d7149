"""Fetching a dataset's files: whole and checked, or not at all."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from rich.progress import wrap_file

from kedge.console import stderr
from kedge.errors import DataError, DownloadError
from kedge.io import atomic_write

__all__ = ["Source", "data_root", "extract", "fetch", "obtain", "read_lines", "without_downloads"]

ATTEMPTS = 4
PAUSE = 1.0
"""Seconds before the second attempt; it doubles with each further one."""
_TIMEOUT = 30.0
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

    def matches(self, stream: Any) -> bool:
        """Whether the stream holds this file, whole."""
        algorithm, _, digest = self.checksum.partition(":")
        stream.seek(0)
        return hashlib.file_digest(stream, algorithm).hexdigest() == digest


def data_root(root: str | Path | None = None) -> Path:
    """Where datasets are kept: ``root``, or $KEDGE_DATA, or ~/.cache/kedge/datasets."""
    return Path(root or os.environ.get("KEDGE_DATA") or "~/.cache/kedge/datasets").expanduser()


def obtain(source: Source, folder: Path) -> Path:
    """The folder with an archive's contents: fetched and extracted beside it unless it is there already."""
    if not folder.is_dir():
        extract(fetch(source, folder.parent), folder)
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
            f"{folder} is incomplete ({name} cannot be read); delete the folder to create it again."
        ) from error


def fetch(source: Source, folder: Path) -> Path:
    """Download a file into a folder, unless it is there already; either way its checksum is verified.

    The file appears under its name only when it is complete; nothing is left behind otherwise.
    """
    destination = folder / source.filename
    by_hand = f"check the network, or save the file as {destination} ({source.checksum})"
    try:
        if destination.exists():
            with destination.open("rb") as stream:
                if source.matches(stream):
                    return destination
            raise DownloadError(
                f"{destination} is damaged (its checksum is not {source.checksum}); delete it to download it again."
            )
        if not _allowed.get():
            raise DownloadError(f"{destination} does not exist, and nothing is downloaded for this.")
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(destination) as stream:
            _download(source.url, stream)
            if not source.matches(stream):
                raise DownloadError(f"{source.url} arrived damaged; {by_hand}.")
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise DownloadError(f"{source.url} could not be downloaded ({reason}); {by_hand}.") from error
    return destination


def extract(archive: Path, destination: Path) -> Path:
    """Unpack a tar or zip archive into a folder that appears only when it is complete.

    Where the archive holds a single folder, that folder becomes the destination. Nothing is written outside it,
    whatever the archive's members are called or link to.
    """
    try:
        with (
            tempfile.TemporaryDirectory(dir=destination.parent, prefix=f".{destination.name}.") as temporary,
            stderr().status(f"unpacking {archive.name}"),
        ):
            unpacked = Path(temporary, "unpacked")
            if zipfile.is_zipfile(archive):
                with zipfile.ZipFile(archive) as members:
                    members.extractall(unpacked)
            else:
                with tarfile.open(archive) as tar:
                    tar.extractall(unpacked, filter="data")
            inside = list(unpacked.iterdir())
            try:
                (inside[0] if len(inside) == 1 and inside[0].is_dir() else unpacked).rename(destination)
            except OSError:
                if not destination.is_dir():  # else another process was faster, with the same contents
                    raise
    except (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise DownloadError(
            f"{archive} could not be unpacked ({str(error) or type(error).__name__}): check the free space, "
            "or delete it to download it again."
        ) from error
    return destination


def _download(url: str, part: BinaryIO) -> None:
    """Download in a few attempts, each of which goes on where the one before broke off."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _receive(url, part)
            return
        except (OSError, http.client.HTTPException) as error:
            is_final = isinstance(error, HTTPError) and error.code < 500 and error.code != 429  # Too Many Requests
            if is_final or attempt == ATTEMPTS:
                raise
            time.sleep(PAUSE * 2 ** (attempt - 1))


def _receive(url: str, part: BinaryIO) -> None:
    """Append what is missing to ``part``."""
    offset = part.seek(0, os.SEEK_END)
    request = Request(url, headers={"User-Agent": "kedge"} | ({"Range": f"bytes={offset}-"} if offset else {}))
    with urlopen(request, timeout=_TIMEOUT) as response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:  # from the start
            part.truncate(offset := part.seek(0))
        length = int(response.headers.get("Content-Length", 0))
        console, name = stderr(), PurePosixPath(url).name
        bar: dict[str, Any] = {"console": console, "transient": True, "disable": not console.is_terminal}
        with wrap_file(response, length, description=name, **bar) as stream:
            shutil.copyfileobj(stream, part)
        if part.tell() < offset + length:
            raise ConnectionError(f"the connection broke off after {part.tell():,} of {offset + length:,} bytes")
