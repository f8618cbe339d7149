"""The items of one version of a gallery by row, for an audit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np
from rich.progress import track

from kedge.audit.report import Finding, Kind
from kedge.console import stderr
from kedge.errors import ImageError
from kedge.gallery import Gallery
from kedge.gallery.snapshot import Items as GalleryItems
from kedge.images import prefetch, read_image
from kedge.images.phash import perceptual_hash

__all__ = ["Items"]

_MAX_NUMBERS = 1 << 22
"""That are held at once beside the vectors."""


class Items(GalleryItems):
    """Rows 0 … n − 1 are what the gallery holds now; a few numbers for each are in memory, its vector is not.

    Vectors are the embeddings or, with `looks`, the features.
    """

    def __init__(self, gallery: Gallery, *, looks: bool) -> None:
        super().__init__(gallery.verified_snapshot(looks=looks), by_id=False)
        self._gallery = gallery
        self.anchors = self.snapshot.anchors

    def blocks(self, rows: np.ndarray, numbers: int = 1024) -> Iterator[tuple[slice, np.ndarray]]:
        """The vectors of some rows, so many at a time that as many times `numbers` fit in memory."""
        size = max(1, _MAX_NUMBERS // numbers)
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            yield part, self.vectors(rows[part])

    @cached_property
    def contents(self) -> np.ndarray:
        """16 bytes per item that are the same for the same content: of its hash or, without one, of its vector."""
        keys, hashed = np.empty((len(self), 2), np.uint64), np.zeros(len(self), bool)
        for rows, digests in self._column("hash"):
            keys[rows] = [_digest(digest.encode()) for digest in digests]
            hashed[rows] = True
        others = np.flatnonzero(~hashed)
        for part, vectors in self.blocks(others):
            vectors += 0.0  # -0 is 0
            keys[others[part]] = [_digest(vector.tobytes()) for vector in vectors]
        return keys

    @cached_property
    def perceptual_hashes(self) -> np.ndarray:
        """63 bits per image, of its thumbnail or file; -1 where neither is there, and for an image of one colour."""
        hashes, hashed = np.full(len(self), -1, np.int64), np.zeros(len(self), bool)
        for rows, contents in self._column("thumbnail"):
            hashes[rows], hashed[rows] = list(prefetch(_hash, contents)), True
        others = np.flatnonzero(~hashed)
        console = stderr()
        bar: dict[str, Any] = {"console": console, "transient": True, "disable": not console.is_terminal}
        files = (self.describe(row)[0] for row in others.tolist())
        hashes[others] = list(track(prefetch(_hash, files), "reading images", len(others), **bar))
        return np.where(hashes == 0, -1, hashes)

    def _column(self, name: str) -> Iterator[tuple[np.ndarray, list[Any]]]:
        """Values of a column with their rows, where there are any."""
        if name not in self._gallery.columns:
            return
        order = np.argsort(self.ids)
        for batch in self._gallery.batches(["id", name]):
            batch = batch.filter(batch.column(name).is_valid())
            ids = np.asarray(batch.column("id"))
            rows = order[np.searchsorted(self.ids, ids, sorter=order).clip(max=len(order) - 1)]
            there = self.ids[rows] == ids  # the table may hold newer items than this version
            if there.any():
                yield rows[there], batch.filter(there).column(name).to_pylist()

    def finding(self, kind: Kind, row: int, score: float, distance: float, **others: Any) -> Finding:
        """Something about the item in a row."""
        path, label = self.describe(row)
        return Finding(kind, int(self.ids[row]), path, label, float(score), float(distance), **others)


def _hash(image: str | bytes | None) -> int:
    """The perceptual hash of a file or of its content; -1 where it cannot be read."""
    with suppress(ImageError):
        return -1 if image is None else perceptual_hash(read_image(image))
    return -1


def _digest(content: bytes) -> np.ndarray:
    return np.frombuffer(hashlib.blake2b(content, digest_size=16).digest(), np.uint64)
