"""By class or by looks: a query of a class that the model was trained on is ranked by class, any other one by looks."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from kedge.gallery.anchors import EXACT_ITEMS, Anchors
from kedge.gallery.calibration import CalibrationFile
from kedge.gallery.distances import norms_of, parallel_cdist, squared_distances, unit_rows
from kedge.gallery.inverted_lists import DamagedLists
from kedge.gallery.result import Columns, Nearest, Result, described
from kedge.gallery.search import BLOCK, Selections, Snapshot, k_nearest
from kedge.gallery.snapshot import Items, SnapshotLoader
from kedge.model.calibration import NEIGHBOURS, SHARES, familiarity

__all__ = ["RANKS", "Pair", "Rank", "Searcher", "VectorSearch", "compare", "looks_probes"]

Rank = Literal["auto", "class", "looks"]
RANKS = get_args(Rank)
_NEAR_ITEMS, _NEAR_ANCHORS = 100, 8
"""Of the lists, those that hold one of so many nearest items, or are of so many nearest anchors, may be predicted."""
_LOOKS_WEIGHT, _MIN_COSINE = 30.0, 1e-4
_SAME = 1e-5
"""The squared distance between features of the same image, but for rounding."""
_FILTERS = 8
_SHARE = 8
"""Of the lists of a large looks space, one in so many is searched."""


class VectorSearch(NamedTuple):
    """What is asked for; `probes` None: all lists."""

    k: int
    probes: int | None
    min_candidates: int
    where: str | None
    exclude: np.ndarray | None
    """The id of the item that each query leaves out."""
    rank: Rank
    min_familiarity: float | None
    """Of a known query; None: it is known by the distance to its nearest anchor."""


class Matching(NamedTuple):
    """The items of a snapshot that a filter allows."""

    ids: np.ndarray
    selections: Selections


class Searcher:
    """Searches snapshots of the class space and, in a gallery that keeps features, of the looks space."""

    def __init__(self, classes: SnapshotLoader, looks: SnapshotLoader | None, calibration: CalibrationFile) -> None:
        self._classes, self._looks, self._calibration = classes, looks, calibration
        self._pair: Pair | None = None
        self._filters: OrderedDict[str, tuple[Snapshot, Matching]] = OrderedDict()
        """What the last filters found: asking the table takes longer than a search."""

    def search(
        self, snapshot: Snapshot, embeddings: np.ndarray, features: np.ndarray | None, how: VectorSearch
    ) -> list[Result]:
        """A result for each query; by distance of embeddings where there are no features to compare."""
        started = time.perf_counter()
        try:
            results = self._search(snapshot, embeddings, features, how)
        except DamagedLists:
            for loader in (self._classes, self._looks):
                if loader is not None:
                    loader.verified()
            results = self._search(self._classes.latest(), embeddings, features, how)
        seconds = (time.perf_counter() - started) / max(1, len(embeddings))
        for result in results:
            result.seconds = seconds
        return results

    def paired(self, snapshot: Snapshot) -> Pair:
        """A snapshot, and that of the looks space of the same version."""
        assert self._looks is not None
        looks, pair = self._looks.at(snapshot.version), self._pair
        if pair is None or pair.classes is not snapshot or pair.looks is not looks:
            self._pair = pair = Pair(snapshot, looks)
        return pair

    def is_unknown(
        self, anchors: Anchors, queries: np.ndarray, probed: Sequence[np.ndarray] | None = None
    ) -> list[bool | None]:
        """Whether each query is far from every anchor, the first of `probed` if known; None without a calibration."""
        if (calibration := self._calibration.load()) is None:
            return [None] * len(queries)
        nearest = None if probed is None else np.array([numbers[0] for numbers in probed], dtype=np.int64)
        unknown: list[bool | None] = (
            np.sqrt(anchors.nearest_squares(queries, nearest)) > calibration.threshold
        ).tolist()
        return unknown

    def _matching(self, snapshot: Snapshot, where: str) -> Matching:
        searched, matching = self._filters.get(where, (None, None))
        if matching is None or searched is not snapshot:
            ids = self._classes.matching(snapshot, where)
            matching = Matching(ids, snapshot.matching(ids))
            self._filters[where] = snapshot, matching
            if len(self._filters) > _FILTERS:
                self._filters.popitem(last=False)
        return matching

    def _search(
        self, snapshot: Snapshot, embeddings: np.ndarray, features: np.ndarray | None, how: VectorSearch
    ) -> list[Result]:
        matching = None if how.where is None else self._matching(snapshot, how.where)
        if how.rank != "class" and features is not None and self._looks is not None:
            pair = self.paired(snapshot)
            # Without a learned anchor nothing is predicted, and without an item in the looks space nothing compared.
            if how.rank == "looks" or (snapshot.anchors.learned and len(pair.ids)):
                return self._by_class_and_looks(pair, embeddings, features, how, matching)
        selected = None if matching is None else matching.selections
        hits, probed = snapshot.search(embeddings, how.k, how.probes, how.min_candidates, selected, how.exclude)
        names = snapshot.anchors.names
        if probed is None:
            anchors = [list(names)] * len(embeddings)
        else:
            anchors = [[names[number] for number in numbers.tolist()] for numbers in probed]
        unknown = self.is_unknown(snapshot.anchors, embeddings, probed if matching is None else None)
        lengths = np.sqrt(norms_of(embeddings)).tolist()
        return [
            Result(columns, searched, is_unknown, length=length)
            for columns, searched, is_unknown, length in zip(hits, anchors, unknown, lengths, strict=True)
        ]

    def _by_class_and_looks(
        self, pair: Pair, embeddings: np.ndarray, features: np.ndarray, how: VectorSearch, matching: Matching | None
    ) -> list[Result]:
        """By class or by looks, whichever suits each query."""
        results: list[Result] = []
        names = pair.classes.anchors.names
        for block in compare(pair, embeddings, features, matching, how.exclude, exhaustive=how.probes is None):
            if how.min_familiarity is None:
                unknown = self.is_unknown(pair.classes.anchors, block.embeddings)
            else:
                unknown = (block.familiarity() < how.min_familiarity).tolist()
            lists = block.predicted_lists() if how.rank != "looks" else np.full(len(unknown), -1)
            by_class = block.by_class(np.flatnonzero((lists >= 0) & (lists < pair.learned)), lists, how)
            for query, number in enumerate(lists.tolist()):
                if query in by_class:
                    if block.by_features(how):
                        result = Result(*by_class[query], unknown[query], compared="features")
                    else:
                        length = float(np.linalg.norm(block.embeddings[query]))
                        result = Result(*by_class[query], unknown[query], length=length)
                    results.append(result)
                    continue
                columns, anchors = block.nearest(query, how.k), list[str | None]()
                if number >= 0:
                    own = block.nearest(query, how.k, pair.rows_in(number))
                    columns, anchors = _first(own, columns, how.k), [names[number]]
                results.append(Result(columns, anchors, unknown[query], rank="looks", compared="features"))
        return results


class Pair:
    """One version of a gallery in both spaces: the class list of every item of the looks space.

    Rows are counted through all parts of the looks space.
    """

    def __init__(self, classes: Snapshot, looks: Snapshot) -> None:
        self.classes, self.looks = classes, looks
        for part in classes.parts:
            part.lists.verify()  # an item that a damaged id hides would be missed
        self.ids = np.concatenate([part.lists.ids for part in looks.parts])
        self.lists = np.full(len(self.ids), -1, np.int32)
        """The class list of each row; -1 for an item that is removed."""
        items = Items(classes)
        if len(items):
            positions = np.minimum(np.searchsorted(items.ids, self.ids), len(items) - 1)
            self.lists = np.where(items.ids[positions] == self.ids, items.lists[positions], -1)
        self.is_complete = int((self.lists >= 0).sum()) == len(items)
        """Whether all items have features."""
        self._order = np.argsort(self.lists, kind="stable")
        self._offsets = np.searchsorted(self.lists[self._order], np.arange(len(classes.anchors) + 1))
        self.learned = classes.anchors.learned or len(classes.anchors)
        """Lists of the model's classes; all lists where no anchor was learned."""
        self.foreign = self._order[self._offsets[self.learned] :]
        """The rows of labels that the model never saw."""

    def features(self, id: int) -> np.ndarray | None:
        """The features of one item, compared with their checksums; None where it has none."""
        rows = np.flatnonzero((self.ids == id) & (self.lists >= 0))
        return self.looks.vectors(rows[:1])[0] if len(rows) else None

    def rows_in(self, *lists: int) -> np.ndarray:
        """The rows of some class lists."""
        rows = [self._order[self._offsets[number] : self._offsets[number + 1]] for number in lists]
        return rows[0] if len(rows) == 1 else np.concatenate([self._order[:0], *rows])


