"""By class or by looks: a query that looks like its predicted class is ranked by class, any other one by looks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from kedge.gallery.anchors import EXACT_ITEMS
from kedge.gallery.distances import parallel_cdist, squared_distances
from kedge.gallery.search import BLOCK, Candidates, Columns, Snapshot, k_nearest
from kedge.gallery.snapshot import Items
from kedge.model.calibration import NEIGHBOURS
from kedge.model.calibration import familiarity as combined

__all__ = ["RANKS", "Comparison", "Pair", "Rank", "RankedSearch", "familiarity", "predicted_lists"]

Rank = Literal["auto", "class", "looks"]
RANKS = get_args(Rank)
_CANDIDATES = 100
"""Lists that hold one of so many nearest items are compared with a query."""
_SHARE = 8
"""Of the lists of a large looks space, one in so many is searched."""


class Pair:
    """One version of a gallery in both spaces: the class list of every item of the looks space.

    Rows are counted through all parts of the looks space.
    """

    def __init__(self, classes: Snapshot, looks: Snapshot) -> None:
        self.classes, self.looks = classes, looks
        for part in classes.parts:
            part.lists.verify()  # an item that a damaged id hides would be missed
        parts = [part.lists for part in looks.parts]
        self.starts = np.cumsum([0, *map(len, parts)])
        self.ids = np.concatenate([lists.ids for lists in parts])
        self.lists = np.full(len(self.ids), -1, np.int32)
        """The class list of each row; -1 for an item that is removed."""
        items = Items(classes)
        if len(items):
            positions = np.minimum(np.searchsorted(items.ids, self.ids), len(items) - 1)
            self.lists = np.where(items.ids[positions] == self.ids, items.lists[positions], -1)
        self._order = np.argsort(self.lists, kind="stable")
        self._offsets = np.searchsorted(self.lists[self._order], np.arange(len(classes.anchors) + 1))
        self.learned = classes.anchors.learned or len(classes.anchors)
        """Lists of the model's classes; all lists where no anchor was learned."""
        self.foreign = self._order[self._offsets[self.learned] :]
        """The rows of labels that the model never saw."""

    def features(self, id: int) -> np.ndarray | None:
        """The features of one item, compared with their checksums; None where it has none."""
        rows = np.flatnonzero((self.ids == id) & (self.lists >= 0))
        if not len(rows):
            return None
        part = int(np.searchsorted(self.starts, rows[0], side="right")) - 1
        lists, row = self.looks.parts[part].lists, rows[:1] - self.starts[part]
        lists.verify_rows(row)
        return np.array(lists.vectors[row[0]])

    def rows_in(self, lists: np.ndarray) -> np.ndarray:
        """The rows of some class lists."""
        bounds = zip(self._offsets[lists].tolist(), self._offsets[lists + 1].tolist(), strict=True)
        return np.concatenate([self._order[:0], *(self._order[start:end] for start, end in bounds)])


