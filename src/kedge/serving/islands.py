"""Islands on a map: who wants to be whose neighbour, and where all of them find room."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kedge.serving.nearness import ROWS, distances_in_blocks, nearest, nearest_of_all, parts_of, squared_distances

__all__ = ["TINY", "WARMEST", "Pairs", "alike", "islands", "principal", "starts_of"]

_NEIGHBOURS = 4
"""So many neighbours an island wants, or fewer where some are much more like it."""
_STARTS = 4
"""Of so many ways to begin, the one that ends best is taken; of one, where there are many islands."""
_WORK = 2e8
"""Pairs of anchors that may be looked at while islands find their place."""
WARMEST = 1 / 6
"""How wide borders may be, as a share of the squared distance between neighbouring anchors."""
TINY = 1e-12


class Pairs(NamedTuple):
    """Islands that want to be neighbours, each pair both ways round."""

    one: np.ndarray
    other: np.ndarray
    wanted: np.ndarray
    """How much; all of it sums to one."""


def alike(blocks: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]], count: int) -> Pairs:
    """Which of `count` islands want to be neighbours, and how much.

    A block holds some rows, in order: squared distances between anchors (infinite from one to itself), how much the
    lists of these rows are confused with all others, and how much all others are confused with them.
    """
    neighbours = min(count - 1, _NEIGHBOURS)
    kept = [
        nearest(_unlike(between, confusion, confused), min(count - 1, 3 * neighbours), TINY)
        for between, confusion, confused in blocks
    ]
    near, far = (np.concatenate(column) for column in zip(*kept, strict=True))
    far -= far[:, :1]
    low, high = np.full(count, -40.0), np.full(count, 40.0)
    for _ in range(40):
        # As sharp as leaves so many neighbours, counted by the entropy of their shares.
        middle = (low + high) / 2
        shares = np.exp(-far * np.exp(middle)[:, None])
        shares /= shares.sum(axis=1, keepdims=True)
        many = -(shares * np.log(np.maximum(shares, TINY))).sum(axis=1) > np.log(neighbours)
        low, high = np.where(many, middle, low), np.where(many, high, middle)
    one, other = np.repeat(np.arange(count), near.shape[1]), near.reshape(-1)
    wanted = np.tile(shares.reshape(-1) / (2 * count), 2)
    return Pairs(np.concatenate([one, other]), np.concatenate([other, one]), wanted)


def _unlike(between: np.ndarray, confusion: np.ndarray, confused: np.ndarray) -> np.ndarray:
    """How unlike islands are: what remains of a squared distance where lists are confused."""
    with np.errstate(divide="ignore"):
        unlike: np.ndarray = np.log((confusion + confused) / 2)
    unlike *= -WARMEST
    # The logarithm of what was too small for a number is infinite; the distance is not.
    np.minimum(unlike, between, out=unlike)
    np.maximum(unlike, 0, out=unlike)
    unlike[np.isinf(between)] = np.inf
    return unlike


def starts_of(kept: np.ndarray) -> list[np.ndarray]:
    """Pairs of principal components, each with a little of a sunflower, so that no two anchors are at one place."""
    count = len(kept)
    pairs = _STARTS if count <= ROWS else 1
    scores = (kept @ principal(kept, 2 * pairs).T).reshape(count, pairs, 2)
    parts = scores.transpose(1, 0, 2)
    return [0.1 * spots / max(float(spots.std()), TINY) + 0.01 * _sunflower(count) for spots in parts]


def _sunflower(count: int) -> np.ndarray:
    """Points that fill a disc evenly."""
    turns = np.arange(count)
    angles = turns * (np.pi * (3 - np.sqrt(5)))
    return np.asarray(np.sqrt((turns + 0.5) / count)[:, None] * np.stack([np.cos(angles), np.sin(angles)], axis=1))


def islands(starts: list[np.ndarray], pairs: Pairs) -> tuple[np.ndarray, float]:
    """The middles of islands, and the radius that all of them have."""
    spots = min((_settled(start, pairs) for start in starts), key=lambda spots: _loss(spots, pairs))
    spots, apart = _pushed_apart(spots)
    spots = spots @ np.linalg.svd(spots, full_matrices=False)[2].T
    # A few may still be too close: they do not make all others small.
    least = min(float(distances.min()) for _, distances in distances_in_blocks(spots))
    radius = max(float(np.sqrt(least)), 0.8 * apart) / 2
    spots -= (spots.max(axis=0) + spots.min(axis=0)) / 2
    scale = 0.98 / float(np.abs(spots).max() + radius)
    return spots * scale, radius * scale


def _settled(spots: np.ndarray, pairs: Pairs) -> np.ndarray:
    """Neighbour embedding (t-SNE): islands that are alike attract one another, and all keep away from all."""
    one, other, wanted = pairs
    count = len(spots)
    step = -(-count // ROWS)
    rounds = int(np.clip(_WORK / (count * min(count, ROWS)), 100, 500))
    speed = np.zeros_like(spots)
    for turn in range(rounds):
        early = turn < rounds // 4
        ways = spots[one] - spots[other]
        ways *= (wanted / (1 + np.square(ways).sum(axis=1)))[:, None]
        slope = np.stack([np.bincount(one, way, count) for way in ways.T], axis=1) * (4 if early else 1)
        # Of many, a part keeps all away, another one in each round.
        some = spots[turn % step :: step]
        closeness = 1 / (1 + squared_distances(spots, some, np.square(some).sum(axis=1)))
        total = closeness.sum() - len(some)
        closeness *= closeness
        slope -= (closeness.sum(axis=1, keepdims=True) * spots - closeness @ some) / total
        speed = (0.5 if early else 0.8) * speed - max(count, 4) * slope
        spots = spots + speed
        spots -= spots.mean(axis=0)
    return spots


def _loss(spots: np.ndarray, pairs: Pairs) -> float:
    """What settling lowers."""
    one, other, wanted = pairs
    closeness = sum(float((1 / (1 + distances)).sum()) for _, distances in distances_in_blocks(spots))
    apart = np.log(1 + np.square(spots[one] - spots[other]).sum(axis=1))
    return float((wanted * apart).sum() + np.log(closeness))


def _pushed_apart(spots: np.ndarray) -> tuple[np.ndarray, float]:
    """Islands that are too close give way, both by the same; and how far apart they are to be."""
    # As far as in a disc that they fill; less where they form a line, which would buckle.
    apart = 2.3 * float(np.sqrt(np.square(spots).sum(axis=1).mean() / len(spots)))
    if len(spots) > 4:
        fourth = nearest_of_all(spots, 4, TINY)[:, 3]
        apart = min(apart, max(0.75 * float(np.median(np.sqrt(fourth))), apart / 4))
    # Two that want nothing but each other may have met in one point.
    spots = spots + 1e-3 * apart * _sunflower(len(spots))
    rounds = int(np.clip(_WORK / 4 / len(spots) ** 2, 15, 150))
    # What is close together grows little by little, so that it keeps its shape.
    for wanted in apart * np.minimum(10 ** np.linspace(-2, 0.5, rounds), 1):
        moved = spots.copy()
        for part in parts_of(len(spots)):
            distances = squared_distances(spots[part], spots, np.square(spots).sum(axis=1))
            rows, columns = np.nonzero(distances < wanted**2)
            ways = spots[part][rows] - spots[columns]
            lengths = np.maximum(np.sqrt(np.square(ways).sum(axis=1)), wanted / 100)
            ways *= 0.25 * (wanted / lengths - 1)[:, None]
            for axis in range(2):
                moved[part, axis] += np.bincount(rows, ways[:, axis], len(distances))
        spots = moved
    return spots, apart


def principal(rows: np.ndarray, count: int) -> np.ndarray:
    """The directions in which rows differ most, `count` × d, by subspace iteration; zeros where there are fewer."""
    width = min(count + 4, *rows.shape)
    basis = np.linalg.qr(np.random.default_rng(0).standard_normal((rows.shape[1], width)))[0]
    for _ in range(12):
        basis = np.linalg.qr(rows.T @ (rows @ basis))[0]
    turns = np.linalg.svd(rows @ basis, full_matrices=False)[2]
    found = np.zeros((count, rows.shape[1]))
    found[:width] = (turns @ basis.T)[:count]
    return found
