"""Which of very many anchors is nearest, without looking at them all.

The anchors lie in cells around k-means centres, and a query looks into the cells nearest to it, a few at a time. What
ends the search early is the margin that training keeps between anchors: who is closer to an anchor than half the way to
that anchor's own nearest neighbour is closer to no other one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kedge.gallery.crew import read_together
from kedge.gallery.kmeans import k_means, nearest_centre

__all__ = ["MANY", "AnchorIndex"]

MANY = 20_000
"""From so many anchors on, an index over them is faster than reading them all."""
ARRAYS = ("centres", "offsets", "numbers", "vectors", "gaps")
_CELLS = (4, 16, 64)
"""So many of the nearest cells are looked at, then so many, and at most so many where the nearest is not sure yet."""
_AROUND = 12
"""In so many cells around its own an anchor's nearest neighbour is searched for."""
_PER_CENTRE, _ROUNDS = 32, 4
_BLOCK = 16384


@dataclass(frozen=True)
class AnchorIndex:
    """Anchors cell by cell: `vectors[offsets[c]:offsets[c + 1]]` are the anchors `numbers[…]` of cell `c`."""

    centres: np.ndarray
    offsets: np.ndarray
    numbers: np.ndarray
    vectors: np.ndarray
    gaps: np.ndarray
    """Of each anchor the square of half the way to the anchor nearest to it."""

    @classmethod
    def build(cls, anchors: np.ndarray) -> AnchorIndex:
        """An index over anchors, one row each."""
        count = max(1, min(len(anchors), 2 * math.isqrt(len(anchors))))
        chance = np.random.default_rng(0)
        sample = anchors[np.sort(chance.permutation(len(anchors))[: _PER_CENTRE * count])]
        centres = k_means(sample, count, rounds=_ROUNDS)
        homes = nearest_centre(anchors, centres)
        numbers = np.argsort(homes, kind="stable").astype(np.int32)
        offsets = np.concatenate([[0], np.cumsum(np.bincount(homes, minlength=count))])
        vectors = np.ascontiguousarray(anchors[numbers])
        return cls(centres, offsets, numbers, vectors, _gaps(vectors, centres, offsets))

    def __len__(self) -> int:
        return len(self.numbers)

    @cached_property
    def _halves(self) -> np.ndarray:
        halves: np.ndarray = np.einsum("ij,ij->i", self.centres, self.centres) / 2
        return halves

    def nearest(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Numbers and squared distances of the `count` nearest anchors of each query, nearest first; ties by number."""
        if len(queries) == 1:
            found = self._alone(queries, count)
            return found[0][None], found[1][None]
        parts = [self._together(queries[start : start + _BLOCK], count) for start in range(0, len(queries), _BLOCK)]
        numbers, squares = zip(*parts, strict=True) if parts else (([],), ([],))
        shape = len(queries), min(count, len(self))
        return np.concatenate(numbers).reshape(shape), np.concatenate(squares).reshape(shape)

    def _enough(self, count: int) -> int:
        """So many cells hold several times the anchors that are asked for, if all are about as full."""
        return min(len(self.centres), max(_CELLS[-1], math.ceil(4 * count * len(self.centres) / len(self))))

    def _alone(self, query: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        scores = read_together(query, self.centres, "sqeuclidean", "float32")
        most = self._enough(count)
        cells = np.argpartition(scores, most - 1)[:most] if most < len(scores) else np.arange(len(scores))
        cells = cells[np.argsort(scores[cells], kind="stable")]
        rows, squares = [], []
        best = math.inf, 0
        for looked, cell in enumerate(cells.tolist(), start=1):
            start, end = self.offsets[cell], self.offsets[cell + 1]
            if start == end:
                continue
            some = read_together(query, self.vectors[start:end], "sqeuclidean", "float32")
            if count > 1:
                rows.append(np.arange(start, end))
                squares.append(some)
                continue
            place = int(some.argmin())
            best = min(best, (float(some[place]), int(start) + place))
            if looked in _CELLS and best[0] <= self.gaps[best[1]]:
                break
        if count == 1:
            return self.numbers[best[1]][None].astype(np.int64), np.array([best[0]], np.float32)
        return _first(self.numbers[np.concatenate(rows)], np.concatenate(squares), count)

    def _together(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        if count > 1:
            return self._in_cells(queries, count, self._enough(count))
        numbers = np.empty((len(queries), 1), np.int64)
        squares = np.empty((len(queries), 1), np.float32)
        left = np.arange(len(queries))
        for cells in _CELLS:
            found, near = self._in_cells(queries[left], 1, min(cells, len(self.centres)))
            numbers[left], squares[left] = found, near
            left = left[near[:, 0] > self._gap_of[found[:, 0]]]
        return numbers, squares

    @cached_property
    def _gap_of(self) -> np.ndarray:
        """The gaps in the order of the anchors' numbers."""
        gaps = np.empty_like(self.gaps)
        gaps[self.numbers] = self.gaps
        return gaps

    def _in_cells(self, queries: np.ndarray, count: int, cells: int) -> tuple[np.ndarray, np.ndarray]:
        """The nearest within each query's nearest cells; queries that look into one cell share a product."""
        count = min(count, len(self))
        scores = self._halves - queries @ self.centres.T
        chosen = np.argpartition(scores, cells - 1, axis=1)[:, :cells] if cells < scores.shape[1] else None
        asked = np.arange(scores.shape[1])[None].repeat(len(queries), 0) if chosen is None else chosen
        order = np.argsort(asked, axis=None, kind="stable")
        askers = order // asked.shape[1]
        bounds = np.searchsorted(asked.ravel()[order], np.arange(len(self.centres) + 1))
        norms = np.einsum("ij,ij->i", queries, queries)
        numbers = np.full((len(queries), count), np.iinfo(np.int64).max)
        squares = np.full((len(queries), count), np.inf, np.float32)
        for cell in np.flatnonzero(np.diff(bounds)).tolist():
            start, end = self.offsets[cell], self.offsets[cell + 1]
            if start == end:
                continue
            rows = askers[bounds[cell] : bounds[cell + 1]]
            vectors = self.vectors[start:end]
            near = queries[rows] @ vectors.T
            near *= -2
            near += np.einsum("ij,ij->i", vectors, vectors)
            near += norms[rows, None]
            known = np.broadcast_to(self.numbers[start:end], near.shape)
            if near.shape[1] > count:
                few = np.argpartition(near, count - 1, axis=1)[:, :count]
                near, known = np.take_along_axis(near, few, 1), np.take_along_axis(known, few, 1)
            near = np.concatenate([squares[rows], near], axis=1)
            known = np.concatenate([numbers[rows], known], axis=1)
            best = np.lexsort((known, near), axis=1)[:, :count]
            squares[rows], numbers[rows] = np.take_along_axis(near, best, 1), np.take_along_axis(known, best, 1)
        np.maximum(squares, 0, out=squares)
        return numbers, squares


def _gaps(vectors: np.ndarray, centres: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Of each anchor a quarter of the squared distance to the nearest other one, as far as its surroundings know."""
    gaps = np.empty(len(vectors), np.float32)
    squares = np.einsum("ij,ij->i", vectors, vectors)
    around = min(_AROUND, len(centres))
    for cell, centre in enumerate(centres):
        start, end = offsets[cell], offsets[cell + 1]
        if start == end:
            continue
        apart = np.square(centres - centre).sum(axis=1)
        near = np.sort(np.argpartition(apart, around - 1)[:around])
        rows = np.concatenate([np.arange(offsets[other], offsets[other + 1]) for other in near])
        found = vectors[start:end] @ vectors[rows].T
        found *= -2
        found += squares[rows]
        found += squares[start:end, None]
        own = np.arange(start, end)
        found[own - start, np.searchsorted(rows, own)] = np.inf
        gaps[start:end] = found.min(axis=1)
    return np.maximum(gaps, 0) / 4


def _first(numbers: np.ndarray, squares: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    if count < len(squares):
        near = np.flatnonzero(squares <= np.partition(squares, count - 1)[count - 1])
        numbers, squares = numbers[near], squares[near]
    order = np.lexsort((numbers, squares))[:count]
    return numbers[order].astype(np.int64), squares[order]