class Comparison:
    """Squared distances of some queries to the items of the looks space, queries × rows, by one matrix product.

    Infinite for items that are removed or excluded and, in a large gallery, for those of lists that were not searched.
    """

    def __init__(self, pair: Pair, features: np.ndarray, exclude_id: int | None, *, exhaustive: bool) -> None:
        self._pair, self._features = pair, features
        looks, probed = pair.looks, None
        self._complete = exhaustive or len(looks) <= EXACT_ITEMS
        if not self._complete:
            probed = list(looks.anchors.nearest(features, -(-len(looks.anchors) // _SHARE)))
        self.squares = np.full((len(features), len(pair.ids)), np.inf, np.float32)
        for part, _, asking, first, end in looks.ranges(len(features), probed):
            lists, start = looks.parts[part].lists, int(pair.starts[part])
            queries, vectors = features[asking], lists.vectors[first:end]
            self.squares[asking, start + first : start + end] = (
                parallel_cdist(queries, vectors)
                if len(asking) == 1
                else squared_distances(queries, vectors, lists.norms[first:end])
            )
        self._gone = pair.lists < 0
        if exclude_id is not None:
            self._gone |= pair.ids == exclude_id
        self.squares[:, self._gone] = np.inf

    def to_rows(self, query: int, rows: np.ndarray) -> np.ndarray:
        """The squared distances of one query to some rows, all of which are compared."""
        if not self._complete:
            missing = rows[np.isinf(self.squares[query, rows]) & ~self._gone[rows]]
            self.squares[query, missing] = self._by_differences(query, missing)
        squares: np.ndarray = self.squares[query, rows]
        return squares

    def nearest(self, query: int, k: int, rows: np.ndarray | None, mask: np.ndarray | None) -> Columns:
        """The k nearest items of one query, of all or of some rows, that the mask allows."""
        squares = self.squares[query] if rows is None else self.to_rows(query, rows)
        allowed = np.isfinite(squares)
        if mask is not None:
            allowed &= mask if rows is None else mask[rows]
        near = k_nearest(squares, k, allowed, 1.0)
        near = near if rows is None else np.sort(rows[near])
        exact = self._by_differences(query, near)
        parts = np.searchsorted(self._pair.starts, near, side="right") - 1
        candidates = []
        for number, part in enumerate(self._pair.looks.parts):
            mine = parts == number
            candidates.append(Candidates(part.lists, None, near[mine] - self._pair.starts[number], exact[mine]))
        columns = self._pair.looks.rank(candidates, k, None)
        # The lists of the looks space have no names: an item's anchor is that of its class list.
        lists = dict(zip(self._pair.ids[near].tolist(), self._pair.lists[near].tolist(), strict=True))
        names = self._pair.classes.anchors.names
        return columns._replace(anchors=[names[lists[id]] for id in columns.ids])

    def _by_differences(self, query: int, rows: np.ndarray) -> np.ndarray:
        """Exact squared distances of one query to some rows."""
        squares = np.empty(len(rows), np.float32)
        parts = np.searchsorted(self._pair.starts, rows, side="right") - 1
        for number, part in enumerate(self._pair.looks.parts):
            mine = np.flatnonzero(parts == number)
            own = rows[mine] - self._pair.starts[number]
            part.lists.verify_rows(own)
            squares[mine] = parallel_cdist(self._features[query][None], part.lists.vectors.take(own, axis=0))
        return squares


class Ranked(NamedTuple):
    """What was found for one query, and how: the fields of a `Result`."""

    columns: Columns
    anchors: list[str | None]
    unknown: bool | None
    rank: Literal["class", "looks"]


@dataclass(frozen=True)
class RankedSearch:
    """A search in both spaces; `probes` and the like as in `Snapshot.search`."""

    k: int
    probes: int | None
    min_candidates: int
    exclude_id: int | None
    matching: np.ndarray | None
    """The ids of the items that match a filter; None: all."""
    always_looks: bool
    threshold: float | None
    """The smallest familiarity of a known query."""

    def run(
        self, pair: Pair, embeddings: np.ndarray, features: np.ndarray, unknown: Sequence[bool | None]
    ) -> list[Ranked]:
        """Rank each query by class or by looks; without a threshold, `unknown` says which are."""
        ranked: list[Ranked] = []
        size = max(1, BLOCK // max(1, len(pair.ids)))
        for start in range(0, len(embeddings), size):
            rows = slice(start, start + size)
            ranked += self._rank(pair, embeddings[rows], features[rows], unknown[rows])
        return ranked

    def _rank(
        self, pair: Pair, embeddings: np.ndarray, features: np.ndarray, unknown: Sequence[bool | None]
    ) -> list[Ranked]:
        comparison = Comparison(pair, features, self.exclude_id, exhaustive=self.probes is None)
        if self.threshold is not None:
            unknown = (_familiarity(pair, comparison, embeddings) < self.threshold).tolist()
        mask = None if self.matching is None else np.isin(pair.ids, self.matching)
        lists = np.full(len(embeddings), -1)
        if not self.always_looks:
            lists = predicted_lists(pair, comparison, embeddings, unknown)
        known = np.flatnonzero((lists >= 0) & (lists < pair.learned))
        in_class = dict(zip(known.tolist(), self._in_class(pair, comparison, embeddings, known, mask), strict=True))
        names = pair.classes.anchors.names
        ranked = []
        for query, (number, is_unknown) in enumerate(zip(lists.tolist(), unknown, strict=True)):
            if query in in_class:
                ranked.append(Ranked(*in_class[query], is_unknown, "class"))
                continue
            columns, anchors = comparison.nearest(query, self.k, None, mask), list[str | None]()
            if number >= 0:
                own = comparison.nearest(query, self.k, pair.rows_in(np.array([number])), mask)
                columns, anchors = _first(own, columns, self.k), [names[number]]
            ranked.append(Ranked(columns, anchors, is_unknown, "looks"))
        return ranked

    def _in_class(
        self, pair: Pair, comparison: Comparison, embeddings: np.ndarray, queries: np.ndarray, mask: np.ndarray | None
    ) -> Iterator[tuple[Columns, list[str | None]]]:
        """Hits and anchors of known queries: their lists by looks or, where all are searched, all by distance.

        In a gallery with labels that the model never saw, the items of the nearest anchor come first then: embeddings
        of such labels lie anywhere between the anchors.
        """
        classes, names, embeddings = pair.classes, pair.classes.anchors.names, embeddings[queries]
        masks = None if self.matching is None else classes.masks(self.matching)
        if not len(queries):
            return
        if self.probes is None:
            found = classes.search(embeddings, self.k, None, 0, masks, self.exclude_id)[0]
            if len(pair.foreign):
                own = classes.search(embeddings, self.k, 1, 0, masks, self.exclude_id)[0]
                found = [_first(first, others, self.k) for first, others in zip(own, found, strict=True)]
            yield from ((columns, list(names)) for columns in found)
            return
        probed = classes.probe(embeddings, self.k, self.probes, self.min_candidates, masks, self.exclude_id)
        for query, numbers in zip(queries.tolist(), probed, strict=True):
            columns = comparison.nearest(query, self.k, pair.rows_in(numbers), mask)
            yield columns, [names[number] for number in numbers.tolist()]


def predicted_lists(
    pair: Pair, comparison: Comparison, embeddings: np.ndarray, unknown: Sequence[bool | None]
) -> np.ndarray:
    """The class list that each query belongs to; -1 where it looks like nothing that has one.

    In a gallery of the model's own classes, the list of the nearest anchor, unless the query is unknown. Where labels
    came later, the list whose three nearest items look most like the query, in the mean: embeddings cannot tell what
    the model never saw. Chosen on held-out photos of three datasets, half of whose classes came later.
    """
    lists = pair.classes.anchors.nearest(embeddings, 1)[:, 0].copy()
    if len(pair.foreign):
        for query in range(len(lists)):
            lists[query] = _most_alike(pair, comparison, query)
        return lists
    own = [len(pair.rows_in(lists[query : query + 1])) > 0 for query in range(len(lists))]
    known = [is_unknown is not True for is_unknown in unknown]
    return np.where(np.array(own, bool) & np.array(known, bool), lists, -1)


def _most_alike(pair: Pair, comparison: Comparison, query: int) -> int:
    """The list whose nearest items look most like a query, of those that hold one of the nearest items of all.

    A label that the model never saw wins where the nearest item of all has it: it may have few items, and must not be
    found less often than by features alone.
    """
    squares = comparison.squares[query]
    count = min(_CANDIDATES, len(squares))
    near = np.argpartition(squares, count - 1)[:count] if count else np.empty(0, int)
    near = near[np.isfinite(squares[near])]
    if not len(near):
        return -1
    nearest = int(pair.lists[near[squares[near].argmin()]])
    if nearest >= pair.learned:
        return nearest
    candidates = np.unique(pair.lists[near])
    means = [_mean_of_nearest(comparison.to_rows(query, pair.rows_in(np.array([number])))) for number in candidates]
    return int(candidates[int(np.argmin(means))])


def familiarity(pair: Pair, embeddings: np.ndarray, features: np.ndarray) -> np.ndarray:
    """How much some queries look like the class of their nearest anchor; see `kedge.model.calibration.familiarity`."""
    size = max(1, BLOCK // max(1, len(pair.ids)))
    parts = [slice(start, start + size) for start in range(0, len(features), size)]
    values = [
        _familiarity(pair, Comparison(pair, features[part], None, exhaustive=True), embeddings[part]) for part in parts
    ]
    return np.concatenate([np.empty(0), *values])


def _familiarity(pair: Pair, comparison: Comparison, embeddings: np.ndarray) -> np.ndarray:
    anchors = pair.classes.anchors
    lists = anchors.nearest(embeddings, 1)
    own = [_mean_of_nearest(comparison.to_rows(query, pair.rows_in(number))) for query, number in enumerate(lists)]
    distances = np.sqrt(anchors.nearest_squares(embeddings, lists[:, 0]))
    return combined(1 - np.array(own) / 2, distances, anchors.vectors[: pair.learned])


def _mean_of_nearest(squares: np.ndarray) -> float:
    """The mean of the three smallest, or of as many as there are; infinite where there is none."""
    finite = squares[np.isfinite(squares)]
    return float(np.partition(finite, min(NEIGHBOURS, len(finite)) - 1)[:NEIGHBOURS].mean()) if len(finite) else np.inf


def _first(own: Columns, others: Columns, k: int) -> Columns:
    """Hits, and behind them others that are not among them."""
    ids = set(own.ids)
    rest = [row for row, id in enumerate(others.ids) if id not in ids][: k - len(own.ids)]
    joined: Any = ([*mine, *(theirs[row] for row in rest)] for mine, theirs in zip(own, others, strict=True))
    return Columns(*joined)
