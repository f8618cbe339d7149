"""The items of one version of a gallery by row, for an audit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from kedge.audit.report import Finding, Kind
from kedge.gallery import Gallery
from kedge.gallery.snapshot import Items as GalleryItems

__all__ = ["MAX_DISTANCES", "Items"]

MAX_DISTANCES = 2**21
"""Distances that are held at once, whatever the number of anchors or items."""
_MAX_BLOCK = 4096


class Items(GalleryItems):
    """Rows 0 … n − 1 are what the gallery holds now; a few numbers for each are in memory, its vector is not."""

    def __init__(self, gallery: Gallery) -> None:
        super().__init__(gallery.verified_snapshot(), by_id=False)
        self._gallery = gallery
        self.anchors = self.snapshot.anchors
        numbers = {name: number for number, name in enumerate(self.anchors.names) if name is not None}
        # One more at the end, for the items without a label.
        anchor_of = np.array([*(numbers.get(name, -1) for name in self.label_names), -1])
        self.classes = anchor_of[self.labels]
        """The anchor of each label; -1 for an item without one."""

    def blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All rows with their embeddings, so many at a time that their distances to all anchors fit in memory."""
        size = min(_MAX_BLOCK, max(1, MAX_DISTANCES // len(self.anchors)))
        for start in range(0, len(self), size):
            rows = np.arange(start, min(start + size, len(self)))
            yield rows, self.vectors(rows)

    def contents(self) -> np.ndarray:
        """16 bytes per item that are the same for the same content: of its hash or, without one, of its vector."""
        keys = np.empty((len(self), 2), np.uint64)
        for rows, vectors in self.blocks():
            vectors += 0.0  # -0 is 0
            keys[rows] = [_digest(vector.tobytes()) for vector in vectors]
        order = np.argsort(self.ids)
        for batch in self._gallery.batches(["id", "hash"]):
            ids = np.asarray(batch.column("id"))
            positions = np.searchsorted(self.ids, ids, sorter=order)
            for id, position, digest in zip(ids, positions, batch.column("hash").to_pylist(), strict=True):
                # The table may hold newer items than this version.
                if digest is not None and position < len(order) and self.ids[order[position]] == id:
                    keys[order[position]] = _digest(digest.encode())
        return keys

    def finding(self, kind: Kind, row: int, score: float, distance: float, **others: Any) -> Finding:
        """Something about the item in a row."""
        path, label = self.describe(row)
        return Finding(kind, int(self.ids[row]), path, label, float(score), float(distance), **others)


def _digest(content: bytes) -> np.ndarray:
    return np.frombuffer(hashlib.blake2b(content, digest_size=16).digest(), np.uint64)
