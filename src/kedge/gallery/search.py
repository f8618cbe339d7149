"""Two-stage search over one snapshot of a gallery: nearest anchors first, then only their inverted lists."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from kedge.gallery.anchors import Anchors
from kedge.gallery.distances import norms_of, parallel_cdist, smallest, squared_distances, take_columns
from kedge.gallery.inverted_lists import InvertedLists
from kedge.gallery.result import Columns, Nearest, NearestRows

__all__ = ["BLOCK", "Part", "Selections", "Snapshot", "k_nearest"]

_SORTED_ANCHORS = 1024
"""Anchors that are sorted at first where it is not known how many lists hold enough candidates."""
BLOCK = 1 << 24
"""Distances of a batch of queries that are held at once."""
_ROUNDING = 1e-5
"""Of the squared lengths: the error of |x|² − 2x·q + |q|² in single precision."""
_LONG_LIST, _MANY_QUERIES = 4096, 16
"""Beyond both, a matrix product that ranks and the k nearest computed again are faster than exact distances to all."""
_SPARSE = 4
"""Where one row in so many or fewer counts, only those are compared."""


@dataclass(frozen=True)
class Part:
    """Inverted lists and the mask of their rows that are not deleted; None where all are there."""

    lists: InvertedLists
    alive: np.ndarray | None = None

    def select(self, mask: np.ndarray | None) -> Selection | None:
        """The rows that a mask allows and that are not deleted; None where all are."""
        masks = [each for each in (mask, self.alive) if each is not None]
        if not masks:
            return None
        rows = np.logical_and.reduce(masks).nonzero()[0]
        return Selection(rows, rows.searchsorted(self.lists.offsets))


class Selection(NamedTuple):
    """The rows of a part that count, ascending, and where those of each list begin among them."""

    rows: np.ndarray
    offsets: np.ndarray

    def of_list(self, number: int | None) -> np.ndarray:
        """The rows of a list, or of all."""
        return self.rows if number is None else self.rows[self.offsets[number] : self.offsets[number + 1]]


Selections = Sequence[Selection | None]
"""Which rows of each part count; None: all."""


class Candidates(NamedTuple):
    """Rows of one list of a part (or of all, where `number` is None), nearest first, and exact squared distances."""

    part: int
    number: int | None
    rows: np.ndarray
    squares: np.ndarray


@dataclass(frozen=True)
class Snapshot:
    """One version of a gallery, which never changes: any number of threads may search it."""

    version: int
    anchors: Anchors
    parts: tuple[Part, ...]

    def __len__(self) -> int:
        return sum(len(part.lists) if part.alive is None else int(part.alive.sum()) for part in self.parts)

    @cached_property
    def alive(self) -> Selections:
        """All items."""
        return [part.select(None) for part in self.parts]

    def matching(self, ids: np.ndarray) -> Selections:
        """The items with some ids."""
        return [part.select(np.isin(part.lists.ids, ids)) for part in self.parts]

    def search(
        self,
        queries: np.ndarray,
        k: int,
        probes: int | None = 1,
        min_candidates: int = 0,
        matching: Selections | None = None,
        exclude_id: int | None = None,
    ) -> tuple[list[Nearest], Sequence[np.ndarray] | None]:
        """The k nearest items of each query, and the anchors whose lists were searched, nearest first (None: all).

        Searches the lists of the `probes` nearest anchors (None: all lists), and more until they hold
        `min_candidates`; where these lists are empty, goes on to the nearest one that is not. With the items that are
        `matching` a filter, only lists that hold some of them, and more lists until they hold k.
        """
        if probes is None:
            return self.scan(queries, k, None, matching, exclude_id), None
        probed = self.probe(queries, k, probes, min_candidates, matching, exclude_id)
        hits = self.scan(queries, k, probed, matching, exclude_id)
        if matching is not None:
            return hits, probed
        empty = [row for row, nearest in enumerate(hits) if isinstance(nearest, Columns) and not nearest.ids]
        if empty:
            candidates = 1 if exclude_id is None else 2  # the excluded item counts as one
            farther = self.probe(queries[empty], k, probes, candidates)
            farther_hits = self.scan(queries[empty], k, farther, None, exclude_id)
            probed = list(probed)
            for row, numbers, nearest in zip(empty, farther, farther_hits, strict=True):
                probed[row], hits[row] = numbers, nearest
        return hits, probed

    def probe(
        self,
        queries: np.ndarray,
        k: int,
        probes: int,
        min_candidates: int = 0,
        matching: Selections | None = None,
        exclude_id: int | None = None,
    ) -> Sequence[np.ndarray]:
        """For each query the lists to search, nearest first; see `search`."""
        probes = min(probes, len(self.anchors))
        if matching is None and not min_candidates:
            nearest: Sequence[np.ndarray] = self.anchors.nearest(queries, probes)  # type: ignore[assignment]
            return nearest
        sizes, anchors, numbers = self.list_sizes(matching), self.anchors, np.arange(len(self.anchors))
        if matching is not None:
            numbers = np.flatnonzero(sizes)
            anchors = anchors if len(numbers) == len(anchors) else anchors.subset(numbers)
            # The excluded item may be one of those that match.
            min_candidates = max(min_candidates, k + (exclude_id is not None))
        count = max(probes, _SORTED_ANCHORS)
        while True:
            order = numbers[anchors.nearest(queries, min(count, len(anchors)))]
            needed = [np.searchsorted(np.cumsum(sizes[row]), min_candidates) + 1 for row in order]
            if count >= len(anchors) or max(needed, default=0) <= count:
                return [row[: max(probes, lists)] for row, lists in zip(order, needed, strict=True)]
            count *= 8  # of very many anchors, seldom all are needed

    def list_sizes(self, matching: Selections | None = None) -> np.ndarray:
        """How many items each list holds, or how many of those that match."""
        sizes = np.zeros(len(self.anchors), np.int64)
        for part, selection in zip(self.parts, self.alive if matching is None else matching, strict=True):
            counts = np.diff(part.lists.offsets if selection is None else selection.offsets)
            sizes[: len(counts)] += counts
        return sizes

    @cached_property
    def sizes(self) -> np.ndarray:
        """How many items each list holds."""
        return self.list_sizes()

    @cached_property
    def _list_numbers(self) -> dict[str | None, int]:
        return {name: number for number, name in enumerate(self.anchors.names)}

    def items_in(self, lists: Sequence[str | None], query: np.ndarray) -> int:
        """How many items some lists hold, by the names of their anchors; those without a name are the nearest ones."""
        if None in lists:
            numbers = self.anchors.nearest(query[None], len(lists))[0].tolist()
        else:
            numbers = [self._list_numbers[name] for name in lists if name in self._list_numbers]
        return int(self.sizes[numbers].sum())

    def scan(
        self,
        queries: np.ndarray,
        k: int,
        probed: Sequence[np.ndarray] | None,
        matching: Selections | None = None,
        exclude_id: int | None = None,
    ) -> list[Nearest]:
        """The k nearest items of each query in its probed lists, or (None) in all of them."""
        count = k if exclude_id is None else k + 1
        candidates: list[list[Candidates]] = [[] for _ in queries]
        selections = self.alive if matching is None else matching
        for part, number, asking, start, end in self.ranges(len(queries), probed):
            lists, selection = self.parts[part].lists, selections[part]
            rows = None if selection is None else selection.of_list(number)
            nearest = nearest_rows(lists, start, end, rows, queries[asking], count)
            for query, (its_rows, squares) in zip(asking, nearest, strict=True):
                candidates[query].append(Candidates(part, number, its_rows, squares))
        return [self._rank(of_query, k, exclude_id) for of_query in candidates]

    def ranges(
        self, queries: int, probed: Sequence[np.ndarray] | None
    ) -> Iterator[tuple[int, int | None, list[int], int, int]]:
        """What is to be scanned: a part, a list (None: all), the queries that probe it, its first row and its end.

        A list is compared with its checksums before; where some are probed, the disk is asked for them ahead.
        """
        by_list = _queries_by_list(queries, probed)
        for number_of_part, part in enumerate(self.parts):
            lists = part.lists
            if probed is None:
                lists.verify()
            else:
                lists.prefetch(number for number, _ in by_list if number is not None)
            for number, asking in by_list:
                start, end = (0, len(lists)) if number is None else lists.bounds(number)
                if start < end and asking:
                    yield number_of_part, number, asking, start, end

    def _rank(self, candidates: list[Candidates], k: int, exclude_id: int | None) -> Nearest:
        """Candidates of all lists and parts by distance, ties by id."""
        if len(candidates) == 1 and exclude_id is None:
            part, number, rows, squares = candidates[0]
            if number is not None and len(rows):  # the rows of a list are in order of their ids
                return NearestRows(self.parts[part].lists, rows, squares, self.anchors.names[number])
        rows = np.concatenate([np.empty(0, int), *(self.starts[part] + rows for part, _, rows, _ in candidates)])
        squares = np.concatenate([np.empty(0, np.float32), *(each.squares for each in candidates)])
        return self.rank(rows, squares, k, exclude_id)

    def rank(self, rows: np.ndarray, squares: np.ndarray, k: int, exclude_id: int | None = None) -> Columns:
        """The k nearest of some rows, counted through all parts, by distance, ties by id."""
        ids = np.empty(len(rows), np.int64)
        for lists, mine, own in self.split(rows):
            ids[mine] = lists.ids.take(own)
        order = np.lexsort((ids, squares))
        if exclude_id is not None:
            order = order[ids[order] != exclude_id]
        rows, squares = rows[order[:k]], squares[order[:k]]
        by_part = [(mine, self._columns(lists, own, squares[mine])) for lists, mine, own in self.split(rows)]
        if len(by_part) == 1:
            return by_part[0][1]
        table = np.empty((len(rows), len(Columns._fields)), dtype=object)
        for mine, columns in by_part:
            for field, values in enumerate(columns):
                table[mine, field] = values
        return Columns(*table.T.tolist())

    def _columns(self, lists: InvertedLists, rows: np.ndarray, squares: np.ndarray) -> Columns:
        numbers = (lists.offsets.searchsorted(rows, side="right") - 1).tolist()
        anchors = [self.anchors.names[number] for number in numbers]
        return Columns(*lists.describe(rows), np.sqrt(squares).tolist(), anchors)

    # ------------------------------------------------------------------ rows, counted through all parts

    @cached_property
    def starts(self) -> np.ndarray:
        """The first row of each part, and behind them the number of rows."""
        return np.cumsum([0, *(len(part.lists) for part in self.parts)])

    def split(self, rows: np.ndarray) -> Iterator[tuple[InvertedLists, np.ndarray | slice, np.ndarray]]:
        """Rows by part: its lists, which of `rows` are in them, and their rows there."""
        if len(self.parts) == 1:
            yield self.parts[0].lists, slice(None), rows
            return
        parts = np.searchsorted(self.starts, rows, side="right") - 1
        for number, part in enumerate(self.parts):
            mine = np.flatnonzero(parts == number)
            if len(mine):
                yield part.lists, mine, rows[mine] - self.starts[number]

    def vectors(self, rows: np.ndarray) -> np.ndarray:
        """The vectors of some rows, compared with their checksums."""
        vectors = np.empty((len(rows), self.anchors.vectors.shape[1]), np.float32)
        for lists, mine, own in self.split(rows):
            lists.verify_rows(own)
            vectors[mine] = lists.vectors.take(own, axis=0)
        return vectors


def _queries_by_list(queries: int, probed: Sequence[np.ndarray] | None) -> list[tuple[int | None, list[int]]]:
    """The lists to scan (None: all), and the queries that probe each."""
    if probed is None:
        return [(None, list(range(queries)))]
    if queries == 1:
        return [(number, [0]) for number in probed[0].tolist()]
    asking: dict[int | None, list[int]] = {}
    for row, numbers in enumerate(probed):
        for number in numbers.tolist():
            asking.setdefault(number, []).append(row)
    return list(asking.items())


def nearest_rows(
    lists: InvertedLists, start: int, end: int, rows: np.ndarray | None, queries: np.ndarray, k: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each query the k nearest of the rows `start:end`, or of some of these, ties by row; squared distances."""
    vectors, norms, columns = lists.vectors[start:end], lists.norms[start:end], None
    if rows is not None and len(rows) * _SPARSE <= end - start:
        vectors, norms = lists.vectors.take(rows, axis=0), lists.norms.take(rows)
    elif rows is not None:
        columns = rows - start
    step = max(1, BLOCK // max(1, len(vectors)))
    for first in range(0, len(queries), step):
        block = queries[first : first + step]
        if len(block) > _MANY_QUERIES and len(vectors) > _LONG_LIST:
            nearest = _by_product(block, vectors, norms, columns, k)
        else:
            squares = parallel_cdist(block, vectors)
            squares = squares if columns is None else squares.take(columns, axis=1)
            order = smallest(squares, k)
            nearest = zip(order, take_columns(squares, order), strict=True)
        for of_query, its_squares in nearest:
            yield of_query + start if rows is None else rows.take(of_query), its_squares


def _by_product(
    queries: np.ndarray, vectors: np.ndarray, norms: np.ndarray, columns: np.ndarray | None, k: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The same by a matrix product, which loses digits near zero: candidates are computed again, by differences."""
    lengths, product = np.sqrt(norms_of(queries)).tolist(), squared_distances(queries, vectors, norms)
    for query, length, squares in zip(queries, lengths, product, strict=True):
        near = k_nearest(squares if columns is None else squares.take(columns), k, None, length)
        chosen = near if columns is None else columns.take(near)
        exact = parallel_cdist(query[None], vectors.take(chosen, axis=0))[0]
        order = exact.argsort(kind="stable")[:k]
        yield near.take(order), exact.take(order)


def k_nearest(squares: np.ndarray, k: int, mask: np.ndarray | None, length: float | None = None) -> np.ndarray:
    """The rows that may be among the k nearest of those that the mask allows, ascending.

    With the `length` of the query, `squares` come from a matrix product and may be off by its rounding error.
    """
    rows = None if mask is None else np.flatnonzero(mask)
    if rows is not None:
        squares = squares[rows]
    if k >= len(squares):
        return np.arange(len(squares)) if rows is None else rows
    partitioned = squares.copy()
    partitioned.partition(k - 1)
    limit = partitioned[k - 1]
    if length is not None:
        # A row nearer than the k-th is no longer than this, and so are the digits it can have lost.
        kth = max(0.0, float(limit))
        limit = kth + 2 * _ROUNDING * ((length + math.sqrt(kth)) ** 2 + length**2)
    nearest: np.ndarray = (squares <= limit).nonzero()[0]
    return nearest if rows is None else rows[nearest]
