"""SimSIMD distances of one query to many rows, multi-threaded where the cores are free."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np

__all__ = ["parallel_cdist"]

_THREADS = min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
_PARALLEL_BYTES = 400_000
"""Below this size, starting threads takes longer than a single-threaded scan."""
_SLOW = 1e-9
"""Seconds per byte above which a multi-threaded scan counts as slow; one thread needs a tenth of it or less."""
_BACKOFF = 0.1
"""Seconds to stay single-threaded after a slow multi-threaded scan."""

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


def parallel_cdist(query: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Squared Euclidean distances of one query (1 × dim) to every row, in the rows' order.

    Computed by differences: |x|² − 2x·q + |q|² loses digits near zero.
    """
    global _single_threaded_until
    size = rows.nbytes
    if not size:
        return np.empty(len(rows), np.float32)
    if size < _PARALLEL_BYTES:
        return np.asarray(cdist(query, rows, "sqeuclidean", dtype="float32", out_dtype="float32")).reshape(-1)
    started = time.monotonic()
    threads = _THREADS if started > _single_threaded_until else 1
    squares = cdist(query, rows, "sqeuclidean", dtype="float32", out_dtype="float32", threads=threads)
    # The threads wait for each other: where another process has the cores, for a time slice each.
    if threads > 1 and (ended := time.monotonic()) - started > size * _SLOW:
        _single_threaded_until = ended + _BACKOFF
    return np.asarray(squares).reshape(-1)
