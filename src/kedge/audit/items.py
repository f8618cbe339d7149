"""The items of one state of a gallery, by row, their vectors left where they are until asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

from kedge.gallery import Gallery

__all__ = ["Items"]

_BLOCK = 4096


class Items:
    """Rows 0 … n − 1 are what the gallery holds now; a few numbers for each are in memory, its vector is not."""

    def __init__(self, gallery: Gallery) -> None:
        snapshot = gallery.checked_snapshot()
        self._gallery = gallery
        self._lists = [part.lists for part in snapshot.parts]
        self.anchors = snapshot.anchors
        kept = [
            np.arange(len(part.lists)) if part.alive is None else np.flatnonzero(part.alive) for part in snapshot.parts
        ]
        self._part = np.repeat(np.arange(len(kept)), [len(rows) for rows in kept])
        self._row = np.concatenate([*kept, np.empty(0, np.int64)]).astype(np.int64)
        self.ids = np.empty(len(self), np.int64)
        places = {name: place for place, name in enumerate(self.anchors.names) if name is not None}
        self.classes = np.full(len(self), -1, np.int64)
        """The anchor of each label; -1 for an item without one."""
        for part, lists in enumerate(self._lists):
            # One more at the end, for the code -1.
            anchors = np.array([*(places.get(name, -1) for name in lists.label_names), -1])
            mine = self._part == part
            self.ids[mine] = lists.ids[self._row[mine]]
            self.classes[mine] = anchors[lists.labels[self._row[mine]]]

    def __len__(self) -> int:
        return len(self._row)

    def describe(self, row: int) -> tuple[str | None, str | None]:
        """Path and label of an item."""
        lists = self._lists[self._part[row]]
        _, paths, labels = lists.describe(self._row[row : row + 1])
        return paths[0], labels[0]

    def vectors(self, rows: np.ndarray) -> np.ndarray:
        """The embeddings of some rows."""
        found = np.empty((len(rows), self.anchors.vectors.shape[1]), np.float32)
        for part, lists in enumerate(self._lists):
            mine = self._part[rows] == part
            found[mine] = lists.vectors[self._row[rows[mine]]]
        return found

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
