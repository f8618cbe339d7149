"""Approximate nearest anchors among very many: k-means cells around centroids, searched until the answer is certain.

The anchors lie in cells around k-means centroids, and a query looks into the cells nearest to it, a few at a time. What
ends the search early is the margin that training keeps between anchors: a query that is closer to an anchor than half
the way to that anchor's own nearest neighbour is closer to no other one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kedge.gallery.simd import parallel_cdist

__all__ = ["MIN_ANCHORS", "AnchorIndex", "k_means"]

MIN_ANCHORS = 20_000
"""From this many anchors on, an index over them is faster than a scan of all."""
ARRAYS = ("centres", "offsets", "numbers", "vectors", "gaps")
"""The fields of an index, by which it is stored."""
_PROBES = (4, 16, 64)
"""Numbers of nearest cells to search, one after the other, where the nearest anchor is not certain yet."""
_NEIGHBOUR_CELLS = 12
"""Cells around its own in which an anchor's nearest neighbour is searched for."""
_SAMPLES_PER_CENTRE, _ITERATIONS = 32, 4
_BLOCK = 16384


def k_means(vectors: np.ndarray, count: int, *, rounds: int, seed: int = 0) -> np.ndarray:
    """`count` k-means centroids, initialised with some of the vectors."""
    rng = np.random.default_rng(seed)
    centres = vectors[np.sort(rng.choice(len(vectors), count, replace=False))]
    for _ in range(rounds):
        cells = _nearest_centre(vectors, centres)
        order = np.argsort(cells, kind="stable")
        used, starts = np.unique(cells[order], return_index=True)
        sizes = np.diff([*starts.tolist(), len(vectors)])
        # A centroid that lost all its vectors stays where it is.
        centres = centres.copy()
        centres[used] = np.add.reduceat(vectors[order], starts, axis=0, dtype=np.float64) / sizes[:, None]
    return centres


