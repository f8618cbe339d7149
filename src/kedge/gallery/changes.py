"""What a record holds that its lists do not, and the other way round, without holding all of either."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kedge.gallery.lists import Opened
from kedge.gallery.record import Record

__all__ = ["Change", "Marks", "compare"]

_BLOCK = 1 << 20
_DEAD, _ALIVE, _LISTED = 1, 2, 3


class Marks:
    """A small number for every id, 0 at first: one byte each."""

    def __init__(self) -> None:
        self._marks = np.zeros(1024, np.uint8)

    def set(self, ids: np.ndarray, mark: int) -> None:
        """Mark ids, unless they have a higher mark."""
        if not len(ids):
            return
        if (largest := int(ids.max())) >= len(self._marks):
            self._marks = np.concatenate([self._marks, np.zeros(largest + 1, np.uint8)])
        self._marks[ids] = np.maximum(self._marks[ids], mark)

    def of(self, ids: np.ndarray) -> np.ndarray:
        """The marks of ids, a block at a time."""
        found = np.zeros(len(ids), np.uint8)
        for start in range(0, len(ids), _BLOCK):
            some = ids[start : start + _BLOCK]
            known = (some >= 0) & (some < len(self._marks))
            found[start : start + _BLOCK][known] = self._marks[some[known]]
        return found

    def with_mark(self, mark: int) -> np.ndarray:
        """The ids that have it, ascending."""
        return np.flatnonzero(self._marks == mark)


class Change(NamedTuple):
    """Which rows of the lists still count (None: all), the ids that are not in them, and the files that hold those."""

    alive: np.ndarray | None
    new: np.ndarray
    files: set[str]


def compare(opened: Opened, record: Record) -> Change:
    """What has happened since the lists were written; only the files that came or changed are read."""
    pieces, known, lists = record.pieces(), opened.pieces, opened.lists
    touched = {file for file, removed in pieces.items() if known.get(file) != removed}
    # Files go where others take over their rows, and when an older state comes back.
    gone = not known.keys() <= pieces.keys()
    if gone:
        touched = set(pieces)
    marks = Marks()
    for ids, removed in record.ids_in(touched):
        marks.set(ids[removed], _DEAD)
        marks.set(ids[~removed], _ALIVE)
    if not gone and touched.isdisjoint(known):
        # Rows that only came, which is how most of it happens, are in no list.
        return Change(None, marks.with_mark(_ALIVE), touched)
    found = marks.of(lists.ids)
    marks.set(lists.ids[found == _ALIVE], _LISTED)
    alive = found == _ALIVE if gone else found != _DEAD
    return Change(None if alive.all() else alive, marks.with_mark(_ALIVE), touched)
