"""Decoded images: each decoded once into a memory-mapped array (.npy), with notes of what it holds beside it (.json).

Every set goes through the disk, small ones too: one way to take care of, and memory stays bounded. An array of files
belongs to one listing (path, size and time of every file): when that changes, a new one replaces it.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.progress import track

from kedge.console import stderr
from kedge.datasets.download import data_root
from kedge.errors import DataError, ImageError
from kedge.images import Preprocessing, prefetch, read_image
from kedge.io import atomic_write

__all__ = ["cache_folder", "check_usable", "decode", "file_state", "open_array", "short_hash", "write_array"]

_VERSION = 2
"""Part of every array's name: raise it when the same files would decode to other pixels."""


def decode(
    base: Path, files: Sequence[Path], size: int, root: str | Path | None = None
) -> tuple[np.ndarray, dict[int, str]]:
    """Decode files that lie under ``base`` to squares of ``size`` pixels, or open what was decoded before.

    Row i of the array is ``files[i]``, black where it could not be read; for those rows the dictionary has the reason.
    """
    names = [file.relative_to(base).as_posix() for file in files]
    folder = cache_folder(root)
    owner = short_hash([str(base.resolve()), size])
    stem = f"{owner}-{short_hash([_VERSION, [file_state(*pair) for pair in zip(names, files, strict=True)]])}"
    cached = open_array(folder / f"{stem}.npy")
    if cached is None:

        def notes(skipped: dict[int, str], _: str) -> tuple[str, dict[str, Any]]:
            reasons = [(names[row], reason.removeprefix(f"{files[row]} ")) for row, reason in skipped.items()]
            return stem, {"size": size, "files": names, "skipped": reasons}

        cached = open_array(write_array(folder, len(files), size, lambda row: read_image(files[row]), notes))
        for old in folder.glob(f"{owner}-*"):
            if old.stem != stem:
                with suppress(OSError):
                    old.unlink()
    if cached is None:
        raise DataError(f"The decoded images in {folder / stem} vanished: is another process cleaning {folder}?")
    images, content = cached
    reasons = dict(content["skipped"])
    return images, {row: reasons[name] for row, name in enumerate(names) if name in reasons}


def check_usable(name: object, skipped: Sequence[tuple[str, str]], count: int) -> None:
    """Refuse a set of images of which more than half cannot be used."""
    if len(skipped) * 2 > count:
        raise DataError(f"{len(skipped)} of {count} images of {name} cannot be used; the first: {' '.join(skipped[0])}")


def cache_folder(root: str | Path | None = None) -> Path:
    """Where decoded images are kept."""
    return data_root(root) / "decoded"


def open_array(array: Path) -> tuple[np.ndarray, dict[str, Any]] | None:
    """An array and its notes; None where they are not there or not whole."""
    try:
        notes = json.loads(array.with_suffix(".json").read_text(encoding="utf-8"))
        images = np.load(array, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError):
        return None
    return (images, notes) if isinstance(notes, dict) and "skipped" in notes and images.dtype == np.uint8 else None


def write_array(
    folder: Path,
    count: int,
    size: int,
    read: Callable[[int], Image.Image],
    finish: Callable[[dict[int, str], str], tuple[str, dict[str, Any]]],
) -> Path:
    """Decode images 0 … count - 1 to squares of ``size`` pixels, in threads, a bounded number at a time.

    ``finish`` takes the unreadable rows with their reasons and a digest of all pixels; it returns the array's name and
    its notes.
    """
    shape = (count, 3, size, size)
    preprocessing = Preprocessing(size=size)

    def decoded(row: int) -> np.ndarray | str:
        try:
            return preprocessing.to_pixels(read(row))
        except ImageError as error:
            return str(error)

    part = folder / f"{secrets.token_hex(8)}.npy"
    skipped: dict[int, str] = {}
    digest = hashlib.sha256()
    console = stderr()
    bar: dict[str, Any] = {"console": console, "transient": True, "disable": not console.is_terminal}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (needed := int(np.prod(shape))) > (free := shutil.disk_usage(folder).free):
            raise OSError(f"{needed / 2**30:.1f} GiB are needed, {free / 2**30:.1f} GiB are free")
        with atomic_write(part) as stream:
            np.lib.format.write_array_header_1_0(stream, {"descr": "|u1", "fortran_order": False, "shape": shape})
            for row, pixels in enumerate(track(prefetch(decoded, range(count)), "decoding images", count, **bar)):
                if isinstance(pixels, str):
                    skipped[row] = pixels
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


def file_state(name: str, file: Path) -> tuple[str, int, int]:
    """What changes when a file does: its size and time; reading one that is not there will say why."""
    try:
        status = file.stat()
    except OSError:
        return name, -1, 0
    return name, status.st_size, status.st_mtime_ns


def short_hash(values: object) -> str:
    """16 hex digits of plain values."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]