def _nearest_centre(vectors: np.ndarray, centres: np.ndarray) -> np.ndarray:
    half_norms = np.einsum("ij,ij->i", centres, centres) / 2
    nearest = np.empty(len(vectors), np.int32)
    for start in range(0, len(vectors), _BLOCK // 2):
        rows = slice(start, start + _BLOCK // 2)
        nearest[rows] = (half_norms - vectors[rows] @ centres.T).argmin(axis=1)
    return nearest


@dataclass(frozen=True)
class AnchorIndex:
    """Anchors by cell: `vectors[offsets[c]:offsets[c + 1]]` are the anchors `numbers[…]` of cell `c`."""

    centres: np.ndarray
    offsets: np.ndarray
    numbers: np.ndarray
    vectors: np.ndarray
    gaps: np.ndarray
    """For each row of `vectors`, the square of half the distance to the anchor nearest to it."""

    @classmethod
    def build(cls, anchors: np.ndarray) -> AnchorIndex:
        """An index over anchors, one row each."""
        count = max(1, min(len(anchors), 2 * math.isqrt(len(anchors))))
        rng = np.random.default_rng(0)
        sample = anchors[np.sort(rng.permutation(len(anchors))[: _SAMPLES_PER_CENTRE * count])]
        centres = k_means(sample, count, rounds=_ITERATIONS)
        cells = _nearest_centre(anchors, centres)
        numbers = np.argsort(cells, kind="stable").astype(np.int32)
        offsets = np.concatenate([[0], np.cumsum(np.bincount(cells, minlength=count))])
        vectors = np.ascontiguousarray(anchors[numbers])
        return cls(centres, offsets, numbers, vectors, _gaps(vectors, centres, offsets))

    def __len__(self) -> int:
        return len(self.numbers)

    @cached_property
    def _half_norms(self) -> np.ndarray:
        half_norms: np.ndarray = np.einsum("ij,ij->i", self.centres, self.centres) / 2
        return half_norms

    @cached_property
    def _gap_by_number(self) -> np.ndarray:
        gaps = np.empty_like(self.gaps)
        gaps[self.numbers] = self.gaps
        return gaps

    def nearest(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Numbers and squared distances of the `count` nearest anchors of each query, nearest first; ties by number."""
        if len(queries) == 1:
            nearest, distances = self._nearest_of_one(queries, count)
            return nearest[None], distances[None]
        batches = [self._nearest_of_batch(queries[at : at + _BLOCK], count) for at in range(0, len(queries), _BLOCK)]
        numbers, squares = zip(*batches, strict=True) if batches else (([],), ([],))
        shape = len(queries), min(count, len(self))
        return np.concatenate(numbers).reshape(shape), np.concatenate(squares).reshape(shape)

    def _max_probes(self, count: int) -> int:
        """Cells that hold several times `count` anchors, if all cells are about as full."""
        return min(len(self.centres), max(_PROBES[-1], math.ceil(4 * count * len(self.centres) / len(self))))

    def _nearest_of_one(self, query: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        scores = parallel_cdist(query, self.centres)
        probes = self._max_probes(count)
        cells = np.argpartition(scores, probes - 1)[:probes] if probes < len(scores) else np.arange(len(scores))
        cells = cells[np.argsort(scores[cells], kind="stable")]
        rows, squares = [], []
        best = math.inf, 0
        for probed, cell in enumerate(cells.tolist(), start=1):
            start, end = self.offsets[cell], self.offsets[cell + 1]
            if start == end:
                continue
            distances = parallel_cdist(query, self.vectors[start:end])
            if count > 1:
                rows.append(np.arange(start, end))
                squares.append(distances)
                continue
            nearest = int(distances.argmin())
            best = min(best, (float(distances[nearest]), int(start) + nearest))
            if probed in _PROBES and best[0] <= self.gaps[best[1]]:
                break
        if count == 1:
            return self.numbers[best[1]][None].astype(np.int64), np.array([best[0]], np.float32)
        return _smallest(self.numbers[np.concatenate(rows)], np.concatenate(squares), count)

    def _nearest_of_batch(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        if count > 1:
            return self._search_cells(queries, count, self._max_probes(count))
        numbers = np.empty((len(queries), 1), np.int64)
        squares = np.empty((len(queries), 1), np.float32)
        uncertain = np.arange(len(queries))
        for probes in _PROBES:
            nearest, distances = self._search_cells(queries[uncertain], 1, min(probes, len(self.centres)))
            numbers[uncertain], squares[uncertain] = nearest, distances
            uncertain = uncertain[distances[:, 0] > self._gap_by_number[nearest[:, 0]]]
        return numbers, squares

    def _search_cells(self, queries: np.ndarray, count: int, probes: int) -> tuple[np.ndarray, np.ndarray]:
        """The nearest within each query's `probes` nearest cells; queries that probe one cell share a product."""
        count = min(count, len(self))
        scores = self._half_norms - queries @ self.centres.T
        if probes < scores.shape[1]:
            probed = np.argpartition(scores, probes - 1, axis=1)[:, :probes]
        else:
            probed = np.arange(scores.shape[1])[None].repeat(len(queries), 0)
        order = np.argsort(probed, axis=None, kind="stable")
        query_of = order // probed.shape[1]
        bounds = np.searchsorted(probed.ravel()[order], np.arange(len(self.centres) + 1))
        norms = np.einsum("ij,ij->i", queries, queries)
        numbers = np.full((len(queries), count), np.iinfo(np.int64).max)
        squares = np.full((len(queries), count), np.inf, np.float32)
        for cell in np.flatnonzero(np.diff(bounds)).tolist():
            start, end = self.offsets[cell], self.offsets[cell + 1]
            if start == end:
                continue
            rows = query_of[bounds[cell] : bounds[cell + 1]]
            vectors = self.vectors[start:end]
            distances = queries[rows] @ vectors.T
            distances *= -2
            distances += np.einsum("ij,ij->i", vectors, vectors)
            distances += norms[rows, None]
            candidates = np.broadcast_to(self.numbers[start:end], distances.shape)
            if distances.shape[1] > count:
                few = np.argpartition(distances, count - 1, axis=1)[:, :count]
                distances, candidates = np.take_along_axis(distances, few, 1), np.take_along_axis(candidates, few, 1)
            distances = np.concatenate([squares[rows], distances], axis=1)
            candidates = np.concatenate([numbers[rows], candidates], axis=1)
            best = np.lexsort((candidates, distances), axis=1)[:, :count]
            squares[rows] = np.take_along_axis(distances, best, 1)
            numbers[rows] = np.take_along_axis(candidates, best, 1)
        np.maximum(squares, 0, out=squares)
        return numbers, squares


def _gaps(vectors: np.ndarray, centres: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """For each anchor a quarter of the squared distance to the nearest other one in the cells around its own."""
    gaps = np.empty(len(vectors), np.float32)
    norms = np.einsum("ij,ij->i", vectors, vectors)
    count = min(_NEIGHBOUR_CELLS, len(centres))
    for cell, centre in enumerate(centres):
        start, end = offsets[cell], offsets[cell + 1]
        if start == end:
            continue
        cells = np.sort(np.argpartition(np.square(centres - centre).sum(axis=1), count - 1)[:count])
        rows = np.concatenate([np.arange(offsets[other], offsets[other + 1]) for other in cells])
        squares = vectors[start:end] @ vectors[rows].T
        squares *= -2
        squares += norms[rows]
        squares += norms[start:end, None]
        own = np.arange(start, end)
        squares[own - start, np.searchsorted(rows, own)] = np.inf
        gaps[start:end] = squares.min(axis=1)
    return np.maximum(gaps, 0) / 4


def _smallest(numbers: np.ndarray, squares: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    if count < len(squares):
        near = np.flatnonzero(squares <= np.partition(squares, count - 1)[count - 1])
        numbers, squares = numbers[near], squares[near]
    order = np.lexsort((numbers, squares))[:count]
    return numbers[order].astype(np.int64), squares[order]
