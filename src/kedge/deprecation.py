"""Keyword arguments of earlier releases: accepted for one release, with one sentence of warning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["renamed_keywords"]

P = ParamSpec("P")
R = TypeVar("R")


def renamed_keywords(**names: str | None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Accept old keywords of a function: `old="new"`, or `old=None` for one that has no effect any more.

    >>> @renamed_keywords(at_least="min_candidates", precision=None)
    ... def search(k, min_candidates=0):
    ...     return k, min_candidates
    >>> search(3, at_least=5, precision="int8")
    (3, 5)
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for old in () if names.keys().isdisjoint(kwargs) else names.keys() & kwargs.keys():
                new, value = names[old], kwargs.pop(old)
                if new is not None:
                    kwargs[new] = value
                what = "has no effect any more: leave it out" if new is None else f"is called {new} now"
                warnings.warn(f"{function.__name__}: {old} {what}.", DeprecationWarning, stacklevel=2)
            return function(*args, **kwargs)

        return call

    return decorate
