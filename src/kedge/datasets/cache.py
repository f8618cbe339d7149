"""Decoded images: each decoded once into a memory-mapped array (.npy), with notes of what it holds beside it (.json).

Every set goes through the disk, small ones too: one way to take care of, and memory stays bounded. Of files, the notes
alone may be kept: who only needs features decodes straight into the encoder.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from kedge.console import stderr
from kedge.datasets.base import Dataset, FileImages, ImageSplit, Label, Source
from kedge.datasets.download import data_root
from kedge.datasets.splits import hold_out
from kedge.errors import DataError, ImageError
from kedge.images import Preprocessing, prefetch
from kedge.io import atomic_write

__all__ = ["Scan", "keep", "noted", "open_array", "stored"]

_VERSION = 3
"""Part of every array's name: raise it when the same images would decode to other pixels."""
_DECODING = ("size", "crop_pct", "interpolation")
"""The settings of a Preprocessing that say what an image decodes to."""
_SIZE_SAMPLES = 16
"""So many images tell whether all have one size."""

Items = Sequence[tuple[Source, int]]
Scan = Callable[[Sequence[str]], Mapping[int, str]]
"""Reads files, and returns the numbers of those that cannot be read, with the reason."""


def keep(
    train: Source,
    test: Source | None = None,
    *,
    size: int | None = None,
    most: int = 224,
    crop_pct: float = 1.0,
    interpolation: str = "bilinear",
    root: str | Path | None = None,
    pixels: bool = True,
    scan: Scan | None = None,
) -> Path:
    """Decode all images to squares of ``size`` pixels, and return where :func:`stored` finds them.

    Without ``size`` it is that of the images, where all are squares of at most ``most`` pixels, else ``most``;
    ``crop_pct`` and ``interpolation`` are as in ``Preprocessing``. What was kept before is found again; datasets that
    cannot tell whether they changed are read again for that. Without ``pixels``, notes of an earlier look are enough;
    ``scan`` looks at files in the place of decoding them.
    """
    if len(train) == 0:
        raise DataError(f"{train.name} has no images.")
    sources = [train] if test is None else [train, test]
    side = _common_side(train, most) if size is None else size
    preprocessing = Preprocessing(size=side, crop_pct=crop_pct, interpolation=interpolation)
    # What decodes as 0.1 did keeps the names it had then.
    decoding = [value for name, value in preprocessing.to_json().items() if name in _DECODING]
    folder = data_root(root) / "decoded"
    identities = [source.identity for source in sources]
    # Of a folder, only the newest state is kept.
    owner = f"{_hash([train.folder, *decoding])}-" if train.folder else ""
    key = None if None in identities else owner + _hash([_VERSION, *decoding, train.name, identities])
    if key is not None:
        array = folder / f"{key}.npy"
        with suppress(DataError):  # made anew then
            open_array(array, pixels=pixels)
            return array
    items = [(source, row) for source in sources for row in range(len(source))]
    part = folder / f"{secrets.token_hex(8)}.npy"
    try:
        labels, skipped, digest = _decode(items, side, preprocessing, part) if scan is None else _scanned(items, scan)
        if len(skipped) * 2 > len(items):
            name, reason = skipped[0]
            raise DataError(
                f"{len(skipped)} of {len(items)} images of {train.name} cannot be used; the first: {name} {reason}"
            )
        classes, numbers = _number_classes(train, items, labels)
        notes = {"name": train.name, "train": len(train), "classes": classes, "labels": numbers, "skipped": skipped}
        notes |= {"crop_pct": crop_pct, "interpolation": interpolation}
        key = key or _hash([digest, notes])
        array = folder / f"{key}.npy"
        array.parent.mkdir(parents=True, exist_ok=True)
        # The notes first: an array under its final name is complete with all that belongs to it.
        with atomic_write(array.with_suffix(".json")) as stream:
            stream.write(json.dumps(notes).encode())
        if scan is None:
            part.replace(array)
    except OSError as error:
        raise DataError(
            f"Decoded images cannot be stored in {folder} ({error.strerror or error}); free some space, "
            "or set KEDGE_DATA to another folder."
        ) from error
    finally:
        with suppress(OSError):
            part.unlink()
    for outdated in folder.glob(f"{owner}*") if owner else ():
        if outdated.stem != key:
            with suppress(OSError):
                outdated.unlink()
    return array


def stored(path: str | Path, test_fraction: float = 0.1, seed: int = 0, flip: bool = True) -> Dataset:
    """Open what :func:`keep` left; where it has no test images, ``test_fraction`` of each class are split off."""
    return noted(*open_array(Path(path).expanduser()), test_fraction, seed, flip)


def noted(
    images: np.ndarray | FileImages,
    notes: Mapping[str, Any],
    test_fraction: float = 0.1,
    seed: int = 0,
    flip: bool = True,
    files: Sequence[str] | None = None,
) -> Dataset:
    """The dataset of these images, or of these files, that notes describe."""
    labels = np.array(notes["labels"], dtype=np.int64)
    rows, train_count = np.flatnonzero(labels >= 0), notes["train"]
    if train_count < len(labels):
        parts = rows[rows < train_count], rows[rows >= train_count]
    else:
        train, test = hold_out(labels[rows], test_fraction, seed)
        parts = rows[train], rows[test]
    train_split, test_split = (
        ImageSplit(images, labels[part], part, None if files is None else tuple(files[row] for row in part))
        for part in parts
    )
    skipped = tuple((item, reason) for item, reason in notes["skipped"])
    decoding = {name: notes[name] for name in ("crop_pct", "interpolation") if name in notes}
    return Dataset(
        notes["name"], tuple(notes["classes"]), train_split, test_split, flip=flip, skipped=skipped, **decoding
    )


