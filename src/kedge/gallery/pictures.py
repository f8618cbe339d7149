"""From paths to decoded pictures, read ahead of the encoder."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kedge.errors import ConfigError, PictureError
from kedge.images import Preprocessing, fetch_image, is_url, list_images, read_image
from kedge.images.io import make_thumbnail

__all__ = [
    "Batch",
    "Known",
    "Read",
    "gathered",
    "is_text",
    "listed",
    "make_thumbnail",
    "query_picture",
    "read_ahead",
    "read_content",
    "read_file",
]

_AHEAD = 2
"""So many batches are read while the encoder works on one."""


class Known(NamedTuple):
    """An item that is there already."""

    id: int
    hash: str


class Read(NamedTuple):
    """A picture; no picture and the reason; or neither, if it is there already."""

    image: Tensor | None = None
    hash: str = ""
    thumbnail: bytes | None = None
    reason: str = ""


@dataclass
class Batch:
    """Some pictures as pixels: `rows` says which."""

    rows: list[int] = field(default_factory=list)
    images: list[Tensor] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    thumbnails: list[bytes | None] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    present: int = 0


def listed(
    source: str | Path | Sequence[str | Path], labels: Sequence[str | None] | None
) -> tuple[list[Path], list[str | None]]:
    """The pictures and their labels; in a folder, the first-level folders are labels."""
    names: list[str | None]
    if isinstance(source, (str, Path)) and Path(source).is_dir():
        root = Path(source).absolute()
        files = list_images(root)
        parts = [file.relative_to(root).parts for file in files]
        names = [part[0] if len(part) > 1 else None for part in parts]
    else:
        given = [source] if isinstance(source, (str, Path)) else list(source)
        files = [Path(one).absolute() for one in given]
        names = [None] * len(files)
    if labels is not None:
        if len(labels) != len(files):
            raise ConfigError(f"labels must have {len(files)} entries, one per picture, found {len(labels)}.")
        names = list(labels)
    return files, names


def read_ahead(
    files: Sequence[Path], there: Mapping[str, Known], size: int, preprocessing: Preprocessing, thumbnails: int
) -> Iterator[Batch]:
    """Batches of pictures as the encoder wants them; the next ones are read while the last one is used."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:

        def start(first: int) -> list[Future[Read]]:
            some = files[first : first + size]
            return [pool.submit(read_file, file, there.get(str(file)), preprocessing, thumbnails) for file in some]

        firsts = range(0, len(files), size)
        coming = deque((first, start(first)) for first in firsts[:_AHEAD])
        try:
            for place in range(len(firsts)):
                first, reading = coming.popleft()
                batch = gathered(first, files, [future.result() for future in reading])
                if place + _AHEAD < len(firsts):
                    coming.append((firsts[place + _AHEAD], start(firsts[place + _AHEAD])))
                yield batch
        finally:
            pool.shutdown(cancel_futures=True)


def query_picture(query: Any, *, allow_url: bool) -> Any:
    """What a model can embed, from what someone searches with."""
    if isinstance(query, str) and is_url(query):
        if not allow_url:
            raise ConfigError(f"{query} is an address: say allow_url=True (--url) to have it fetched.")
        return fetch_image(query)
    return read_image(query) if isinstance(query, bytes) else query


def is_text(name: str) -> bool:
    """Whether a name can stand in the record: a file's may hold bytes that are no text."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def gathered(first: int, files: Sequence[str | Path], found: Sequence[Read]) -> Batch:
    """What was read of `files`, from number `first` on."""
    batch = Batch()
    for row, one in enumerate(found, start=first):
        if one.image is not None:
            batch.rows.append(row)
            batch.images.append(one.image)
            batch.hashes.append(one.hash)
            batch.thumbnails.append(one.thumbnail)
        elif one.reason:
            batch.skipped.append((str(files[row]), one.reason))
        else:
            batch.present += 1
    return batch


def read_file(file: Path, known: Known | None, preprocessing: Preprocessing, thumbnails: int) -> Read:
    """One picture, as the encoder wants it."""
    if not is_text(str(file)):
        return Read(reason="Its name is not valid UTF-8: rename it.")
    try:
        content = file.read_bytes()
    except OSError as error:
        return Read(reason=error.strerror or str(error))
    return read_content(content, known, preprocessing, thumbnails)


def read_content(content: bytes, known: Known | None, preprocessing: Preprocessing, thumbnails: int) -> Read:
    """The same of what a file holds."""
    digest = hashlib.sha256(content).hexdigest()
    if known is not None and known.hash == digest:
        return Read()
    try:
        picture = read_image(content)
    except PictureError as error:
        return Read(reason=str(error))
    # Resized here, in the reading threads: a full-size picture is far larger than what the encoder sees.
    small = make_thumbnail(picture, thumbnails) if thumbnails else None
    return Read(torch.from_numpy(preprocessing.to_pixels(picture)), digest, small)
