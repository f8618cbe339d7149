"""k-means centres of vectors that fit in memory."""

from __future__ import annotations

import numpy as np

__all__ = ["k_means", "nearest_centre"]

_BLOCK = 8192


def k_means(vectors: np.ndarray, count: int, *, rounds: int, seed: int = 0) -> np.ndarray:
    """`count` centres, which begin at some of the vectors."""
    chance = np.random.default_rng(seed)
    centres = vectors[np.sort(chance.choice(len(vectors), count, replace=False))]
    for _ in range(rounds):
        homes = nearest_centre(vectors, centres)
        order = np.argsort(homes, kind="stable")
        used, starts = np.unique(homes[order], return_index=True)
        sizes = np.diff([*starts.tolist(), len(vectors)])
        # A centre that lost all its vectors stays where it is.
        centres = centres.copy()
        centres[used] = np.add.reduceat(vectors[order], starts, axis=0, dtype=np.float64) / sizes[:, None]
    return centres


def nearest_centre(vectors: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """The number of the nearest centre of each vector, a block of vectors at a time."""
    halves = np.einsum("ij,ij->i", centres, centres) / 2
    found = np.empty(len(vectors), np.int32)
    for start in range(0, len(vectors), _BLOCK):
        rows = slice(start, start + _BLOCK)
        found[rows] = (halves - vectors[rows] @ centres.T).argmin(axis=1)
    return found
