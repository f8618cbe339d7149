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

from kedge.gallery.distances import k_means, nearest_centre, norms_of, parallel_cdist, smallest, squared_distances

__all__ = ["ARRAYS", "MIN_ANCHORS", "AnchorIndex", "k_means"]

MIN_ANCHORS = 20_000
"""From this many anchors on, an index over them is faster than a scan of all."""
ARRAYS = ("centres", "offsets", "numbers", "vectors", "gaps")
"""The fields of an index, by which it is stored."""
_PROBES = (4, 16, 64)
"""Numbers of nearest cells to search, one after the other, where the nearest anchor is not certain yet."""
_NEIGHBOUR_CELLS = 12
"""Cells around its own in which an anchor's nearest neighbour is searched for."""
_SPARE = 4
"""So many anchors more than asked for are compared by differences: products do not tell equal ones from near ones."""
_SAMPLES_PER_CENTRE, _ITERATIONS = 32, 4


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
        cells = nearest_centre(anchors, centres)
        numbers = np.argsort(cells, kind="stable").astype(np.int32)
        offsets = np.concatenate([[0], np.cumsum(np.bincount(cells, minlength=count))])
        vectors = np.ascontiguousarray(anchors[numbers])
        return cls(centres, offsets, numbers, vectors, _gaps(vectors, centres, offsets))

    def __len__(self) -> int:
        return len(self.numbers)

    @cached_property
    def _centre_norms(self) -> np.ndarray:
        return norms_of(self.centres)

    def nearest(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Numbers and squared distances of the `count` nearest anchors of each query, nearest first; ties by number."""
        count = min(count, len(self))
        rows = np.zeros((len(queries), count), np.int64)
        squares = np.full((len(queries), count), np.inf, np.float32)
        # Cells that hold several times `count` anchors, if all cells are about as full; all of them where they are not.
        usual = max(_PROBES[-1], math.ceil(4 * count * len(self.centres) / len(self)))
        uncertain = np.arange(len(queries))
        for probes in (*(_PROBES[:-1] if count == 1 else ()), usual, len(self.centres)):
            search = self._search_one if len(uncertain) == 1 else self._search_batch
            rows[uncertain], squares[uncertain] = search(queries[uncertain], count, min(probes, len(self.centres)))
            if probes < usual:
                uncertain = uncertain[squares[uncertain, 0] > self.gaps[rows[uncertain, 0]]]
            else:
                uncertain = uncertain[np.isinf(squares[uncertain, -1])]
            if not len(uncertain):
                break
        return self.numbers[rows].astype(np.int64), squares

    def _search_one(self, query: np.ndarray, count: int, probes: int) -> tuple[np.ndarray, np.ndarray]:
        """The nearest rows within a query's `probes` nearest cells, one scan for each cell."""
        cells = smallest(parallel_cdist(query, self.centres), probes)[0]
        bounds = list(zip(self.offsets[cells].tolist(), self.offsets[cells + 1].tolist(), strict=True))
        rows = np.concatenate([np.arange(start, end) for start, end in bounds])
        squares = np.concatenate([parallel_cdist(query, self.vectors[start:end])[0] for start, end in bounds])
        if count < len(rows):
            near = np.flatnonzero(squares <= np.partition(squares, count - 1)[count - 1])
            rows, squares = rows[near], squares[near]
        order = np.lexsort((self.numbers[rows], squares))[:count]
        missing = count - len(order)  # where cells are far from evenly full
        return np.pad(rows[order], (0, missing)), np.pad(squares[order], (0, missing), constant_values=np.inf)

    def _search_batch(self, queries: np.ndarray, count: int, probes: int) -> tuple[np.ndarray, np.ndarray]:
        """The same for several queries; those that probe one cell share a matrix product."""
        probed = smallest(squared_distances(queries, self.centres, self._centre_norms), probes)
        order = np.argsort(probed, axis=None, kind="stable")
        query_of = order // probes
        bounds = np.searchsorted(probed.ravel()[order], np.arange(len(self.centres) + 1))
        nearest = np.zeros((len(queries), count), np.int64)
        squares = np.full((len(queries), count), np.inf, np.float32)
        for cell in np.flatnonzero(np.diff(bounds)).tolist():
            start, end = self.offsets[cell], self.offsets[cell + 1]
            if start == end:
                continue
            asking = query_of[bounds[cell] : bounds[cell + 1]]
            vectors = self.vectors[start:end]
            distances = squared_distances(queries[asking], vectors, norms_of(vectors))
            columns = smallest(distances, min(count + _SPARE, len(vectors)))
            exact = [norms_of(vectors[column] - queries[asking]) for column in columns.T]
            distances = np.concatenate([squares[asking], np.stack(exact, axis=1)], axis=1)
            rows = np.concatenate([nearest[asking], start + columns], axis=1)
            best = np.lexsort((self.numbers[rows], distances), axis=1)[:, :count]
            squares[asking] = np.take_along_axis(distances, best, 1)
            nearest[asking] = np.take_along_axis(rows, best, 1)
        return nearest, squares


def _gaps(vectors: np.ndarray, centres: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """For each anchor a quarter of the squared distance to the nearest other one in the cells around its own."""
    gaps = np.empty(len(vectors), np.float32)
    norms = norms_of(vectors)
    count = min(_NEIGHBOUR_CELLS, len(centres))
    for cell, centre in enumerate(centres):
        start, end = offsets[cell], offsets[cell + 1]
        if start == end:
            continue
        cells = np.sort(np.argpartition(np.square(centres - centre).sum(axis=1), count - 1)[:count])
        rows = np.concatenate([np.arange(offsets[other], offsets[other + 1]) for other in cells])
        squares = squared_distances(vectors[start:end], vectors[rows], norms[rows])
        own = np.arange(start, end)
        squares[own - start, np.searchsorted(rows, own)] = np.inf
        gaps[start:end] = squares.min(axis=1)
    return np.maximum(gaps, 0) / 4
