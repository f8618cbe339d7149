"""One query against many rows, on all cores where they are free."""

from __future__ import annotations

import os
import sys
import time
from typing import Any, Literal

import numpy as np

__all__ = ["Kernel", "read_together"]

Kernel = Literal["float32", "bf16", "int8"]

_CREW = min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
_WORTH_IT = 400_000
"""Bytes; below, waking the others takes longer than reading alone."""
_SLOW = 1e-9
"""Seconds per byte, of which a core alone needs a tenth or less."""
_ALONE = 0.1
"""Seconds of working alone after the others kept everybody waiting."""

_alone_until = 0.0


def _load() -> Any:
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


cdist = _load()


def read_together(
    query: np.ndarray, rows: np.ndarray, measure: Literal["dot", "sqeuclidean"], kernel: Kernel
) -> np.ndarray:
    """Products or squared distances of one query (1 × n) with every row, in the rows' order."""
    global _alone_until
    size = rows.nbytes
    if size < _WORTH_IT:
        return np.asarray(cdist(query, rows, measure, dtype=kernel, out_dtype="float32")).reshape(-1)
    started = time.monotonic()
    threads = _CREW if started > _alone_until else 1
    found = np.asarray(cdist(query, rows, measure, dtype=kernel, out_dtype="float32", threads=threads)).reshape(-1)
    # The threads wait for each other: where another process has the cores, for a time slice each.
    if threads > 1 and (ended := time.monotonic()) - started > size * _SLOW:
        _alone_until = ended + _ALONE
    return found