def looks_probes(snapshot: Snapshot) -> int | None:
    """How many lists a search by looks reads: one in eight of a large gallery, else all (None)."""
    return None if len(snapshot) <= EXACT_ITEMS else -(-len(snapshot.anchors) // _SHARE)


def compare(
    pair: Pair,
    embeddings: np.ndarray,
    features: np.ndarray,
    matching: Matching | None = None,
    exclude: np.ndarray | None = None,
    *,
    exhaustive: bool = True,
) -> Iterator[Comparison]:
    """Queries with all items, so many queries at a time that their distances fit in memory."""
    size = max(1, BLOCK // max(1, len(pair.ids)))
    for start in range(0, len(features), size):
        rows = slice(start, start + size)
        own = None if exclude is None else exclude[rows]
        yield Comparison(pair, embeddings[rows], features[rows], matching, own, exhaustive=exhaustive)


class Comparison:
    """Squared distances of some queries to the items of the looks space, queries × rows, by one matrix product.

    Infinite for items that are removed or excluded and, in a large gallery, for those of lists that were not searched.
    `matching` are the items that a filter allows; None: all.
    """

    def __init__(
        self,
        pair: Pair,
        embeddings: np.ndarray,
        features: np.ndarray,
        matching: Matching | None,
        exclude: np.ndarray | None,
        *,
        exhaustive: bool,
    ) -> None:
        self.pair, self.embeddings, self._features = pair, embeddings, features
        self._matching, self._mask = matching, None if matching is None else np.isin(pair.ids, matching.ids)
        looks, probed = pair.looks, None
        probes = None if exhaustive else looks_probes(looks)
        self._complete = probes is None
        if probes is not None:
            probed = list(looks.anchors.nearest(features, probes))
        self._squares = np.full((len(features), len(pair.ids)), np.inf, np.float32)
        for part, _, asking, first, end in looks.ranges(len(features), probed):
            lists, start = looks.parts[part].lists, int(looks.starts[part])
            queries, vectors = features[asking], lists.vectors[first:end]
            self._squares[asking, start + first : start + end] = (
                parallel_cdist(queries, vectors)
                if len(asking) == 1
                else squared_distances(queries, vectors, lists.norms[first:end])
            )
        self._gone, self._exclude = pair.lists < 0, exclude
        self._squares[:, self._gone] = np.inf
        if exclude is not None:
            self._squares[pair.ids == exclude[:, None]] = np.inf

    def _to_rows(self, query: int, rows: np.ndarray) -> np.ndarray:
        """The squared distances of one query to some rows, all of which are compared."""
        if not self._complete:
            missing = rows[np.isinf(self._squares[query, rows]) & ~self._gone[rows]]
            if self._exclude is not None:
                missing = missing[self.pair.ids[missing] != self._exclude[query]]
            self._squares[query, missing] = self._by_differences(query, missing)
        squares: np.ndarray = self._squares[query, rows]
        return squares

    def _by_differences(self, query: int, rows: np.ndarray) -> np.ndarray:
        """Exact squared distances of one query to some rows."""
        squares: np.ndarray = parallel_cdist(self._features[query][None], self.pair.looks.vectors(rows))[0]
        return squares

    def nearest(self, query: int, k: int, rows: np.ndarray | None = None) -> Columns:
        """The k nearest items of one query that the filter allows, of all or of some rows."""
        squares = self._squares[query] if rows is None else self._to_rows(query, rows)
        allowed = np.isfinite(squares)
        if self._mask is not None:
            allowed &= self._mask if rows is None else self._mask[rows]
        near = k_nearest(squares, k, allowed, 1.0)
        near = near if rows is None else np.sort(rows[near])
        columns = described(self.pair.looks.rank(near, self._by_differences(query, near), k))
        # The lists of the looks space have no names: an item's anchor is that of its class list.
        lists = dict(zip(self.pair.ids[near].tolist(), self.pair.lists[near].tolist(), strict=True))
        names = self.pair.classes.anchors.names
        return columns._replace(anchors=[names[lists[id]] for id in columns.ids])

    def by_features(self, how: VectorSearch) -> bool:
        """Whether `by_class` compares features: not where all items are searched, or some have none."""
        return how.probes is not None and self.pair.is_complete

    def by_class(
        self, queries: np.ndarray, lists: np.ndarray, how: VectorSearch
    ) -> dict[int, tuple[Nearest, list[str | None]]]:
        """Hits and anchors of queries of trained classes, which `lists` predicts: the items of their lists, by looks.

        Where all items are searched, those of the predicted list come first and the others behind, all by distance. So
        are the items of lists where some have no features.
        """
        if not len(queries):
            return {}
        pair, classes, embeddings, lists = self.pair, self.pair.classes, self.embeddings[queries], lists[queries]
        matching = None if self._matching is None else self._matching.selections
        exclude = None if self._exclude is None else self._exclude[queries]
        probed = [np.arange(len(classes.anchors))] * len(queries)
        hits: Sequence[Nearest]
        if how.probes is None:
            own = classes.scan(embeddings, how.k, list(lists[:, None]), matching, exclude)
            others = classes.scan(embeddings, how.k, None, matching, exclude)
            hits = [_first(described(mine), described(rest), how.k) for mine, rest in zip(own, others, strict=True)]
        else:
            nearest = classes.probe(embeddings, how.k, how.probes, how.min_candidates, matching, exclude)
            exactly = how.probes if matching is None and not how.min_candidates else None
            probed = [
                np.array([number, *numbers[numbers != number]][:exactly])
                for number, numbers in zip(lists.tolist(), nearest, strict=True)
            ]
            if self.by_features(how):
                rows = zip(queries.tolist(), probed, strict=True)
                hits = [self.nearest(query, how.k, pair.rows_in(*numbers)) for query, numbers in rows]
            else:
                hits = classes.scan(embeddings, how.k, probed, matching, exclude)
        anchors = [[classes.anchors.names[number] for number in numbers.tolist()] for numbers in probed]
        return dict(zip(queries.tolist(), zip(hits, anchors, strict=True), strict=True))

    def predicted_lists(self) -> np.ndarray:
        """The class list that each query belongs to, of those with items that the filter allows; -1 for none.

        The one for which 30 × (mean cosine of its three nearest items, by looks) + log(cosine of the embedding and its
        anchor) is largest; a label that the model never saw has no anchor of its own, and the logarithm is 0. Where an
        embedding is the expected anchor its cosines are posteriors, but for a factor: the sum is that of a classifier's
        and a nearest-neighbour classifier's log posteriors. Chosen on held-out photos of three datasets. An image that
        is an item belongs where that is.
        """
        pair, mask, anchors = self.pair, self._mask, self.pair.classes.anchors
        nearest = anchors.nearest(self.embeddings, min(_NEAR_ANCHORS, len(anchors)))
        lists = np.full(len(self.embeddings), -1)
        for query, direction in enumerate(unit_rows(self.embeddings)):
            squares = self._squares[query] if mask is None else np.where(mask, self._squares[query], np.inf)
            count = min(_NEAR_ITEMS, len(squares))
            rows = np.argpartition(squares, count - 1)[:count] if count else np.empty(0, int)
            rows = rows[np.isfinite(squares[rows])]
            if len(rows) and squares[closest := rows[squares[rows].argmin()]] < _SAME:
                lists[query] = pair.lists[closest]
                continue
            candidates = set(pair.lists[rows].tolist())
            for number in nearest[query].tolist():
                own = pair.rows_in(number)
                if len(own) and (mask is None or mask[own].any()):
                    candidates.add(number)
            best, numbers = -np.inf, sorted(candidates)
            learned = [number for number in numbers if number < pair.learned]
            cosines = dict(zip(learned, (unit_rows(anchors.vectors[learned]) @ direction).tolist(), strict=True))
            for number in numbers:
                score = _LOOKS_WEIGHT * (1 - _mean_of_nearest(self._to_rows(query, pair.rows_in(number))) / 2)
                if number in cosines:
                    score += math.log(max(cosines[number], _MIN_COSINE))
                if score > best:
                    lists[query], best = number, score
        return lists

    def familiarity(self) -> np.ndarray:
        """How much each query looks like the class of its nearest anchor; see `kedge.model.calibration.familiarity`."""
        pair, anchors = self.pair, self.pair.classes.anchors
        nearest = anchors.nearest(self.embeddings, min(SHARES, pair.learned))
        own, cosines = np.empty(len(nearest)), np.empty(nearest.shape)
        for query, (numbers, direction) in enumerate(zip(nearest, unit_rows(self.embeddings), strict=True)):
            own[query] = _mean_of_nearest(self._to_rows(query, pair.rows_in(numbers[0])))
            cosines[query] = unit_rows(anchors.vectors[numbers]) @ direction
        return familiarity(1 - own / 2, 1 - self._squares.min(axis=1, initial=np.inf) / 2, cosines)


def _mean_of_nearest(squares: np.ndarray) -> float:
    """The mean of the three smallest, or of as many as there are; infinite where there is none."""
    count = min(NEIGHBOURS, len(squares))
    nearest = np.partition(squares, count - 1)[:count].tolist() if count else []
    finite = [square for square in nearest if square < np.inf]
    return sum(finite) / len(finite) if finite else np.inf


def _first(own: Columns, others: Columns, k: int) -> Columns:
    """Hits, and behind them others that are not among them."""
    ids = set(own.ids)
    rest = [row for row, id in enumerate(others.ids) if id not in ids][: k - len(own.ids)]
    joined: Any = ([*mine, *(theirs[row] for row in rest)] for mine, theirs in zip(own, others, strict=True))
    return Columns(*joined)
