"""Exact and near duplicates, in one gallery or between two.

Exact duplicates have the same content. Near duplicates are sought among an item's nearest neighbours by looks, whatever
their labels, and judged by two measures: how many bits of their perceptual hashes differ, and their distance as a share
of that to their fifth neighbours, so that dense and sparse regions count alike, whatever the encoder.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kedge.audit.items import Items, Neighbours, find_neighbours
from kedge.audit.labels import robust_spread
from kedge.audit.report import Finding, Kind

__all__ = ["COUNT", "find_copies", "find_leaks", "find_near"]

COUNT = 5
"""Neighbours of an item that may be its copies; the distance to the last is the scale."""
_SAME_BITS, _SAME_SHARE = 2, 1.5
_NEAR_BITS, _NEAR_SHARE = 12, 0.6
"""Images are near duplicates that differ in few bits, and whose distance is not too large a share.

Chosen on copies of 120 photos of Flowers, Pets and CUB (sizes × 0.3 to 2, JPEG qualities 30 to 95, crops by up to 10
pixels) beside 1,920 others, with EfficientNet-Lite0. Resized and recompressed copies differ in at most 2 bits, at
shares up to 1.2; cropped ones in up to 10, at shares up to 0.52; neighbours that are no copies in at least 14.
"""
_MAX_GROUP = 1000
"""Hashes that more items share in a third of their bits are those of images without a pattern."""
_DEVIATIONS = 3.0
"""Of a pair without hashes the share must lie so many robust deviations below the median (both of logarithms)."""


class _Pairs(NamedTuple):
    """Pairs of rows that may be near duplicates, and their distances."""

    rows: np.ndarray
    others: np.ndarray
    distances: np.ndarray


def find_copies(items: Items) -> tuple[list[Finding], np.ndarray]:
    """Every item whose content stands under a smaller id, and which rows are left without them."""
    originals = _originals(items, items)
    is_copy = originals != np.arange(len(items))
    copies = np.flatnonzero(is_copy).tolist()
    findings = [_pair("duplicate", items, row, items, int(originals[row]), 1.0, 0.0) for row in copies]
    return findings, np.flatnonzero(~is_copy)


def find_near(items: Items, near: Neighbours) -> Iterator[Finding]:
    """Near duplicates: each item once, beside the smallest id that it repeats."""
    pairs = _candidates(items, near, items, near)
    scores = _scores(pairs, items, near, items, near)
    repeats: dict[int, tuple[int, int]] = {}
    for number in np.flatnonzero(scores).tolist():
        both = int(pairs.rows[number]), int(pairs.others[number])
        first, second = sorted(both, key=lambda row: int(items.ids[row]))
        if second not in repeats or items.ids[first] < items.ids[repeats[second][0]]:
            repeats[second] = first, number
    for row, (other, number) in repeats.items():
        yield _pair("near duplicate", items, row, items, other, scores[number], pairs.distances[number])


def find_leaks(items: Items, unique: np.ndarray, near: Neighbours, others: Items) -> Iterator[Finding]:
    """Items of another gallery that are in this one too: the same content, or near duplicates."""
    originals = _originals(others, items)
    for other in np.flatnonzero(originals >= 0).tolist():
        yield _pair("leak", items, int(originals[other]), others, other, 1.0, 0.0)
    between = find_neighbours(others, np.flatnonzero(originals < 0), items, unique, COUNT)
    pairs = _candidates(others, between, items, near)
    scores = _scores(pairs, others, between, items, near)
    surest = {
        int(pairs.rows[number]): number for number in np.argsort(scores, kind="stable").tolist() if scores[number]
    }
    for other, number in surest.items():
        score, distance = scores[number], pairs.distances[number]
        yield _pair("leak", items, int(pairs.others[number]), others, other, score, distance)


def _originals(items: Items, pool: Items) -> np.ndarray:
    """For each item the row of the pool with the same content, of several that with the smallest id; -1 for none."""
    keys = pool.contents
    both = np.concatenate([keys, keys if items is pool else items.contents])
    groups = np.unique(both, axis=0, return_inverse=True)[1].reshape(-1)
    first = np.full(len(groups), -1)
    order = np.argsort(-pool.ids)
    first[groups[: len(pool)][order]] = order  # the smallest id comes last, and stays
    return first[groups[len(pool) :]]


def _candidates(items: Items, near: Neighbours, pool: Items, pool_near: Neighbours) -> _Pairs:
    """The nearest neighbours, and pairs of images with nearly the same hash, however far a small copy lies."""
    rows, places = np.nonzero(near.rows >= 0)
    alike = np.array(list(_alike(items.perceptual_hashes, pool.perceptual_hashes)), np.int64).reshape(-1, 2)
    # None of an item with itself, or of those that are exact duplicates and so have no neighbours.
    alike = alike[(near.rows[alike[:, 0], 0] >= 0) & (pool_near.rows[alike[:, 1], 0] >= 0)]
    alike = alike[alike[:, 0] != alike[:, 1]] if items is pool else alike
    gaps = [items.vectors(pair[:1]) - pool.vectors(pair[1:]) for pair in alike]
    distances = np.array([float(np.linalg.norm(gap)) for gap in gaps])
    return _Pairs(
        np.concatenate([rows, alike[:, 0]]),
        np.concatenate([near.rows[rows, places], alike[:, 1]]),
        np.concatenate([near.distances[rows, places], distances]),
    )


def _alike(hashes: np.ndarray, pool: np.ndarray) -> Iterator[tuple[int, int]]:
    """Rows whose hashes differ in at most two of 63 bits: one third of the bits is then the same in both."""
    there = np.flatnonzero(pool >= 0)
    for shift in (0, 21, 42):
        keys = (pool[there] >> shift) & (2**21 - 1)
        order = np.argsort(keys, kind="stable")
        members, chunks = there[order], (hashes >> shift) & (2**21 - 1)
        first, last = (np.searchsorted(keys[order], chunks, side) for side in ("left", "right"))
        for row in np.flatnonzero((hashes >= 0) & (last > first) & (last - first <= _MAX_GROUP)).tolist():
            group = members[first[row] : last[row]]
            same = np.bitwise_count(hashes[row] ^ pool[group]) <= _SAME_BITS
            yield from ((row, other) for other in group[same].tolist())


def _scores(pairs: _Pairs, items: Items, near: Neighbours, pool: Items, pool_near: Neighbours) -> np.ndarray:
    """How sure it is that each pair is a near duplicate, with hashes at least a half; 0 where it is none."""
    hashes, others = items.perceptual_hashes[pairs.rows], pool.perceptual_hashes[pairs.others]
    bits = np.where((hashes < 0) | (others < 0), np.nan, np.bitwise_count(hashes ^ others))
    shares = _shares(pairs, near, pool_near)
    same = (bits <= _SAME_BITS) & ~(shares >= _SAME_SHARE)
    scores = np.where(same | (bits <= _NEAR_BITS) & (shares < _NEAR_SHARE), 1 - bits / (2 * _NEAR_BITS), 0)
    limit = _share_limit(pool_near)
    return np.where(np.isnan(bits) & (shares < limit), 1 - shares / (limit or 1), scores)


def _shares(pairs: _Pairs, near: Neighbours, pool: Neighbours) -> np.ndarray:
    """The distance of each pair as a share of their fifth distances (the geometric mean); NaN where unknown.

    Of many copies the fifth neighbour is a copy too: half of the median of the pool is the least that counts.
    """
    usual = pool.distances[np.isfinite(pool.distances[:, -1]), -1]
    least = max(float(np.median(usual)) / 2, 1e-12) if len(usual) else np.nan
    own, others = near.distances[pairs.rows, -1], pool.distances[pairs.others, -1]
    scale = np.sqrt(np.maximum(own, least) * np.maximum(others, least))
    shares: np.ndarray = np.where(np.isfinite(scale), pairs.distances / scale, np.nan)
    return shares


def _share_limit(near: Neighbours) -> float:
    """The share below which a pair without hashes is a near duplicate, by what is usual among the items."""
    rows = np.flatnonzero(near.rows[:, 0] >= 0)
    shares = _shares(_Pairs(rows, near.rows[rows, 0], near.distances[rows, 0]), near, near)
    shares = shares[np.isfinite(shares)]
    if not len(shares):
        return 0.0
    median, deviation = robust_spread(np.log(np.maximum(shares, 1e-12)))
    return min(float(np.exp(median - _DEVIATIONS * deviation)), _NEAR_SHARE)


def _pair(kind: Kind, items: Items, row: int, others: Items, other: int, score: float, distance: float) -> Finding:
    (_, label), (path, suggestion) = items.describe(row), others.describe(other)
    return items.finding(
        kind,
        row,
        score,
        distance,
        suggestion=suggestion if suggestion != label else None,
        other_id=int(others.ids[other]),
        other_path=path,
    )
