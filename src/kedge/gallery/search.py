"""Two-stage search over one snapshot of a gallery: nearest anchors first, then only their inverted lists."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from kedge.errors import ConfigError
from kedge.gallery.anchors import Anchors
from kedge.gallery.distances import norms_of, parallel_cdist, squared_distances
from kedge.gallery.inverted_lists import InvertedLists

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "BLOCK",
    "Columns",
    "Hit",
    "Item",
    "Masks",
    "Part",
    "Result",
    "Snapshot",
    "k_nearest",
    "results_to_pandas",
    "similarity",
]

Masks = Sequence["np.ndarray | None"]
"""Which rows of each part count; None: all."""
_SORTED_ANCHORS = 1024
"""Anchors that are sorted at first where it is not known how many lists hold enough candidates."""
BLOCK = 1 << 24
"""Distances of a batch of queries that are held at once."""
_ROUNDING = 1e-5
"""Of the squared lengths: the error of |x|² − 2x·q + |q|² in single precision."""


class Hit(NamedTuple):
    """One item that was found."""

    id: int
    path: str | None
    label: str | None
    distance: float
    anchor: str | None


class Item(NamedTuple):
    """One item of a gallery."""

    id: int
    path: str | None
    label: str | None
    metadata: dict[str, Any]


def similarity(distance: float, length: float) -> float:
    """How alike vectors at a distance are, from 0 to 1: max(0, 1 - d² / 2|q|²), with the `length` |q| of the query.

    Of vectors of length 1 that is their cosine (0 where it is negative). Others have the cosine of two vectors as long
    as the query and as far apart, so that the order is that of the distances.
    """
    if length == 0:
        return float(distance == 0)
    return max(0.0, 1 - (distance / length) ** 2 / 2)


class Columns(NamedTuple):
    """Hits, nearest first, a sequence for each of their fields."""

    ids: Sequence[int]
    paths: Sequence[str | None]
    labels: Sequence[str | None]
    distances: Sequence[float]
    anchors: Sequence[str | None]


class Result:
    """What a search found: iterate it for hits, nearest first."""

    __slots__ = ("_columns", "_hits", "anchors", "compared", "length", "rank", "seconds", "unknown")

    def __init__(
        self,
        columns: Columns,
        anchors: list[str | None],
        unknown: bool | None,
        seconds: float = 0.0,
        rank: Literal["class", "looks"] = "class",
        compared: Literal["embedding", "features"] = "embedding",
        length: float = 1.0,
    ) -> None:
        self._columns = columns
        self._hits: list[Hit] | None = None
        self.anchors = anchors
        """The anchors whose lists were searched, nearest first; none where items were ranked by looks."""
        self.unknown = unknown
        """Whether the query is unlike every trained class; None where nothing was calibrated."""
        self.seconds = seconds
        self.rank = rank
        """Whether items were ranked by class, in the lists of the nearest anchors, or by looks, whatever the label."""
        self.compared = compared
        """Which vectors the distances are between."""
        self.length = length
        """The length of the query's vector, which the similarities are relative to."""

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

    @property
    def similarities(self) -> list[float]:
        """How alike each hit is, from 0 to 1; see `similarity`."""
        return [similarity(distance, self.length) for distance in self._columns.distances]

    def __iter__(self) -> Iterator[Hit]:
        return iter(self.hits)

    def __len__(self) -> int:
        return len(self._columns.ids)

    def __repr__(self) -> str:
        first = next(iter(self), None)
        nearest = "" if first is None else f", nearest: {first.path or first.id} ({first.label}, {first.distance:.4g})"
        unknown = ", unknown" if self.unknown else ""
        return f"Result({len(self):,} hits by {self.rank}{nearest}{unknown}, {self.seconds * 1000:.3g} ms)"

    def to_pandas(self) -> pd.DataFrame:
        """The hits as a table, a row each, nearest first; the index is their rank, from 1."""
        import pandas as pd

        return pd.DataFrame(self.hits, pd.RangeIndex(1, len(self) + 1, name="rank"), Hit._fields)


def results_to_pandas(results: Iterable[Result], queries: Iterable[object] | None = None) -> pd.DataFrame:
    """The hits of several results as one table; a column `query` has the name or, without `queries`, the number."""
    import pandas as pd

    tables = [result.to_pandas() for result in results]
    names = range(len(tables)) if queries is None else [str(query) for query in queries]
    if len(names) != len(tables):
        raise ConfigError(f"There are {len(tables)} results but {len(names)} queries; give one name for each result.")
    if not tables:
        return pd.DataFrame(columns=["query", "rank", *Hit._fields])
    return pd.concat(tables, keys=names, names=["query"]).reset_index()


@dataclass(frozen=True)
class Part:
    """Inverted lists and the mask of their rows that are not deleted; None where all are there."""

    lists: InvertedLists
    alive: np.ndarray | None = None


