"""Who is near a query among the rows of some lists: the one place where many distances are computed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kedge.gallery.crew import read_together
from kedge.gallery.precision import Guess

if TYPE_CHECKING:
    from kedge.gallery.lists import Lists

__all__ = ["Found", "Slice", "measured_recall", "near", "near_many"]

_BLOCK = 1 << 24
"""Distances of many queries that are held at once."""
_DIGITS = 1e-5
"""Of the squared lengths: what |x|² − 2x·q + |q|² in single precision may be wrong by."""
_SAMPLE, _SAMPLE_K = 200, 100
"""So many items, and their so many nearest, tell what the codes find."""
_DOUBTFUL = 64
"""So many more than k are looked at where codes are too coarse to be sure."""


class Slice(NamedTuple):
    """Rows that lie together: one list, or all of them (`place` is None)."""

    place: int | None
    start: int
    end: int


class Found(NamedTuple):
    """Rows, counted from the slice's first, and their exact squared distances; at least the k nearest, by row."""

    rows: np.ndarray
    squares: np.ndarray


def near(lists: Lists, where: Slice, query: np.ndarray, k: int, mask: np.ndarray | None) -> Found:
    """The nearest rows of one query."""
    place, start, end = where
    if lists.codes is None or place is None:
        squares = _squared(query, lists.vectors[start:end])
        rows = _allowed(squares, k, None if mask is None else mask[start:end])
        return Found(rows, squares.take(rows))
    guess = lists.codes.near(place, start, end, query)
    return _exact(lists, start, query, _allowed(guess, k, None if mask is None else mask[start:end]))


def near_many(lists: Lists, where: Slice, queries: np.ndarray, k: int, mask: np.ndarray | None) -> list[list[Found]]:
    """The nearest rows of each of several queries, which share a matrix product."""
    place, first, last = where
    found: list[list[Found]] = [[] for _ in queries]
    # Codes are widened to numbers before they are multiplied.
    step = max(1, _BLOCK // (len(queries) if lists.codes is None else max(len(queries), lists.vectors.shape[1])))
    for start in range(first, last, step):
        end = min(last, start + step)
        if lists.codes is None or place is None:
            guesses = _by_product(lists, start, end, queries)
        else:
            guesses = lists.codes.near_many(place, start, end, queries)
        allowed = None if mask is None else mask[start:end]
        for row, guess in enumerate(guesses):
            found[row].append(_exact(lists, first, queries[row], _allowed(guess, k, allowed) + (start - first)))
    return found


def measured_recall(lists: Lists) -> float:
    """The share of the nearest items within a list that the codes find, over some of the items."""
    wide = replace(lists, codes=None)
    shares = []
    for row in np.linspace(0, len(lists) - 1, min(_SAMPLE, len(lists))).astype(np.int64).tolist():
        place = int(np.searchsorted(lists.offsets, row, side="right")) - 1
        found, exact = (
            near(one, one.list_at(place), np.asarray(lists.vectors[row]), _SAMPLE_K, None) for one in (lists, wide)
        )
        nearest, found_nearest = (part.rows[np.argsort(part.squares)[:_SAMPLE_K]] for part in (exact, found))
        shares.append(np.isin(nearest, found_nearest).mean())
    return float(np.mean(shares)) if shares else 1.0


def _by_product(lists: Lists, start: int, end: int, queries: np.ndarray) -> list[Guess]:
    norms = np.einsum("ij,ij->i", queries, queries)
    squares = queries @ lists.vectors[start:end].T
    squares *= -2
    squares += lists.norms[start:end]
    squares += norms[:, None]
    return [Guess(row, length) for row, length in zip(squares, np.sqrt(norms).tolist(), strict=True)]


def _allowed(guess: Guess | np.ndarray, k: int, mask: np.ndarray | None) -> np.ndarray:
    """The rows that may be among the k nearest of those that the mask allows, ascending."""
    squares = guess.squares if isinstance(guess, Guess) else guess
    rows = None if mask is None else np.flatnonzero(mask)
    if rows is not None:
        squares = squares[rows]
    if k >= len(squares):
        return np.arange(len(squares)) if rows is None else rows
    sorted_enough = squares.copy()
    sorted_enough.partition(k - 1)
    limit = sorted_enough[k - 1]
    if isinstance(guess, Guess):
        limit = _limit(guess, sorted_enough, k, max(0.0, float(limit)))
    chosen: np.ndarray = (squares <= limit).nonzero()[0]
    return chosen if rows is None else rows[chosen]


def _limit(guess: Guess, squares: np.ndarray, k: int, kth: float) -> float:
    """Rows beyond it cannot be among the k nearest, whatever the guess is wrong by."""
    # A row nearer than the k-th is no longer than this, and so are the digits it can have lost.
    longest = guess.length + math.sqrt(kth)
    slip = _DIGITS * (longest**2 + guess.length**2)
    limit = (math.sqrt(kth + 2 * slip) + 2 * guess.error) ** 2
    enough = k + _DOUBTFUL
    if guess.surely or enough >= len(squares):
        return limit
    squares.partition(enough - 1)
    return min(limit, float(squares[enough - 1]))


def _exact(lists: Lists, start: int, query: np.ndarray, rows: np.ndarray) -> Found:
    return Found(rows, _squared(query, lists.vectors.take(rows + start, axis=0)))


def _squared(query: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """By differences: |x|² − 2x·q + |q|² loses digits near zero."""
    if not len(rows):
        return np.empty(0, np.float32)
    return read_together(query[None], rows, "sqeuclidean", "float32")