def open_array(array: Path, *, pixels: bool = True) -> tuple[np.ndarray, dict[str, Any]]:
    """An array (without ``pixels`` an empty one) and its notes; a DataError where they are gone or damaged."""
    with suppress(OSError, ValueError, TypeError):
        notes = json.loads(array.with_suffix(".json").read_text(encoding="utf-8"))
        images = np.load(array, mmap_mode="r", allow_pickle=False) if pixels else np.empty(0, np.uint8)
        if images.dtype == np.uint8 and {"name", "train", "classes", "labels", "skipped"} <= set(notes):
            return images, notes
    raise DataError(f"{array}, the stored images of a dataset, is missing or damaged; pass the dataset again.")


def _scanned(items: Items, scan: Scan) -> tuple[list[Label], list[tuple[str, str]], str]:
    """As `_decode`, of files that `scan` has read; their identity tells whether they changed, so there is no digest."""
    files = [path for source, row in items if (path := source.path(row)) is not None]
    unreadable = scan(files)
    labels = {source: source.labels() for source in {source for source, _ in items}}
    kept = [None if number in unreadable else labels[source][row] for number, (source, row) in enumerate(items)]
    return kept, [(files[number], reason) for number, reason in sorted(unreadable.items())], ""


def _decode(
    items: Items, size: int, preprocessing: Preprocessing, array: Path
) -> tuple[list[Label], list[tuple[str, str]], str]:
    """Write all images as an array, decoded in threads, a bounded number at a time; black where one cannot be used.

    Returns the label of each image (None where it cannot be used), names and reasons of those, and a digest of all
    pixels.
    """
    shape = (len(items), 3, size, size)

    def decode(item: tuple[Source, int]) -> tuple[np.ndarray, Label, str]:
        source, row = item
        try:
            image, label = source.read(row)
            return preprocessing.to_pixels(image), label, "has no label" if label is None else ""
        except ImageError as error:
            return np.zeros(shape[1:], np.uint8), None, str(error).removeprefix(f"{source.path(row)} ")

    labels: list[Label] = []
    skipped: list[tuple[str, str]] = []
    digest = hashlib.sha256()
    console = stderr()
    bar: dict[str, Any] = {"console": console, "transient": True, "disable": not console.is_terminal}
    array.parent.mkdir(parents=True, exist_ok=True)
    if (needed := int(np.prod(shape))) > (free := shutil.disk_usage(array.parent).free):
        raise OSError(f"{needed / 2**30:.1f} GiB are needed, {free / 2**30:.1f} GiB are free")
    with atomic_write(array) as stream:
        np.lib.format.write_array_header_1_0(stream, {"descr": "|u1", "fortran_order": False, "shape": shape})
        decoded = track(prefetch(decode, items), "decoding images", len(items), **bar)
        for (source, row), (pixels, label, reason) in zip(items, decoded, strict=True):
            stream.write(pixels.data)
            digest.update(pixels.data)
            labels.append(label)
            if reason:
                skipped.append((source.path(row) or f"{source.name}[{row}]", reason))
    return labels, skipped, digest.hexdigest()


def _number_classes(train: Source, items: Items, labels: list[Label]) -> tuple[list[str], list[int]]:
    """The classes, and each image's number among them; -1 where it cannot be used."""
    names = [source.name_of(label) for (source, _), label in zip(items, labels, strict=True)]
    numbers = [label for label in labels if isinstance(label, int)]
    trained = sorted({name for name in names[: len(train)] if name is not None})
    if train.classes is not None:
        classes = list(train.classes)
    elif numbers and not any(isinstance(label, str) for label in labels):
        if (odd := next((number for number in numbers if not 0 <= number < len(items)), None)) is not None:
            raise DataError(f"{train.name} has a label {odd} but {len(items)} images: number the classes from 0.")
        classes = [str(number) for number in range(max(numbers) + 1)]
    else:
        classes = trained
    number_of: dict[str | None, int] = {name: number for number, name in enumerate(classes)} | {None: -1}
    if (unknown := next((name for name in names if name not in number_of), None)) is not None:
        raise DataError(f"{train.name} has images of a class {unknown!r} but no training images of it; is it complete?")
    if len(trained) < 2:
        raise DataError(
            f"{train.name} has training images of one class only ({''.join(trained)!r}): at least two are needed."
        )
    return classes, [number_of[name] for name in names]


def _common_side(source: Source, most: int) -> int:
    sizes = set()
    for row in np.unique(np.linspace(0, len(source) - 1, _SIZE_SAMPLES).astype(int)).tolist():
        with suppress(ImageError):  # skipped and listed later
            sizes.add(source.read(row)[0].size)
    width, height = sizes.pop() if len(sizes) == 1 else (most, most)
    return width if width == height <= most else most


def _hash(values: object) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]