class Candidates(NamedTuple):
    """Rows of one list of a part (or of all, where `number` is None) and their exact squared distances."""

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
    def alive(self) -> Masks:
        """The masks of all items."""
        return [part.alive for part in self.parts]

    def masks(self, ids: np.ndarray) -> Masks:
        """The masks of the items with some ids."""
        matches = [np.isin(part.lists.ids, ids) for part in self.parts]
        return [mask if alive is None else mask & alive for mask, alive in zip(matches, self.alive, strict=True)]

    def search(
        self,
        queries: np.ndarray,
        k: int,
        probes: int | None = 1,
        min_candidates: int = 0,
        masks: Masks | None = None,
        exclude: np.ndarray | None = None,
    ) -> tuple[list[Columns], list[np.ndarray] | None]:
        """The k nearest items of each query, and the anchors whose lists were searched, nearest first (None: all).

        Searches the lists of the `probes` nearest anchors (None: all lists), and more until they hold
        `min_candidates`; where these lists are empty, goes on to the nearest one that is not. With the `masks` of a
        filter, only lists that hold matching items, and more of them until they hold k. `exclude` has the id of the
        item that each query leaves out.
        """
        if probes is None:
            return self.scan(queries, k, None, masks, exclude), None
        probed = self.probe(queries, k, probes, min_candidates, masks, exclude)
        hits = self.scan(queries, k, probed, masks, exclude)
        if masks is not None:
            return hits, probed
        empty = [row for row, columns in enumerate(hits) if not columns.ids]
        if empty:
            candidates = 1 if exclude is None else 2  # the excluded item counts as one
            farther = self.probe(queries[empty], k, probes, candidates)
            farther_hits = self.scan(queries[empty], k, farther, None, None if exclude is None else exclude[empty])
            for row, numbers, columns in zip(empty, farther, farther_hits, strict=True):
                probed[row], hits[row] = numbers, columns
        return hits, probed

    def probe(
        self,
        queries: np.ndarray,
        k: int,
        probes: int,
        min_candidates: int = 0,
        masks: Masks | None = None,
        exclude: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        """For each query the lists to search, nearest first; see `search`."""
        probes = min(probes, len(self.anchors))
        if masks is None and not min_candidates:
            return list(self.anchors.nearest(queries, probes))
        sizes, anchors, numbers = self.list_sizes(masks), self.anchors, np.arange(len(self.anchors))
        if masks is not None:
            numbers = np.flatnonzero(sizes)
            anchors = anchors.subset(numbers)
            # The excluded item may be one of those that match.
            min_candidates = max(min_candidates, k + (exclude is not None))
        count = max(probes, _SORTED_ANCHORS)
        while True:
            order = numbers[anchors.nearest(queries, min(count, len(anchors)))]
            needed = [np.searchsorted(np.cumsum(sizes[row]), min_candidates) + 1 for row in order]
            if count >= len(anchors) or max(needed, default=0) <= count:
                return [row[: max(probes, lists)] for row, lists in zip(order, needed, strict=True)]
            count *= 8  # of very many anchors, seldom all are needed

    def list_sizes(self, masks: Masks | None = None) -> np.ndarray:
        """How many items each list holds, or how many of those that match."""
        sizes = np.zeros(len(self.anchors), np.int64)
        for part, mask in zip(self.parts, self.alive if masks is None else masks, strict=True):
            offsets = part.lists.offsets
            counts = np.diff(offsets) if mask is None else np.diff(np.concatenate([[0], np.cumsum(mask)])[offsets])
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
        probed: list[np.ndarray] | None,
        masks: Masks | None = None,
        exclude: np.ndarray | None = None,
    ) -> list[Columns]:
        """The k nearest items of each query in its probed lists, or (None) in all of them."""
        count = k if exclude is None else k + 1
        candidates: list[list[Candidates]] = [[] for _ in queries]
        masks = self.alive if masks is None else masks
        for part, number, asking, start, end in self.ranges(len(queries), probed):
            lists, mask = self.parts[part].lists, masks[part]
            if len(asking) == 1:
                squares = parallel_cdist(queries[asking[0]][None], lists.vectors[start:end])
                rows = k_nearest(squares, count, None if mask is None else mask[start:end])
                candidates[asking[0]].append(Candidates(part, number, rows + start, squares.take(rows)))
                continue
            for row, rows, squares in _scan_list_batch(lists, start, end, queries[asking], count, mask):
                candidates[asking[row]].append(Candidates(part, number, rows, squares))
        excluded = [None] * len(candidates) if exclude is None else exclude.tolist()
        return [self._rank(of_query, k, id) for of_query, id in zip(candidates, excluded, strict=True)]

    def ranges(
        self, queries: int, probed: list[np.ndarray] | None
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

    def _rank(self, candidates: list[Candidates], k: int, exclude_id: int | None) -> Columns:
        """Candidates of all lists and parts by distance, ties by id."""
        if len(candidates) == 1 and exclude_id is None and candidates[0].number is not None:
            part, number, rows, squares = candidates[0]
            order = squares.argsort(kind="stable")[:k]  # the rows of a list are in order of their ids
            return self._columns(self.parts[part].lists, rows.take(order), squares.take(order), number)
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

    def _columns(
        self, lists: InvertedLists, rows: np.ndarray, squares: np.ndarray, number: int | None = None
    ) -> Columns:
        names = self.anchors.names
        anchors: list[str | None]
        if number is None:
            anchors = [names[of_row] for of_row in (lists.offsets.searchsorted(rows, side="right") - 1).tolist()]
        else:
            anchors = [names[number]] * len(rows)
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


def _queries_by_list(queries: int, probed: list[np.ndarray] | None) -> list[tuple[int | None, list[int]]]:
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


def _scan_list_batch(
    lists: InvertedLists, start: int, end: int, queries: np.ndarray, k: int, mask: np.ndarray | None
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """At least the k nearest rows of several queries, which share a matrix product: query, rows, squared distances."""
    lengths = np.sqrt(norms_of(queries)).tolist()
    step = max(1, BLOCK // len(queries))
    for first in range(start, end, step):
        last = min(end, first + step)
        squares = squared_distances(queries, lists.vectors[first:last], lists.norms[first:last])
        allowed = None if mask is None else mask[first:last]
        for number, length in enumerate(lengths):
            rows = k_nearest(squares[number], k, allowed, length) + first
            # The product loses digits near zero: the candidates are computed again, by differences.
            yield number, rows, parallel_cdist(queries[number][None], lists.vectors.take(rows, axis=0))


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
