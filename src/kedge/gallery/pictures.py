"""From paths to decoded pictures, read ahead of the encoder."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from kedge.errors import ConfigError, PictureError
from kedge.images import Preprocessing, list_pictures, read_picture

__all__ = ["Added", "Batch", "listed", "read_ahead"]


class Added(list[int]):
    """The ids of what was added; what was not, and why."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped: list[tuple[str, str]] = []
        """Path and reason of every picture that could not be read."""
        self.present = 0
        """How many were there already."""


@dataclass
class Batch:
    """Some pictures as pixels: `rows` says which."""

    rows: list[int] = field(default_factory=list)
    images: list[Tensor] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    present: int = 0


def listed(
    source: str | Path | Sequence[str | Path], labels: Sequence[str | None] | None
) -> tuple[list[Path], list[str | None]]:
    """The pictures and their labels; in a folder, the first-level folders are labels."""
    names: list[str | None]
    if isinstance(source, (str, Path)) and Path(source).is_dir():
        root = Path(source).absolute()
        files = list_pictures(root)
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
    files: Sequence[Path], there: Mapping[str, tuple[int, str]], size: int, preprocessing: Preprocessing
) -> Iterator[tuple[int, Batch]]:
    """Batches of pictures as the encoder wants them; the next one is read while the last one is used."""

    def read(start: int) -> Batch:
        batch = Batch()
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            found = pool.map(lambda file: _read(file, there.get(str(file)), preprocessing), files[start : start + size])
            for row, (image, note) in enumerate(found):
                if image is not None:
                    batch.rows.append(row)
                    batch.images.append(image)
                    batch.hashes.append(note)
                elif note:
                    batch.skipped.append((str(files[start + row]), note))
                else:
                    batch.present += 1
        return batch

    with ThreadPoolExecutor(1) as ahead:
        coming: deque[tuple[int, Future[Batch]]] = deque()
        for start in range(0, len(files), size):
            coming.append((start, ahead.submit(read, start)))
            if len(coming) > 1:
                first, batch = coming.popleft()
                yield first, batch.result()
        for last, batch in coming:
            yield last, batch.result()


def _read(file: Path, known: tuple[int, str] | None, preprocessing: Preprocessing) -> tuple[Tensor | None, str]:
    """The picture and its content hash; no picture and the reason; or neither, if it is there already."""
    if str(file) != str(file).encode(errors="replace").decode():
        return None, "its name is not valid text"
    try:
        content = file.read_bytes()
    except OSError as error:
        return None, error.strerror or str(error)
    digest = hashlib.sha256(content).hexdigest()
    if known is not None and known[1] == digest:
        return None, ""
    try:
        # Resized here, in the reading threads: a full-size picture is far larger than what the encoder sees.
        return torch.from_numpy(preprocessing.to_pixels(read_picture(content))), digest
    except PictureError as error:
        return None, str(error)
