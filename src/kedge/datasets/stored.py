"""Pictures of any source, decoded once into a memory-mapped array, with a note of what they are beside it."""

from __future__ import annotations

import hashlib
import json
import secrets
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from kedge.datasets.base import Dataset, Pictures
from kedge.datasets.decoding import check_room, decode_each
from kedge.datasets.download import data_root
from kedge.datasets.sources import Label, Source
from kedge.datasets.splits import hold_out
from kedge.errors import ConfigError, DataError, PictureError
from kedge.io import atomic_write

__all__ = ["keep", "stored"]

_VERSION = 1
_SIDE = 224
_LOOKS = 16
"""So many pictures tell whether all have one size."""


def stored(path: str | Path, test_fraction: float = 0.1, seed: int = 0, flip: bool = True) -> Dataset:
    """Open what :func:`keep` left; where it has no test pictures, ``test_fraction`` of each class are split off."""
    array = Path(path).expanduser()
    try:
        notes = json.loads(array.with_suffix(".json").read_text(encoding="utf-8"))
        images = np.load(array, mmap_mode="r", allow_pickle=False)
        labels = np.array(notes["labels"], dtype=np.int64)
        rows, trained = np.flatnonzero(labels >= 0), int(notes["train"])
        name, classes = str(notes["name"]), tuple(notes["classes"])
        skipped = tuple((str(one), str(reason)) for one, reason in notes["skipped"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is gone or damaged, where Kedge kept the pictures of a dataset that it was given: pass that again."
        ) from error
    if trained < len(labels):
        train, test = rows[rows < trained], rows[rows >= trained]
    else:
        train, test = (rows[chosen] for chosen in hold_out(labels[rows], test_fraction, seed))
    return Dataset(
        name=name,
        classes=classes,
        train=Pictures(images, labels[train], train),
        test=Pictures(images, labels[test], test),
        flip=flip,
        skipped=skipped,
    )


def keep(
    train: Source, test: Source | None = None, *, size: int | None = None, most: int = _SIDE, root: str | None = None
) -> Path:
    """Decode all pictures to squares of ``size`` pixels, and return where :func:`stored` finds them.

    Without ``size`` it is that of the pictures, where all are squares of at most ``most`` pixels, else ``most``. What
    was kept before is found again; datasets that cannot tell whether they changed are read again for that.
    """
    if size is not None and size < 1:
        raise ConfigError(f"size must be a positive number of pixels, not {size}.")
    if len(train) == 0:
        raise DataError(f"{train.name} has no pictures.")
    sources = [train] if test is None else [train, test]
    side = size or _own_side(train, most)
    folder = data_root(root) / "decoded"
    known = [source.identity for source in sources]
    key = None if None in known else _hash([_VERSION, side, train.name, known])
    if key is not None and _is_whole(folder / f"{key}.npy"):
        return folder / f"{key}.npy"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _write(folder, sources, side, key)
    except OSError as error:
        raise DataError(
            f"Decoded pictures cannot be kept in {folder} ({error.strerror or error}): make room there, "
            "or set KEDGE_DATA to another folder."
        ) from error


def _write(folder: Path, sources: list[Source], side: int, key: str | None) -> Path:
    places = [(source, row) for source in sources for row in range(len(source))]
    shape = (len(places), 3, side, side)
    check_room(folder, shape)
    found: list[Label] = [None] * len(places)
    skipped: list[tuple[str, str]] = []
    digest = hashlib.sha256()

    def read(place: int) -> Image.Image:
        source, row = places[place]
        picture, found[place] = source.read(row)
        return picture

    coming = folder / f"{secrets.token_hex(8)}.npy"
    try:
        with atomic_write(coming) as stream:
            np.lib.format.write_array_header_1_0(stream, {"descr": "|u1", "fortran_order": False, "shape": shape})
            for place, pixels in enumerate(decode_each(range(len(places)), side, read)):
                if isinstance(pixels, str):
                    skipped.append((_called(*places[place]), pixels))
                    found[place] = None
                    pixels = np.zeros(shape[1:], np.uint8)
                elif found[place] is None:
                    skipped.append((_called(*places[place]), "has no label"))
                stream.write(pixels.data)
                digest.update(pixels.data)
            if len(skipped) * 2 > len(places):
                raise DataError(
                    f"{len(skipped)} of {len(places)} pictures of {sources[0].name} cannot be used; the first: "
                    f"{' '.join(skipped[0])}"
                )
        classes, labels = _numbered(sources, places, found)
        notes = {"name": sources[0].name, "train": len(sources[0]), "classes": classes, "labels": labels}
        text = json.dumps(notes | {"skipped": skipped})
        digest.update(text.encode())
        array = folder / f"{key or digest.hexdigest()[:16]}.npy"
        # The notes first: an array under its final name is complete with all that belongs to it.
        with atomic_write(array.with_suffix(".json")) as note:
            note.write(text.encode())
        return coming.replace(array)
    finally:
        coming.unlink(missing_ok=True)


def _numbered(
    sources: list[Source], places: list[tuple[Source, int]], found: list[Label]
) -> tuple[list[str], list[int]]:
    """The classes, and each picture's place among them; -1 where it cannot be used."""
    train = sources[0]
    names = [source.name_of(label) for (source, _), label in zip(places, found, strict=True)]
    numbers = [label for label in found if isinstance(label, int)]
    if train.classes is not None:
        classes = list(train.classes)
    elif numbers and not any(isinstance(label, str) for label in found):
        if min(numbers) < 0 or max(numbers) >= len(places):
            odd = min(numbers) if min(numbers) < 0 else max(numbers)
            raise DataError(f"{train.name} has a label {odd} but {len(places)} pictures: number the classes from 0.")
        classes = [str(number) for number in range(max(numbers) + 1)]
    else:
        classes = sorted({name for name in names[: len(train)] if name is not None})
    numbered = {name: number for number, name in enumerate(classes)}
    if unknown := sorted({name for name in names if name is not None} - numbered.keys()):
        raise DataError(f"{train.name} has test pictures of a class {unknown[0]!r} but none to train on.")
    if len({name for name in names[: len(train)] if name is not None}) < 2:
        raise DataError(f"{train.name} has training pictures of one class only: at least two are needed.")
    return classes, [-1 if name is None else numbered[name] for name in names]


def _own_side(source: Source, most: int) -> int:
    sizes = set()
    for row in np.unique(np.linspace(0, len(source) - 1, _LOOKS).astype(int)).tolist():
        try:
            sizes.add(source.read(row)[0].size)
        except PictureError:  # skipped and listed later
            continue
    width, height = sizes.pop() if len(sizes) == 1 else (most, most)
    return width if width == height <= most else most


def _is_whole(array: Path) -> bool:
    return array.is_file() and array.with_suffix(".json").is_file()


def _called(source: Source, row: int) -> str:
    return source.path(row) or f"{source.name}[{row}]"


def _hash(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]
