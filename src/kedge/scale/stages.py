"""What the workers do with a piece: read its pictures, embed them, write them. Chunks travel as one row each."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kedge.gallery.pictures import Batch, Known, gathered
from kedge.gallery.place import Place
from kedge.gallery.record import Record
from kedge.images import Preprocessing
from kedge.model import Model
from kedge.scale.journal import Entry, Journal
from kedge.scale.pieces import Item, Piece

__all__ = ["Embedder", "Reader", "Work", "Writer", "packed", "unpacked"]

Rows = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """A piece, and what the driver knows of it."""

    piece: Piece
    known: dict[str, Known]
    state: str
    done: frozenset[int]
    """Chunks, by their start, that are finished."""


@dataclass
class _Chunk:
    entry: Entry
    batch: Batch
    columns: dict[str, Any]


class Reader:
    """Reads and decodes: a piece in, its chunks out."""

    def __init__(self, first: int, preprocessing: Preprocessing, thumbnails: int) -> None:
        self._first = first
        self._preprocessing = preprocessing
        self._thumbnails = thumbnails

    def __call__(self, rows: Rows) -> Iterator[Rows]:
        """One chunk at a time, so that a large piece needs no more room than a small one."""
        for work in unpacked(rows):
            for start, items in work.piece.chunks():
                if start not in work.done:
                    yield packed(self._chunk(work, start, items))

    def _chunk(self, work: Work, start: int, items: list[Item]) -> _Chunk:
        paths = [item.path for item in items]
        found = [item.read(work.known.get(item.path), self._preprocessing, self._thumbnails) for item in items]
        batch = gathered(0, paths, found)
        there = [paths[row] for row in batch.rows]
        entry = Entry(
            start,
            len(items),
            work.state,
            ids=[self._first + start + row for row in batch.rows],
            replaced=[work.known[path].id for path in there if path in work.known],
            skipped=batch.skipped,
            present=batch.present,
        )
        columns: dict[str, Any] = {
            "id": entry.ids,
            "path": there,
            "label": [items[row].label for row in batch.rows],
            "hash": batch.hashes,
        }
        if self._thumbnails:
            columns["thumbnail"] = batch.thumbnails
        columns |= {name: [items[row].metadata[name] for row in batch.rows] for name in items[0].metadata}
        return _Chunk(entry, batch, columns)


class Embedder:
    """Holds the model, on a GPU if the worker was given one."""

    def __init__(self, model: list[Any]) -> None:
        import ray

        # In a list it comes as a reference, which a worker that takes over can still follow.
        found: Model = ray.get(model[0])
        self._model = copy.deepcopy(found).to("auto")

    def __call__(self, rows: Rows) -> Rows:
        """Vectors in the place of pixels."""
        [chunk] = unpacked(rows)
        if chunk.batch.images:
            chunk.columns["embedding"] = self._model.embed(chunk.batch.images).numpy()
        chunk.batch = Batch()
        return packed(chunk)


class Writer:
    """Writes rows that nobody sees until the driver commits them, and the entry that names them."""

    def __init__(self, place: Place, dim: int, first: int) -> None:
        self._place = place
        self._dim = dim
        self._first = first

    def __call__(self, rows: Rows) -> Rows:
        """Twice for the same chunk, after a failure, is no harm: one of the two entries stays."""
        [chunk] = unpacked(rows)
        entry = chunk.entry
        if entry.ids:
            fragments = Record(self._place, self._dim).write(chunk.columns)
            entry.written = [fragment.to_json() for fragment in fragments]
        Journal(str(self._place), self._first).write(entry)
        return packed(entry)


def packed(*values: Any) -> Rows:
    """Objects as rows: each one stays whole, however the rows are cut."""
    return {"packed": np.array([pickle.dumps(value, protocol=5) for value in values], dtype=object)}


def unpacked(rows: Rows) -> list[Any]:
    """The objects that `packed` made rows of."""
    return [pickle.loads(one) for one in rows["packed"]]
