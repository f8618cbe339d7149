"""Two-stage search over one snapshot of a gallery: nearest anchors first, then only their inverted lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from kedge.gallery.anchors import Anchors
from kedge.gallery.distances import cached_cdist, in_threads, norms_of, parallel_cdist, squared_distances
from kedge.gallery.inverted_lists import InvertedLists
from kedge.gallery.result import Columns, NearestRows

__all__ = ["BLOCK", "Part", "Selections", "Snapshot", "k_nearest"]

_SORTED_ANCHORS = 1024
"""Anchors that are sorted at first where it is not known how many lists hold enough candidates."""
BLOCK = 1 << 24
"""Distances of a batch of queries that are held at once."""
_ROUNDING = 1e-5
"""Of the squared lengths: the error of |x|² − 2x·q + |q|² in single precision."""
_LONG_LIST, _MANY_QUERIES = 4096, 16
"""Beyond both, a matrix product that ranks and the k nearest computed again are faster than exact distances to all."""
_PIECE, _LONG_PIECE = 1 << 14, 1 << 18
"""Rows that are compared with queries at once: by exact distances, and by a matrix product."""
_THREADED_PAIRS = 5000
"""Of queries and rows: where pieces have fewer, threads wait longer for the interpreter's lock than they compare."""
_FIRST = np.zeros(1, np.int64)
"""The number of the only query."""
_MINIMA = 4
"""So many for each of the k nearest: most of these are then alone in theirs."""
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

    def between(self, start: int, end: int) -> np.ndarray:
        """The rows from one up to another."""
        first, last = self.rows.searchsorted((start, end)).tolist()
        return self.rows[first:last]


Selections = Sequence[Selection | None]
"""Which rows of each part count; None: all."""


