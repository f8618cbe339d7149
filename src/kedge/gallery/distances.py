"""Squared Euclidean distances: exact ones by SimSIMD, many at once by a matrix product; and k-means."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

__all__ = [
    "cached_cdist",
    "in_threads",
    "k_means",
    "nearest_centre",
    "norms_of",
    "parallel_cdist",
    "smallest",
    "squared_distances",
    "unit_rows",
]

_THREADS = min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
_PARALLEL_BYTES = 400_000
"""Below this size, starting threads takes longer than a single-threaded scan."""
_SLOW = 1e-9
"""Seconds per byte above which a multi-threaded scan counts as slow; one thread needs a tenth of it or less."""
_BACKOFF = 0.1
"""Seconds to stay single-threaded after a slow multi-threaded scan."""
_BATCH = 64
"""So many queries are shared among Python threads."""
_CACHE_BYTES = 1 << 19
"""Rows of so many bytes stay in the cache of a core while they are compared with several queries."""
_BLOCK = 8192
"""Vectors that k-means compares with all centroids at once."""

_single_threaded_until = 0.0


def _load_cdist() -> Any:
    """SimSIMD, bound to its own symbols.

    Its successor NumKong, which usearch loads for the whole process, has symbols of the same names.
    """
    flags = sys.getdlopenflags() if hasattr(sys, "getdlopenflags") else None
    try:
        if flags is not None:
            sys.setdlopenflags(flags | getattr(os, "RTLD_DEEPBIND", 0))
        from simsimd import cdist

        return cdist
    finally:
        if flags is not None:
            sys.setdlopenflags(flags)


cdist = _load_cdist()
T = TypeVar("T")
R = TypeVar("R")


def in_threads(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """What `work` returns for each item, in any order; a thread for each core takes the next one when it is free."""
    remaining, threads = iter(items), min(_THREADS, len(items))
    if threads < 2:
        return list(map(work, remaining))
    with ThreadPoolExecutor(threads) as pool:
        done = pool.map(lambda _: [work(item) for item in remaining], range(threads))
        return [result for several in done for result in several]


def cached_cdist(queries: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The same as `parallel_cdist` in this thread, for several queries: rows are read from memory once."""
    squares = np.empty((len(queries), len(rows)), np.float32)
    step = max(1, _CACHE_BYTES // max(1, rows.itemsize * rows.shape[1]))
    for start in range(0, len(rows), step):
        block = cdist(queries, rows[start : start + step], "sqeuclidean", dtype="float32", out_dtype="float32")
        squares[:, start : start + step] = np.asarray(block).reshape(len(queries), -1)
    return squares


def parallel_cdist(queries: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Squared Euclidean distances, queries × rows, by differences: |x|² − 2x·q + |q|² loses digits near zero."""
    global _single_threaded_until
    size = rows.nbytes * len(queries)
    if not size:
        return np.empty((len(queries), len(rows)), np.float32)
    if size < _PARALLEL_BYTES:
        squares = cdist(queries, rows, "sqeuclidean", dtype="float32", out_dtype="float32")
        return np.asarray(squares).reshape(len(queries), -1)
    if len(queries) >= _BATCH:
        squares = np.empty((len(queries), len(rows)), np.float32)
        step = -(-len(queries) // _THREADS)

        def fill(start: int) -> None:
            squares[start : start + step] = cached_cdist(queries[start : start + step], rows)

        # Not by SimSIMD's own threads: they would spin for a while afterwards, in the way of those that scan next.
        in_threads(fill, range(0, len(queries), step))
        return squares
    started = time.monotonic()
    threads = _THREADS if started > _single_threaded_until else 1
    squares = cdist(queries, rows, "sqeuclidean", dtype="float32", out_dtype="float32", threads=threads)
    # The threads wait for each other: where another process has the cores, for a time slice each.
    if threads > 1 and (ended := time.monotonic()) - started > size * _SLOW:
        _single_threaded_until = ended + _BACKOFF
    return np.asarray(squares).reshape(len(queries), -1)


def norms_of(rows: np.ndarray) -> np.ndarray:
    """The squared length of each row."""
    norms: np.ndarray = np.vecdot(rows, rows)
    return norms


def unit_rows(rows: np.ndarray) -> np.ndarray:
    """Each row scaled to length 1; zeros stay zeros."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(lengths > 0, lengths, 1), np.float32)


def squared_distances(queries: np.ndarray, rows: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """|x|² − 2x·q + |q|², queries × rows, as one matrix product: near zero it loses digits and may be negative."""
    squares: np.ndarray = queries @ rows.T
    squares *= -2
    squares += norms
    squares += norms_of(queries)[:, None]
    return squares


def smallest(values: np.ndarray, count: int) -> np.ndarray:
    """The columns of the `count` smallest values of each row, ascending; ties by column."""
    if count >= values.shape[1]:  # perhaps none
        return np.asarray(np.argsort(values, axis=1, kind="stable"))
    if count == 1:
        return np.asarray(values.argmin(axis=1, keepdims=True))
    near = values <= np.partition(values, count - 1, axis=1)[:, count - 1 : count]
    if len(values) == 1:
        columns = near[0].nonzero()[0]
        return np.asarray(columns.take(values[0].take(columns).argsort(kind="stable")[:count]))[None]
    if np.count_nonzero(near) != count * len(values):  # ties for the last place
        return np.asarray(np.argsort(values, axis=1, kind="stable")[:, :count])
    columns = near.nonzero()[1].reshape(-1, count)
    order = np.take_along_axis(values, columns, 1).argsort(axis=1, kind="stable")
    return np.take_along_axis(columns, order, 1)


def nearest_centre(vectors: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """The number of the centroid nearest to each vector."""
    norms = norms_of(centres)
    nearest = np.empty(len(vectors), np.int32)
    for start in range(0, len(vectors), _BLOCK):
        rows = slice(start, start + _BLOCK)
        nearest[rows] = squared_distances(vectors[rows], centres, norms).argmin(axis=1)
    return nearest


def k_means(vectors: np.ndarray, count: int, *, rounds: int, seed: int = 0) -> np.ndarray:
    """`count` k-means centroids, initialised with some of the vectors."""
    rng = np.random.default_rng(seed)
    centres = vectors[np.sort(rng.choice(len(vectors), count, replace=False))]
    for _ in range(rounds):
        cells = nearest_centre(vectors, centres)
        order = np.argsort(cells, kind="stable")
        used, starts, sizes = np.unique(cells[order], return_index=True, return_counts=True)
        # A centroid that lost all its vectors stays where it is.
        centres = centres.copy()
        centres[used] = np.add.reduceat(vectors[order], starts, axis=0, dtype=np.float64) / sizes[:, None]
    return centres
