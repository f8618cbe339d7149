"""The anchors that route a search: learned ones, means of labels the model never saw, or k-means centroids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from kedge.gallery.anchor_index import MIN_ANCHORS, AnchorIndex
from kedge.gallery.distances import k_means, norms_of, parallel_cdist, smallest, squared_distances, unit_rows
from kedge.gallery.schema import normalize_label, rows_with, vectors_of
from kedge.gallery.table import Table

__all__ = ["EXACT_ITEMS", "Anchors", "NearAnchor", "Space", "anchors_of", "extend_anchors"]

EXACT_ITEMS = 100_000
"""Up to so many items, the looks space is one list that is scanned as a whole."""
_SAMPLE = 50_000
_ITERATIONS = 10
_MAX_CENTRES = 1024
_FEW_QUERIES, _FEW_PAIRS = 2048, 1 << 20
"""Of queries and of their pairs with anchors, whose distances are computed one by one."""
_BLOCK = 16384
"""Queries that are compared with all anchors at once."""


@dataclass(frozen=True)
class Space:
    """A column of vectors, the folder of its inverted lists, and what routes a search in it."""

    dim: int
    column: str = "embedding"
    folder: str = "lists"
    learned: np.ndarray | None = None
    """The anchors of the model's `classes`."""
    classes: Sequence[str] = ()
    by_label: bool = True
    """Whether an item sits in the list of its label, where that is known, or of its nearest anchor."""
    learned_first: bool = False
    """Whether labels that the model never saw take no part in routing; see `Anchors.learned_first`."""
    scale_means: bool = False
    """Whether the means of such labels are made as long as learned anchors typically are.

    The mean of embeddings that scatter is short, and would lie near everybody's.
    """

    @classmethod
    def of_looks(cls, dim: int) -> Space:
        """The space of the features, in which labels do not matter."""
        return cls(dim, "features", "looks")

    @property
    def has_labels(self) -> bool:
        """Whether labels get anchors: where nothing was learned, their means would route worse than k-means does."""
        return self.column == "embedding" and (self.learned is None or len(self.learned) > 0)


class NearAnchor(NamedTuple):
    """An anchor near a query."""

    number: int
    name: str | None
    distance: float


@dataclass(frozen=True)
class Anchors:
    """One row per list. `names` are labels; None for a centroid that stands for no label."""

    vectors: np.ndarray
    names: tuple[str | None, ...]
    learned: int
    """The number of leading anchors that were learned with the encoder; the others follow the items."""
    index: AnchorIndex | None = None
    """An index over the leading anchors, where they are very many; the anchors behind are scanned."""
    learned_first: bool = False
    """Whether the learned anchors come before all others, however near: the others then take no query from them."""

    def __len__(self) -> int:
        return len(self.vectors)

    @cached_property
    def _norms(self) -> np.ndarray:
        return norms_of(self.vectors)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """The number of each label's anchor."""
        return {normalize_label(name): row for row, name in enumerate(self.names) if name is not None}

    def subset(self, numbers: np.ndarray) -> Anchors:
        """Some of the anchors, given in ascending order."""
        learned = int(np.searchsorted(numbers, self.learned))
        names = tuple(self.names[number] for number in numbers.tolist())
        return Anchors(self.vectors[numbers], names, learned, None, self.learned_first)

    @cached_property
    def _tiers(self) -> tuple[Anchors, Anchors]:
        """The learned anchors, and the others."""
        count = self.learned
        learned = Anchors(self.vectors[:count], self.names[:count], count, self.index)
        return learned, Anchors(self.vectors[count:], self.names[count:], 0)

    def nearest(self, queries: np.ndarray, count: int) -> np.ndarray:
        """The `count` nearest anchors of each query, nearest first; ties by order."""
        if len(queries) > _BLOCK:
            starts = range(0, len(queries), _BLOCK)
            return np.concatenate([self.nearest(queries[start : start + _BLOCK], count) for start in starts])
        if self.learned_first and 0 < self.learned < len(self):
            learned, others = self._tiers
            nearest = learned.nearest(queries, min(count, self.learned))
            if count <= self.learned:
                return nearest
            return np.concatenate([nearest, others.nearest(queries, count - self.learned) + self.learned], axis=1)
        if self.index is None:
            # Not by BLAS where there are few: its threads would stay awake, in the way of the next step.
            few = len(queries) <= _FEW_QUERIES and len(queries) * len(self) <= _FEW_PAIRS
            return smallest(parallel_cdist(queries, self.vectors) if few else self.distances(queries), count)
        numbers, squares = self.index.nearest(queries, count)
        indexed = len(self.index)
        if indexed == len(self):
            return numbers
        # The anchors that came later are few.
        later = Anchors(self.vectors[indexed:], self.names[indexed:], 0).distances(queries)
        numbers = np.concatenate([numbers, np.broadcast_to(np.arange(indexed, len(self)), later.shape)], axis=1)
        return np.take_along_axis(numbers, smallest(np.concatenate([squares, later], axis=1), count), 1)

    def closest(self, query: np.ndarray, count: int) -> list[NearAnchor]:
        """The nearest anchors of one query with their distances, also those that take no part in routing."""
        numbers = replace(self, learned_first=False).nearest(query[None], min(count, len(self)))[0]
        distances = np.linalg.norm(self.vectors[numbers] - query, axis=1)
        names = (self.names[number] for number in numbers)
        return list(map(NearAnchor, numbers.tolist(), names, distances.tolist()))

    def nearest_squares(self, queries: np.ndarray, nearest: np.ndarray | None = None) -> np.ndarray:
        """The squared distance of each query to its nearest anchor, which need not be looked up where it is known."""
        return norms_of(queries - self.vectors[self.nearest(queries, 1)[:, 0] if nearest is None else nearest])

    def distances(self, queries: np.ndarray) -> np.ndarray:
        """Squared distances, queries × anchors."""
        squares = squared_distances(queries, self.vectors, self._norms)
        np.maximum(squares, 0, out=squares)
        return squares

    def assign(self, embeddings: np.ndarray, labels: Sequence[str | None], *, by_label: bool) -> np.ndarray:
        """The list of each item: that of its label, or of its nearest anchor.

        With `by_label` false, only labels that the model never saw keep a list of their own.
        """
        by_name = {name: -1 if name is None else self._numbers.get(normalize_label(name), -1) for name in set(labels)}
        lists = np.array([by_name[label] for label in labels], dtype=np.int32).reshape(-1)
        if not by_label:
            lists[lists < self.learned] = -1
        unassigned = np.flatnonzero(lists < 0)
        if len(unassigned) < len(lists):
            embeddings = embeddings[unassigned]
        lists[unassigned] = self.nearest(embeddings, 1)[:, 0]
        return lists