class Range(NamedTuple):
    """Rows of a part: those of a list (None: all lists), and the queries that probe it."""

    part: int
    number: int | None
    asking: np.ndarray
    start: int
    end: int

    @property
    def by_product(self) -> bool:
        """Whether a matrix product is faster."""
        return len(self.asking) > _MANY_QUERIES and self.end - self.start > _LONG_LIST

    def pieces(self) -> Iterator[Range]:
        """It, cut so that the distances of a piece fit in memory and threads share the work."""
        rows = _LONG_PIECE if self.by_product else _PIECE
        queries = max(1, BLOCK // min(rows, self.end - self.start))
        for first in range(0, len(self.asking), queries):
            for start in range(self.start, self.end, rows):
                asking, end = self.asking[first : first + queries], min(start + rows, self.end)
                yield self._replace(asking=asking, start=start, end=end)


class Candidates(NamedTuple):
    """Queries, a row for each, counted through all parts, and their exact squared distances."""

    queries: np.ndarray
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
        exclude: np.ndarray | None = None,
    ) -> tuple[list[NearestRows], Sequence[np.ndarray] | None]:
        """The k nearest items of each query, and the anchors whose lists were searched, nearest first (None: all).

        Searches the lists of the `probes` nearest anchors (None: all lists), and more until they hold
        `min_candidates`; where these lists are empty, goes on to the nearest one that is not. With the items that are
        `matching` a filter, only lists that hold some of them, and more lists until they hold k. `exclude` has the id
        of the item that each query leaves out.
        """
        if probes is None:
            return self.scan(queries, k, None, matching, exclude), None
        probed = self.probe(queries, k, probes, min_candidates, matching, exclude)
        hits = self.scan(queries, k, probed, matching, exclude)
        if matching is not None:
            return hits, probed
        empty = [row for row, nearest in enumerate(hits) if not len(nearest.rows)]
        if empty:
            candidates = 1 if exclude is None else 2  # the excluded item counts as one
            farther = self.probe(queries[empty], k, probes, candidates)
            farther_hits = self.scan(queries[empty], k, farther, None, None if exclude is None else exclude[empty])
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
        exclude: np.ndarray | None = None,
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
            min_candidates = max(min_candidates, k + (exclude is not None))
        count = max(probes, _SORTED_ANCHORS)
        while True:
            order = numbers[anchors.nearest(queries, min(count, len(anchors)))]
            needed = np.count_nonzero(sizes[order].cumsum(axis=1) < min_candidates, axis=1) + 1
            if count >= len(anchors) or needed.max(initial=0) <= count:
                return [row[:lists] for row, lists in zip(order, needed.clip(min=probes).tolist(), strict=True)]
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
        exclude: np.ndarray | None = None,
    ) -> list[NearestRows]:
        """The k nearest items of each query in its probed lists, or (None) in all of them."""
        count = k if exclude is None else k + 1
        selections, ranges = self.alive if matching is None else matching, self.ranges(len(queries), probed)
        if len(queries) == 1:
            rows, squares = self._near_one(queries, ranges, selections, count)
            return [self.rank(rows, squares, k, None if exclude is None else exclude[0])]
        limits = np.full(len(queries), np.inf, np.float32)
        pieces = [piece for each in ranges for piece in each.pieces()]
        pairs = sum(len(piece.asking) * (piece.end - piece.start) for piece in pieces)
        is_threaded = pairs > _THREADED_PAIRS * len(pieces)
        asking = np.concatenate([np.empty(0, np.int64), *(piece.asking for piece in pieces)])
        is_merged = bool((np.bincount(asking) > 1).any())  # else all that a query probes is in one piece
        # SimSIMD's own threads would spin in the way of ours.
        compare = cached_cdist if is_threaded else parallel_cdist

        def candidates(piece: Range) -> Candidates:
            near = self._near(piece, queries, selections[piece.part], limits, count, compare)
            return near if is_merged else self._sorted(near, exclude)

        found = in_threads(candidates, pieces) if is_threaded else list(map(candidates, pieces))
        return self._first(self._merge(found, limits, exclude) if is_merged else found, len(queries), k)

    def _near_one(
        self, query: np.ndarray, ranges: Sequence[Range], selections: Selections, k: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The rows of some ranges that may be among the k nearest of one query, and their squared distances."""
        if len(ranges) == 1 and selections[ranges[0].part] is None:
            part, _, _, start, end = ranges[0]
            of_list = parallel_cdist(query, self.parts[part].lists.vectors[start:end])[0]
            near = k_nearest(of_list, k, None)
            return near + (start + self.starts[part]), of_list.take(near)
        rows, squares, sparse = [np.empty(0, np.int64)], [np.empty(0, np.float32)], dict[int, list[np.ndarray]]()
        for part, _, _, start, end in ranges:
            selection = selections[part]
            own = np.arange(start, end) if selection is None else selection.between(start, end)
            if len(own) * _SPARSE <= end - start:
                sparse.setdefault(part, []).append(own)
                continue
            of_range = parallel_cdist(query, self.parts[part].lists.vectors[start:end])[0]
            rows.append(own + self.starts[part])
            squares.append(of_range if selection is None else of_range.take(own - start))
        for part, several in sparse.items():
            own = np.concatenate(several)
            rows.append(own + self.starts[part])
            squares.append(parallel_cdist(query, self.parts[part].lists.vectors.take(own, axis=0))[0])
        all_rows, all_squares = np.concatenate(rows), np.concatenate(squares)
        near = k_nearest(all_squares, k, None)
        return all_rows.take(near), all_squares.take(near)

    def _near(
        self,
        piece: Range,
        queries: np.ndarray,
        selection: Selection | None,
        limits: np.ndarray,
        k: int,
        compare: Callable[[np.ndarray, np.ndarray], np.ndarray],
    ) -> Candidates:
        """The rows of a piece that may be among the k nearest of the queries that probe it.

        `limits` has for each query what its k-th distance does not exceed, as far as it is known. Threads that set it
        at once do no harm: one of their values stays, and each is true.
        """
        part, _, asking, start, end = piece
        lists, columns = self.parts[part].lists, None
        rows, vectors, norms = np.arange(start, end), lists.vectors[start:end], lists.norms[start:end]
        if selection is not None:
            rows = selection.between(start, end)
            if len(rows) * _SPARSE <= end - start:
                vectors, norms = lists.vectors.take(rows, axis=0), lists.norms.take(rows)
            else:
                columns = rows - start
        queries = queries.take(asking, axis=0)
        if piece.by_product:
            lengths, squares = np.sqrt(norms_of(queries)), squared_distances(queries, vectors, norms)
        else:
            lengths, squares = None, compare(queries, vectors)
        squares = squares if columns is None else squares.take(columns, axis=1)
        limit = limits.take(asking)
        if len(rows) > k:
            limit = np.minimum(limit, _widen(_kth_bound(squares, k), lengths))
            limits[asking] = limit
        near = squares <= _widen(limit, lengths)[:, None]
        cells = np.flatnonzero(near)
        query, column = np.divmod(cells, max(1, len(rows)))
        exact = squares.take(cells)
        if piece.by_product:  # which loses digits near zero
            chosen = np.split(
                column if columns is None else columns.take(column), query.searchsorted(range(1, len(queries)))
            )
            pairs = zip(queries[:, None], chosen, strict=True)
            exact = np.concatenate([compare(one, vectors.take(some, axis=0))[0] for one, some in pairs])
        return Candidates(asking.take(query), rows.take(column) + self.starts[part], exact)

    def _merge(self, found: Sequence[Candidates], limits: np.ndarray, exclude: np.ndarray | None) -> list[Candidates]:
        """Those of all pieces in one, sorted, within the limits that the last piece left."""
        queries, rows, squares = (np.concatenate(columns) for columns in zip(*found, strict=True))
        near = squares <= limits.take(queries)
        return [self._sorted(Candidates(queries[near], rows[near], squares[near]), exclude)]

    def _sorted(self, candidates: Candidates, exclude: np.ndarray | None) -> Candidates:
        """By query, then by distance, without the item that each query leaves out."""
        queries, rows, squares = candidates
        if exclude is not None:
            others = self.ids(rows) != exclude.take(queries)
            queries, rows, squares = queries[others], rows[others], squares[others]
        # Squares are not negative, and are in the order of their bits.
        order = self._order(queries << 32 | squares.view(np.int32), rows)
        return Candidates(queries.take(order), rows.take(order), squares.take(order))

    def _first(self, found: Sequence[Candidates], count: int, k: int) -> list[NearestRows]:
        """The k nearest of each query, whose candidates are all in one place."""
        none = NearestRows(self.columns, np.empty(0, np.int64), np.empty(0, np.float32))
        nearest = [none] * count
        for queries, rows, squares in found:
            bounds = [0, *(np.flatnonzero(queries[1:] != queries[:-1]) + 1).tolist(), len(queries)]
            for start, end in pairwise(bounds if len(queries) else ()):
                own = slice(start, min(end, start + k))
                nearest[queries[start]] = NearestRows(self.columns, rows[own], squares[own])
        return nearest

    def _order(self, keys: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """What sorts rows by their keys, ties by id."""
        order = keys.argsort(kind="stable")
        ordered = keys.take(order)
        same = ordered[1:] == ordered[:-1]
        if same.any():  # seldom, and then few
            tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
            some = order.take(tied)
            order[tied] = some.take(np.lexsort((self.ids(rows.take(some)), keys.take(some))))
        return order

    def ranges(self, queries: int, probed: Sequence[np.ndarray] | None) -> list[Range]:
        """What is to be scanned.

        A list is compared with its checksums before; where some are probed, the disk is asked for them ahead.
        """
        by_list, ranges = _queries_by_list(queries, probed), list[Range]()
        for number_of_part, part in enumerate(self.parts):
            lists = part.lists
            if probed is None:
                lists.verify()
            else:
                lists.prefetch(number for number, _ in by_list if number is not None)
            for number, asking in by_list:
                start, end = (0, len(lists)) if number is None else lists.bounds(number)
                if start < end and len(asking):
                    ranges.append(Range(number_of_part, number, asking, start, end))
        return ranges

    def rank(self, rows: np.ndarray, squares: np.ndarray, k: int, exclude_id: int | None = None) -> NearestRows:
        """The k nearest of some rows, counted through all parts, by distance, ties by id."""
        order = self._order(squares, rows)
        if exclude_id is not None:
            order = order[self.ids(rows.take(order)) != exclude_id]
        return NearestRows(self.columns, rows.take(order[:k]), squares.take(order[:k]))

    def columns(self, rows: np.ndarray, squares: np.ndarray) -> Columns:
        """Hits by field, of rows that are counted through all parts."""
        if len(self.parts) == 1:
            return self._columns(self.parts[0].lists, rows, squares)
        table = np.empty((len(rows), len(Columns._fields)), dtype=object)
        for lists, mine, own in self.split(rows):
            for field, values in enumerate(self._columns(lists, own, squares[mine])):
                table[mine, field] = values
        return Columns(*table.T.tolist())

    def _columns(self, lists: InvertedLists, rows: np.ndarray, squares: np.ndarray) -> Columns:
        numbers = lists.offsets.searchsorted(rows, side="right") - 1
        return Columns(*lists.describe(rows), np.sqrt(squares).tolist(), self._names.take(numbers).tolist())

    @cached_property
    def _names(self) -> np.ndarray:
        """Of the anchors, to be taken many at once."""
        return np.array(self.anchors.names, dtype=object)

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

    def ids(self, rows: np.ndarray) -> np.ndarray:
        """The ids of some rows."""
        ids = np.empty(len(rows), np.int64)
        for lists, mine, own in self.split(rows):
            ids[mine] = lists.ids.take(own)
        return ids

    def vectors(self, rows: np.ndarray) -> np.ndarray:
        """The vectors of some rows, compared with their checksums."""
        vectors = np.empty((len(rows), self.anchors.vectors.shape[1]), np.float32)
        for lists, mine, own in self.split(rows):
            lists.verify_rows(own)
            vectors[mine] = lists.vectors.take(own, axis=0)
        return vectors


def _queries_by_list(queries: int, probed: Sequence[np.ndarray] | None) -> list[tuple[int | None, np.ndarray]]:
    """The lists to scan (None: all), and the queries that probe each."""
    if probed is None:
        return [(None, np.arange(queries))]
    if queries == 1:
        return [(number, _FIRST) for number in probed[0].tolist()]
    asking = np.arange(queries).repeat([len(lists) for lists in probed])
    numbers = np.concatenate([asking[:0], *probed])
    order = numbers.argsort(kind="stable")
    lists, starts = np.unique(numbers[order], return_index=True)
    return list(zip(lists.tolist(), np.split(asking[order], starts[1:]), strict=False))


def k_nearest(squares: np.ndarray, k: int, mask: np.ndarray | None, length: float | None = None) -> np.ndarray:
    """The rows that may be among the k nearest of those that the mask allows, ascending.

    With the `length` of the query, `squares` come from a matrix product and may be off by its rounding error.
    """
    rows = None if mask is None else np.flatnonzero(mask)
    if rows is not None:
        squares = squares[rows]
    if k >= len(squares):
        return np.arange(len(squares)) if rows is None else rows
    nearest: np.ndarray = (squares <= _widen(_kth_bound(squares[None], k), length)).nonzero()[0]
    return nearest if rows is None else rows[nearest]


def _kth_bound(squares: np.ndarray, k: int) -> np.ndarray:
    """For each row no less than its k-th smallest value and little more: the k-th smallest of minima over its columns.

    Selecting from all of them takes ten times as long where there are thousands.
    """
    rows, columns = squares.shape
    if (fold := columns // (_MINIMA * k)) > 1:
        squares = squares[:, : columns // fold * fold].reshape(rows, fold, -1).min(axis=1)
    kth: np.ndarray = np.partition(squares, k - 1, axis=1)[:, k - 1]
    return kth


def _widen(kth: Any, length: Any) -> Any:
    """The k-th smallest square of a matrix product, and its rounding error, by the length of the query (None: exact).

    A row nearer than the k-th is no longer than this, and so are the digits it can have lost.
    """
    if length is None:
        return kth
    kth = np.maximum(kth, 0)
    return kth + 2 * _ROUNDING * ((length + np.sqrt(kth)) ** 2 + length**2)
