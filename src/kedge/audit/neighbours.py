"""The nearest neighbours of items by looks, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kedge.audit.items import Items
from kedge.gallery.anchors import EXACT_ITEMS

__all__ = ["Neighbours", "find_neighbours"]

_LISTS = 2
"""In a large gallery an item is compared with those of its nearest lists only."""
_QUERIES, _BLOCK = 1024, 4096
"""Vectors that are compared at once."""


@dataclass(frozen=True)
class Neighbours:
    """The nearest rows of a pool to each row, nearest first; -1 and infinity where there are no more."""

    rows: np.ndarray
    distances: np.ndarray


def find_neighbours(queries: Items, asking: np.ndarray, pool: Items, members: np.ndarray, count: int) -> Neighbours:
    """The `count` nearest of `members`, rows of `pool`, to each of `asking`, rows of `queries`; itself left out."""
    nearest = np.full((len(queries), count), -1)
    scores = np.full((len(queries), count), np.inf, np.float32)
    if not len(members):
        return Neighbours(nearest, scores.astype(np.float64))
    # Around their mean the numbers are small, so that fewer digits are lost.
    centre = pool.vectors(members[:_BLOCK]).mean(axis=0)
    for group, candidates in _groups(queries, asking, pool, members):
        for start in range(0, len(group), _QUERIES):
            block = group[start : start + _QUERIES]
            points = queries.vectors(block) - centre
            for first in range(0, len(candidates), _BLOCK):
                part = candidates[first : first + _BLOCK]
                vectors = pool.vectors(part) - centre
                found = np.einsum("ij,ij->i", vectors, vectors) - 2 * (points @ vectors.T)
                if queries is pool:
                    found[block[:, None] == part] = np.inf
                both = np.concatenate([scores[block], found], axis=1)
                kept = np.argpartition(both, count - 1, axis=1)[:, :count]
                names = np.concatenate([nearest[block], np.broadcast_to(part, found.shape)], axis=1)
                nearest[block] = np.take_along_axis(names, kept, 1)
                scores[block] = np.take_along_axis(both, kept, 1)
    nearest[np.isinf(scores)] = -1
    return _exactly(queries, asking, pool, nearest)


def _groups(
    queries: Items, asking: np.ndarray, pool: Items, members: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows that ask, and those that are compared with them; no pair comes twice."""
    if len(members) <= EXACT_ITEMS:
        yield asking, members
        return
    homes, probes = _nearest_lists(pool, members, pool, 1)[:, 0], _nearest_lists(queries, asking, pool, _LISTS)
    for number in np.unique(homes).tolist():
        yield asking[(probes == number).any(axis=1)], members[homes == number]


def _nearest_lists(items: Items, rows: np.ndarray, pool: Items, count: int) -> np.ndarray:
    anchors = pool.anchors
    return np.concatenate([anchors.nearest(vectors, count) for _, vectors in items.blocks(rows, len(anchors))])


def _exactly(queries: Items, asking: np.ndarray, pool: Items, nearest: np.ndarray) -> Neighbours:
    """Distances by differences, and the neighbours in their order."""
    distances = np.full(nearest.shape, np.inf)
    for start in range(0, len(asking), _QUERIES):
        block = asking[start : start + _QUERIES]
        points = queries.vectors(block)
        for column in range(nearest.shape[1]):
            there = nearest[block, column] >= 0
            rows = block[there]
            gaps = pool.vectors(nearest[rows, column]) - points[there]
            distances[rows, column] = np.linalg.norm(gaps, axis=1)
    order = np.argsort(distances, axis=1, kind="stable")
    return Neighbours(np.take_along_axis(nearest, order, 1), np.take_along_axis(distances, order, 1))
