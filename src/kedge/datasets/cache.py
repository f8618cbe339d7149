"""Decoded images: each decoded once into a memory-mapped array (.npy), with notes of what it holds beside it (.json).

Every set goes through the disk, small ones too: one way to take care of, and memory stays bounded. An array of files
belongs to one listing (path, size and time of every file): when that changes, a new one replaces it.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kedge.console import stderr
from kedge.datasets.base import ImageSplit
from kedge.datasets.download import data_root
from kedge.errors import DataError, ImageError
from kedge.images import Preprocessing, prefetch, read_image
from kedge.io import atomic_write

__all__ = ["Decoded", "cache_folder", "decode", "decode_each", "open_array", "short_hash", "write_array"]

_VERSION = 2
"""Part of every array's name: raise it when the same files would decode to other pixels."""


@dataclass(frozen=True)
class Decoded:
    """The images in some files: row i of ``images`` is ``files[i]``, black where it could not be read.

    ``rows`` are those that could be read, ``skipped`` tells of the others: path and reason.
    """

    files: Sequence[Path]
    images: np.ndarray
    rows: np.ndarray
    skipped: tuple[tuple[str, str], ...]

    def split(self, rows: np.ndarray, labels: np.ndarray) -> ImageSplit:
        """Some of the rows, with the labels of these rows."""
        return ImageSplit(self.images, labels, rows, tuple(str(self.files[row]) for row in rows))


def decode(base: Path, files: Sequence[Path], size: int, root: str | Path | None = None) -> Decoded:
    """Decode files that lie under ``base`` to squares of ``size`` pixels, or open what was decoded before."""
    names = [file.relative_to(base).as_posix() for file in files]
    folder = cache_folder(root)
    owner = short_hash([str(base.resolve()), size])
    stem = f"{owner}-{short_hash([_VERSION, [_state(*pair) for pair in zip(names, files, strict=True)]])}"
    shape = (len(names), 3, size, size)
    cached = open_array(folder / f"{stem}.npy", shape)
    if cached is None:

        def notes(skipped: dict[int, str], _: str) -> tuple[str, dict[str, Any]]:
            reasons = [(names[row], reason) for row, reason in skipped.items()]
            return stem, {"size": size, "files": names, "skipped": reasons}

        write_array(folder, shape, lambda row: read_image(files[row]), notes, called=files)
        for old in folder.glob(f"{owner}-*"):
            if old.stem != stem:
                with suppress(OSError):
                    old.unlink()
        cached = open_array(folder / f"{stem}.npy", shape)
    if cached is None:
        raise DataError(f"The decoded images in {folder / stem} vanished: is another process cleaning {folder}?")
    images, content = cached
    reasons = dict(content["skipped"])
    rows = np.array([row for row, name in enumerate(names) if name not in reasons], dtype=np.int64)
    return Decoded(files, images, rows, tuple((str(base / name), reason) for name, reason in reasons.items()))


def cache_folder(root: str | Path | None = None) -> Path:
    """Where decoded images are kept."""
    return data_root(root) / "decoded"


def open_array(array: Path, shape: tuple[int, ...] | None = None) -> tuple[np.ndarray, dict[str, Any]] | None:
    """An array and its notes; None where they are not there, not whole or of another shape."""
    try:
        notes = json.loads(array.with_suffix(".json").read_text(encoding="utf-8"))
        images = np.load(array, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError):
        return None
    whole = isinstance(notes, dict) and "skipped" in notes and images.dtype == np.uint8
    return (images, notes) if whole and shape in (None, images.shape) else None


def write_array(
    folder: Path,
    shape: tuple[int, ...],
    read: Callable[[int], Image.Image],
    finish: Callable[[dict[int, str], str], tuple[str, dict[str, Any]]],
    *,
    called: Sequence[Any] = (),
) -> Path:
    """Decode as many images as ``shape`` says to its size.

    ``finish`` takes the unreadable rows with their reasons and a digest of all pixels; it returns the array's name and
    its notes.
    """
    part = folder / f"{secrets.token_hex(8)}.npy"
    skipped: dict[int, str] = {}
    digest = hashlib.sha256()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (needed := int(np.prod(shape))) > (free := shutil.disk_usage(folder).free):
            raise OSError(f"{needed / 2**30:.1f} GiB are needed, {free / 2**30:.1f} GiB are free")
        with atomic_write(part) as stream:
            np.lib.format.write_array_header_1_0(stream, {"descr": "|u1", "fortran_order": False, "shape": shape})
            for row, pixels in enumerate(decode_each(shape[0], shape[2], read)):
                if isinstance(pixels, str):
                    skipped[row] = pixels.removeprefix(f"{called[row]} ") if called else pixels
                    pixels = np.zeros(shape[1:], np.uint8)
                stream.write(pixels.data)
                digest.update(pixels.data)
        stem, notes = finish(skipped, digest.hexdigest())
        # The notes first: an array under its final name is complete with all that belongs to it.
        with atomic_write(folder / f"{stem}.json") as note:
            note.write(json.dumps(notes).encode())
        return part.replace(folder / f"{stem}.npy")
    except OSError as error:
        raise DataError(
            f"Decoded images cannot be kept in {folder} ({error.strerror or error}): make room there, "
            "or set KEDGE_DATA to another folder."
        ) from error
    finally:
        with suppress(OSError):
            part.unlink()


def decode_each(count: int, size: int, read: Callable[[int], Image.Image]) -> Iterator[np.ndarray | str]:
    """Pixels of rows 0 … count - 1, or the reason why there are none; a bounded number at a time, in threads."""
    preprocessing = Preprocessing(size=size)

    def pixels(row: int) -> np.ndarray | str:
        try:
            return preprocessing.to_pixels(read(row))
        except ImageError as error:
            return str(error)

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = stderr()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield from progress.track(prefetch(pixels, range(count)), total=count, description="decoding images")


def _state(name: str, file: Path) -> tuple[str, int, int]:
    try:
        status = file.stat()
    except OSError:  # reading it will say why
        return name, -1, 0
    return name, status.st_size, status.st_mtime_ns


def short_hash(values: object) -> str:
    """16 hex digits of plain values."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]
