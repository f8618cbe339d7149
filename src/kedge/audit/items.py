"""The items of one version of a gallery by row, for an audit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from kedge.audit.report import Finding, Kind
from kedge.gallery import Gallery
from kedge.gallery.snapshot import Items as GalleryItems

__all__ = ["Items"]

_BLOCK = 4096


class Items(GalleryItems):
    """Rows 0 … n − 1 are what the gallery holds now; a few numbers for each are in memory, its vector is not.

    Vectors are the features or, where not all items have them, the embeddings.
    """

    def __init__(self, gallery: Gallery) -> None:
        super().__init__(gallery.verified_snapshot(looks=True), by_id=False)
        self._gallery = gallery
        self.anchors = self.snapshot.anchors

    def blocks(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Some rows with their vectors, a few thousand at a time."""
        for start in range(0, len(rows), _BLOCK):
            block = rows[start : start + _BLOCK]
            yield block, self.vectors(block)

    @cached_property
    def contents(self) -> np.ndarray:
        """16 bytes per item that are the same for the same content: of its hash or, without one, of its vector."""
        keys, hashed = np.empty((len(self), 2), np.uint64), np.zeros(len(self), bool)
        for rows, digests in self._column("hash"):
            keys[rows] = [_digest(digest.encode()) for digest in digests]
            hashed[rows] = True
        for rows, vectors in self.blocks(np.flatnonzero(~hashed)):
            vectors += 0.0  # -0 is 0
            keys[rows] = [_digest(vector.tobytes()) for vector in vectors]
        return keys

    @cached_property
    def perceptual_hashes(self) -> np.ndarray:
        """63 bits per image; -1 where the gallery has none."""
        hashes = np.full(len(self), -1, np.int64)
        for rows, values in self._column("phash"):
            hashes[rows] = values
        return hashes

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
            yield rows[there], batch.filter(there).column(name).to_pylist()

    def finding(self, kind: Kind, row: int, score: float, distance: float, **others: Any) -> Finding:
        """Something about the item in a row."""
        path, label = self.describe(row)
        return Finding(kind, int(self.ids[row]), path, label, float(score), float(distance), **others)


def _digest(content: bytes) -> np.ndarray:
    return np.frombuffer(hashlib.blake2b(content, digest_size=16).digest(), np.uint64)
