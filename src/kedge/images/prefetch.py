"""Prefetch: decode images in threads ahead of whoever uses them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["prefetch"]

T = TypeVar("T")
R = TypeVar("R")

WORKERS = min(8, os.cpu_count() or 1)


def prefetch(
    decode: Callable[[T], R], items: Iterable[T], *, ahead: int = 64, workers: int = WORKERS
) -> Generator[R, None, None]:
    """Yield `decode(item)` in order; up to `ahead` items are decoded before they are asked for.

    An error of `decode` is raised where its item's turn comes. What is pending when the caller stops is cancelled.

    >>> list(prefetch(len, ["a", "bc", "def"], ahead=2))
    [1, 2, 3]
    """
    with ThreadPoolExecutor(workers) as pool:
        pending: deque[Future[R]] = deque()
        try:
            for item in items:
                pending.append(pool.submit(decode, item))
                if len(pending) > ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
