"""The items of one state of a gallery, by row, their vectors left where they are until asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

from kedge.gallery import Gallery
from kedge.gallery.items import Items as GalleryItems

__all__ = ["Items"]

_BLOCK = 4096


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
        """All rows with their embeddings, some thousand at a time."""
        for start in range(0, len(self), _BLOCK):
            rows = np.arange(start, min(start + _BLOCK, len(self)))
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
            places = np.searchsorted(self.ids, ids, sorter=order)
            for id, place, known in zip(ids, places, batch.column("hash").to_pylist(), strict=True):
                # The record may hold newer items than this state.
                if known is not None and place < len(order) and self.ids[order[place]] == id:
                    keys[order[place]] = _digest(known.encode())
        return keys


def _digest(content: bytes) -> np.ndarray:
    return np.frombuffer(hashlib.blake2b(content, digest_size=16).digest(), np.uint64)
