"""Distances to many points in parts, and the nearest of them, the same whoever else is asked for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

__all__ = ["ROWS", "completed", "distances_in_blocks", "nearest", "nearest_of_all", "parts_of", "squared_distances"]

ROWS = 512
"""So many are looked at together."""


def parts_of(count: int) -> list[slice]:
    """So many rows, in parts."""
    return [slice(start, min(start + ROWS, count)) for start in range(0, count, ROWS)]


def completed(products: np.ndarray, rows: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """Squared distances, in the place of scalar products."""
    products *= -2
    products += squares
    products += np.square(rows).sum(axis=1)[:, None]
    np.maximum(products, 0, out=products)
    return products


def squared_distances(rows: np.ndarray, vectors: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """Of each row to each vector, whose squares are known."""
    return completed(rows @ vectors.T, rows, squares)


def nearest(distances: np.ndarray, count: int, unit: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Columns and values of the smallest of each row, smallest first; what differs by 1e-6 units at most, ties."""
    count = min(count, distances.shape[1])
    distances = np.round(distances / unit, 6)
    near = np.argpartition(distances, count - 1, axis=1)[:, :count]
    far = np.take_along_axis(distances, near, axis=1)
    order = np.argsort(far, axis=1, kind="stable")
    return np.take_along_axis(near, order, axis=1), np.take_along_axis(far, order, axis=1) * unit


def distances_in_blocks(points: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Squared distances of all points to all, some rows at a time; infinite from a point to itself."""
    squares = np.square(points).sum(axis=1)
    for part in parts_of(len(points)):
        distances = squared_distances(points[part], points, squares)
        distances[np.arange(len(distances)), np.arange(part.start, part.stop)] = np.inf
        yield part, distances


def nearest_of_all(points: np.ndarray, count: int, unit: float) -> np.ndarray:
    """Squared distances of each point to the `count` nearest others, smallest first, in blocks."""
    return np.concatenate([nearest(distances, count, unit)[1] for _, distances in distances_in_blocks(points)])