def anchors_of(table: Table, space: Space) -> Anchors:
    """The anchors for what the table holds now."""
    learned, count = space.learned, 0 if space.learned is None else len(space.learned)
    means, names = np.empty((0, space.dim), np.float32), list[str]()
    if space.has_labels:
        means, names = _label_means(_labelled_batches(table, set(space.classes) if count else set()), space)
    vectors = [part for part in (learned, means) if part is not None and len(part)]
    if not vectors:
        centres = _centres(table, space)
        return Anchors(centres, (None,) * len(centres), 0)
    joined = np.ascontiguousarray(np.concatenate(vectors), dtype=np.float32)
    indexed = joined[:count] if space.learned_first and count else joined
    index = AnchorIndex.build(indexed) if len(indexed) >= MIN_ANCHORS else None
    return Anchors(joined, (*space.classes[:count], *names), count, index, space.learned_first)


def extend_anchors(anchors: Anchors, space: Space, embeddings: np.ndarray, labels: Sequence[str | None]) -> Anchors:
    """The anchors with means of those labels added that `anchors` does not have yet."""
    known = {normalize_label(name) for name in anchors.names if name is not None}
    means, names = _label_means([(embeddings, _new_labels(labels, known))], space)
    if not names:
        return anchors
    return replace(anchors, vectors=np.concatenate([anchors.vectors, means]), names=(*anchors.names, *names))


def _new_labels(labels: Sequence[str | None], known: set[str]) -> list[str | None]:
    """Labels that are not known; None in the place of the others."""
    normalized = [None if label is None else normalize_label(label) for label in labels]
    return [None if label in known else label for label in normalized]


def _labelled_batches(table: Table, known: set[str]) -> Iterable[tuple[np.ndarray, Sequence[str | None]]]:
    """Embeddings and labels of all rows; labels that are known are None."""
    where, known = "label IS NOT NULL", set(map(normalize_label, known))
    if known:
        # Labels alone are quickly read, and most galleries have no other ones.
        batches = table.batches(["label"], where)
        if all(
            normalize_label(label.as_py()) in known for batch in batches for label in batch.column("label").unique()
        ):
            return
    for batch in table.batches(["label", "embedding"], where):
        yield vectors_of(batch), _new_labels(batch.column("label").to_pylist(), known)


def _label_means(
    batches: Iterable[tuple[np.ndarray, Sequence[str | None]]], space: Space
) -> tuple[np.ndarray, list[str]]:
    """The mean embedding of every label, in the order they appear; scaled where the space says so."""
    sums: dict[str, np.ndarray] = {}
    counts: dict[str, int] = {}
    for embeddings, labels in batches:
        codes: dict[str, int] = {}
        groups = np.array([codes.setdefault(label, len(codes)) if label else -1 for label in labels], dtype=np.int64)
        rows = np.argsort(groups, kind="stable")
        rows = rows[np.searchsorted(groups[rows], 0) :]
        if not len(rows):
            continue
        starts = np.searchsorted(groups[rows], np.arange(len(codes)))
        totals = np.add.reduceat(embeddings[rows], starts, axis=0, dtype=np.float64)
        for name, total, size in zip(codes, totals, np.diff([*starts.tolist(), len(rows)]).tolist(), strict=True):
            sums[name] = sums.get(name, 0) + total
            counts[name] = counts.get(name, 0) + size
    means = np.array([sums[name] / counts[name] for name in sums], dtype=np.float32)
    if space.scale_means and space.learned is not None and len(means):
        means = unit_rows(means) * np.float32(np.median(np.linalg.norm(space.learned, axis=1)))
    return means, list(sums)


def _centres(table: Table, space: Space) -> np.ndarray:
    """k-means centroids of a sample, about as many as the square root of the number of items."""
    total = len(table)
    one = np.zeros((1, space.dim), np.float32)
    if total == 0 or (not space.has_labels and total <= EXACT_ITEMS):
        return one
    rng = np.random.default_rng(0)
    share = min(1.0, _SAMPLE / total)
    batches = [one[:0]]
    for batch in table.batches([space.column]):
        rows = vectors_of(rows_with(batch, space.column), space.column)
        batches.append(rows[rng.random(len(rows)) < share] if share < 1 else rows)
    sample = np.concatenate(batches).astype(np.float32)
    count = int(np.clip(round(np.sqrt(total)), 1, min(_MAX_CENTRES, max(1, len(sample)))))
    return k_means(sample, count, rounds=_ITERATIONS) if len(sample) else one
