"""Pictures in files, decoded once into a memory-mapped array that later runs open at once.

Every set goes through the disk, small ones too: one way to take care of, and memory stays bounded. The array
belongs to one listing (path, size and time of every file): when that changes, a new one replaces it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kedge.datasets.base import Pictures
from kedge.datasets.download import data_root
from kedge.errors import DataError, PictureError
from kedge.images import Preprocessing, read_image
from kedge.io import atomic_write

__all__ = ["Decoded", "check_room", "decode", "decode_each"]

T = TypeVar("T")

_VERSION = 2
"""Part of every array's name: raise it when the same files would decode to other pixels."""


@dataclass(frozen=True)
class Decoded:
    """The pictures in some files: row i of ``images`` is ``files[i]``, black where it could not be read.

    ``rows`` are those that could be read, ``skipped`` tells of the others: path and reason.
    """

    files: Sequence[Path]
    images: np.ndarray
    rows: np.ndarray
    skipped: tuple[tuple[str, str], ...]

    def pictures(self, rows: np.ndarray, labels: np.ndarray) -> Pictures:
        """A split: some of the rows, with the labels of these rows."""
        return Pictures(self.images, labels, rows, tuple(str(self.files[row]) for row in rows))


def decode(base: Path, files: Sequence[Path], size: int, root: str | Path | None = None) -> Decoded:
    """Decode files that lie under ``base`` to squares of ``size`` pixels, or open what was decoded before."""
    names = [file.relative_to(base).as_posix() for file in files]
    folder = data_root(root) / "decoded"
    owner = _hash([str(base.resolve()), size])
    array = folder / f"{owner}-{_hash([_VERSION, [_state(*pair) for pair in zip(names, files, strict=True)]])}.npy"
    if (loaded := _load(array, names, size)) is None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _write(array, names, files, size)
        except OSError as error:
            raise DataError(
                f"Decoded pictures cannot be kept in {folder} ({error.strerror or error}): make room there, "
                "or set KEDGE_DATA to another folder."
            ) from error
        for old in folder.glob(f"{owner}-*"):
            if old.stem != array.stem:
                with suppress(OSError):
                    old.unlink()
        loaded = _load(array, names, size)
    if loaded is None:
        raise DataError(f"The decoded pictures in {array} vanished: is another process cleaning {folder}?")
    images, reasons = loaded
    rows = np.array([row for row, name in enumerate(names) if name not in reasons], dtype=np.int64)
    skipped = tuple((str(base / name), reason) for name, reason in reasons.items())
    return Decoded(files, images, rows, skipped)


def _load(array: Path, names: list[str], size: int) -> tuple[np.ndarray, dict[str, str]] | None:
    try:
        notes = json.loads(array.with_suffix(".json").read_text(encoding="utf-8"))
        images = np.load(array, mmap_mode="r", allow_pickle=False)
        reasons = dict(notes["skipped"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    complete = images.shape == (len(names), 3, size, size) and images.dtype == np.uint8
    return (images, reasons) if complete else None


def _write(array: Path, names: list[str], files: Sequence[Path], size: int) -> None:
    shape = (len(files), 3, size, size)
    check_room(array.parent, shape)
    skipped: list[tuple[str, str]] = []
    with atomic_write(array) as stream:
        np.lib.format.write_array_header_1_0(stream, {"descr": "|u1", "fortran_order": False, "shape": shape})
        for name, pixels in zip(names, decode_each(files, size, read_image), strict=True):
            if isinstance(pixels, str):
                skipped.append((name, pixels))
                pixels = np.zeros(shape[1:], np.uint8)
            stream.write(pixels.data)
        # The notes first: an array under its final name is complete with all that belongs to it.
        notes = {"size": size, "files": names, "skipped": skipped}
        with atomic_write(array.with_suffix(".json")) as note:
            note.write(json.dumps(notes, indent=1).encode())


def check_room(folder: Path, shape: tuple[int, ...]) -> None:
    """Raise an OSError if an array of so many bytes has no room on the folder's disk."""
    if (needed := int(np.prod(shape))) > (free := shutil.disk_usage(folder).free):
        raise OSError(f"{needed / 2**30:.1f} GiB are needed, {free / 2**30:.1f} GiB are free")


def decode_each(pictures: Sequence[T], size: int, read: Callable[[T], Image.Image]) -> Iterator[np.ndarray | str]:
    """Pixels of each picture, or the reason why there are none; a bounded number at a time, in threads."""
    preprocessing = Preprocessing(size=size)

    def pixels(picture: T) -> np.ndarray | str:
        try:
            return preprocessing.to_pixels(read(picture))
        except PictureError as error:
            return str(error).removeprefix(f"{picture} ")

    workers = min(16, (os.cpu_count() or 1) + 1)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    remaining = iter(pictures)
    with (
        ThreadPoolExecutor(workers) as pool,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task("decoding pictures", total=len(pictures))
        while batch := list(islice(remaining, 32 * workers)):
            for result in pool.map(pixels, batch):
                yield result
                progress.advance(task)


def _state(name: str, file: Path) -> tuple[str, int, int]:
    try:
        status = file.stat()
    except OSError:  # reading it will say why
        return name, -1, 0
    return name, status.st_size, status.st_mtime_ns


def _hash(values: object) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]
