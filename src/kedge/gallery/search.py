"""Two-stage search over one state of a gallery: nearest anchors first, then only their lists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

import numpy as np

from kedge.gallery.anchors import Anchors
from kedge.gallery.lists import Lists
from kedge.gallery.scan import Found, Slice, near, near_many

__all__ = ["Columns", "Hit", "Masks", "Part", "Result", "Snapshot"]

Masks = list["np.ndarray | None"]
"""Which rows of each part count; None: all."""
_AT_FIRST = 1024
"""So many anchors are put in order where it is not known how many will do."""


class Hit(NamedTuple):
    """One item that was found."""

    id: int
    path: str | None
    label: str | None
    distance: float
    anchor: str | None


class Columns(NamedTuple):
    """Hits, nearest first, a sequence for each of their fields."""

    ids: Sequence[int]
    paths: Sequence[str | None]
    labels: Sequence[str | None]
    distances: Sequence[float]
    anchors: Sequence[str | None]


class Result:
    """What a search found: iterate it for hits, nearest first."""

    __slots__ = ("_columns", "_hits", "anchors", "seconds", "unknown")

    def __init__(self, columns: Columns, anchors: list[str | None], unknown: bool | None, seconds: float) -> None:
        self._columns = columns
        self._hits: list[Hit] | None = None
        self.anchors = anchors
        """The anchors whose lists were looked at, nearest first."""
        self.unknown = unknown
        """Whether the query is far from every anchor; None where the gallery was not calibrated."""
        self.seconds = seconds

    @property
    def hits(self) -> list[Hit]:
        """The hits, nearest first."""
        if self._hits is None:
            # What Hit(*values) does, at half the price: a search makes hundreds.
            self._hits = list(map(tuple.__new__, repeat(Hit), zip(*self._columns, strict=True)))
        return self._hits

    @property
    def ids(self) -> list[int]:
        """The ids of the hits."""
        return list(self._columns.ids)

    @property
    def distances(self) -> list[float]:
        """The distances of the hits."""
        return list(self._columns.distances)

    def __iter__(self) -> Iterator[Hit]:
        return iter(self.hits)

    def __len__(self) -> int:
        return len(self._columns.ids)

    def __repr__(self) -> str:
        return f"Result({len(self)} hits, anchors={self.anchors}, unknown={self.unknown}, seconds={self.seconds:.3g})"


@dataclass(frozen=True)
class Part:
    """Lists with those rows marked that still count; None where all do."""

    lists: Lists
    alive: np.ndarray | None = None


_Some = tuple[Lists, Slice, Found]
"""What was found in one list (or in all), and where."""


@dataclass(frozen=True)
class Snapshot:
    """One version of a gallery, which never changes: any number of threads may search it."""

    version: int
    anchors: Anchors
    parts: tuple[Part, ...]

    def __len__(self) -> int:
        return sum(len(p.lists) if p.alive is None else int(p.alive.sum()) for p in self.parts)

    def probed(self, queries: np.ndarray, probes: int, at_least: int, masks: Masks) -> list[np.ndarray]:
        """For each query the anchors to look at: the nearest, and more until their lists hold enough items."""
        if not at_least:
            return list(self.anchors.nearest(queries, probes))
        held = self.held(masks)
        asked = max(probes, _AT_FIRST)
        while True:
            order = self.anchors.nearest(queries, min(asked, len(self.anchors)))
            reached = [np.searchsorted(np.cumsum(held[row]), at_least) + 1 for row in order]
            if asked >= len(self.anchors) or max(reached, default=0) <= asked:
                return [row[: max(probes, count)] for row, count in zip(order, reached, strict=True)]
            asked *= 8  # of very many anchors, seldom all are needed

    def search(
        self, queries: np.ndarray, k: int, probed: list[np.ndarray] | None, masks: Masks, without: int | None = None
    ) -> list[Columns]:
        """For each query the k nearest items that no mask leaves out, in its lists or (None) in all of them."""
        wanted = k if without is None else k + 1
        found: list[list[_Some]] = [[] for _ in queries]
        for part, mask in zip(self.parts, masks, strict=True):
            lists = part.lists
            if probed is None:
                lists.prepare_all()
            else:
                for places in probed:
                    lists.prepare(places.tolist())
            for where, rows in _asked(lists, len(queries), probed):
                if where.start == where.end or not rows:
                    continue
                if len(rows) == 1:
                    found[rows[0]].append((lists, where, near(lists, where, queries[rows[0]], wanted, mask)))
                    continue
                for row, some in zip(rows, near_many(lists, where, queries[rows], wanted, mask), strict=True):
                    found[row] += [(lists, where, one) for one in some]
        return [self._ranked(one, k, without) for one in found]

    def _ranked(self, found: list[_Some], k: int, without: int | None) -> Columns:
        """What was found in all parts by distance, ties by id."""
        if len(found) == 1 and without is None:
            lists, where, (rows, squares) = found[0]
            # A list's rows stand in order of their ids; those of all lists do not.
            if where.place is not None:
                order = squares.argsort(kind="stable")[:k]
            else:
                order = np.lexsort((lists.ids.take(rows), squares))[:k]
            return self._columns(lists, where, rows.take(order), squares.take(order))
        ids = np.concatenate([*(lists.ids.take(one.rows + at.start) for lists, at, one in found), np.empty(0, int)])
        squares = np.concatenate([*(one.squares for *_, one in found), np.empty(0, np.float32)])
        order = np.lexsort((ids, squares))
        if without is not None:
            order = order[ids[order] != without]
        order = order[:k]
        table = np.empty((len(order), len(Columns._fields)), dtype=object)
        first = 0
        for lists, where, (rows, some) in found:
            ranks = np.flatnonzero((order >= first) & (order < first + len(rows)))
            if len(ranks):
                spots = order[ranks] - first
                for field, values in enumerate(self._columns(lists, where, rows[spots], some[spots])):
                    table[ranks, field] = values
            first += len(rows)
        return Columns(*table.T.tolist())

    def _columns(self, lists: Lists, where: Slice, rows: np.ndarray, squares: np.ndarray) -> Columns:
        homes: Sequence[str | None]
        if where.place is None:
            places = lists.offsets.searchsorted(rows, side="right") - 1
            homes = [self.anchors.names[home] for home in places.tolist()]
        else:
            homes = (self.anchors.names[where.place],) * len(rows)
        ids, paths, labels = lists.describe(rows + where.start)
        return Columns(ids, paths, labels, np.sqrt(squares).tolist(), homes)

    def held(self, masks: Masks) -> np.ndarray:
        """How many items each list holds."""
        held = np.zeros(len(self.anchors), np.int64)
        for part, mask in zip(self.parts, masks, strict=True):
            offsets = part.lists.offsets
            counts = np.diff(offsets) if mask is None else np.diff(np.concatenate([[0], np.cumsum(mask)])[offsets])
            held[: len(counts)] += counts
        return held


def _asked(lists: Lists, queries: int, probed: list[np.ndarray] | None) -> Iterable[tuple[Slice, list[int]]]:
    """Which queries look at which rows."""
    if probed is None:
        return [(Slice(None, 0, len(lists)), list(range(queries)))]
    if queries == 1:
        return [(lists.list_at(place), [0]) for place in probed[0].tolist()]
    askers: dict[int, list[int]] = {}
    for row, places in enumerate(probed):
        for place in places.tolist():
            askers.setdefault(place, []).append(row)
    return [(lists.list_at(place), rows) for place, rows in askers.items()]
