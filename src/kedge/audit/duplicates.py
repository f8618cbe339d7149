"""Exact and near duplicates, in one gallery or between two.

Exact duplicates have the same content. Near duplicates are sought among an item's nearest neighbours by looks, whatever
their labels, and told by two measures: how many bits of their perceptual hashes differ, and their distance as a share
of that to their fifth neighbours, so that dense and sparse regions count alike, whatever the encoder.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kedge.audit.items import Items
from kedge.audit.labels import robust_spread
from kedge.audit.neighbours import Neighbours, find_neighbours
from kedge.audit.report import Finding, Kind

__all__ = ["COUNT", "find_copies", "find_leaks", "find_near"]

COUNT = 16
"""Neighbours of an item that may be its copies."""
_SCALE = 5
"""The neighbour whose distance is the scale."""
_SAME_BITS, _NEAR_BITS, _NEAR_SHARE = 3, 12, 0.6
"""Images are near duplicates that differ in at most `_SAME_BITS`, or in `_NEAR_BITS` if their share is small.

Chosen on copies of 120 photos of Flowers, Pets and CUB (sizes × 0.3 to 2, JPEG qualities 30 to 95, crops by up to 10
pixels) beside 1,920 others, with EfficientNet-Lite0. Resized and recompressed copies differ in at most 2 bits, whatever
their share; cropped ones in up to 10, at shares up to 0.52; neighbours that are no copies in at least 14, above 0.7.
"""
_DEVIATIONS = 3.0
"""Of a pair without hashes the share must lie so many robust deviations below the median (both of logarithms)."""


def find_copies(items: Items) -> tuple[list[Finding], np.ndarray]:
    """Every item whose content stands under a smaller id, and which rows are left without them."""
    originals = _originals(items, items)
    is_copy = originals != np.arange(len(items))
    copies = np.flatnonzero(is_copy).tolist()
    findings = [_pair("duplicate", items, row, items, int(originals[row]), 1.0, 0.0) for row in copies]
    return findings, np.flatnonzero(~is_copy)


def find_near(items: Items, near: Neighbours) -> Iterator[Finding]:
    """Near duplicates: each item once, beside the smallest id that it repeats."""
    scores = _scores(items, near, items, near)
    repeats: dict[int, tuple[int, float, float]] = {}
    for row, place in np.argwhere(scores > 0).tolist():
        first, second = sorted((row, int(near.rows[row, place])), key=lambda each: int(items.ids[each]))
        if second not in repeats or items.ids[first] < items.ids[repeats[second][0]]:
            repeats[second] = first, scores[row, place], near.distances[row, place]
    for row, (other, score, distance) in repeats.items():
        yield _pair("near duplicate", items, row, items, other, score, distance)


def find_leaks(items: Items, unique: np.ndarray, near: Neighbours, others: Items) -> Iterator[Finding]:
    """Items of another gallery that are in this one too: the same content, or near duplicates."""
    originals = _originals(others, items)
    for other in np.flatnonzero(originals >= 0).tolist():
        yield _pair("leak", items, int(originals[other]), others, other, 1.0, 0.0)
    between = find_neighbours(others, np.flatnonzero(originals < 0), items, unique, COUNT)
    scores = _scores(others, between, items, near)
    for other in np.flatnonzero(scores.max(axis=1, initial=0) > 0).tolist():
        place = int(scores[other].argmax())
        row, distance = int(between.rows[other, place]), between.distances[other, place]
        yield _pair("leak", items, row, others, other, scores[other, place], distance)


def _originals(items: Items, pool: Items) -> np.ndarray:
    """For each item the row of the pool with the same content, of several that with the smallest id; -1 for none."""
    keys = pool.contents
    both = np.concatenate([keys, keys if items is pool else items.contents])
    groups = np.unique(both, axis=0, return_inverse=True)[1].reshape(-1)
    first = np.full(len(groups), -1)
    order = np.argsort(-pool.ids)
    first[groups[: len(pool)][order]] = order  # the smallest id comes last, and stays
    return first[groups[len(pool) :]]


def _scores(items: Items, near: Neighbours, pool: Items, pool_near: Neighbours) -> np.ndarray:
    """How sure it is that each neighbour is a near duplicate, with hashes at least a half; 0 where it is none."""
    shares, bits = _shares(near, pool_near), _differing_bits(items, near, pool)
    limit = _share_limit(pool_near)
    is_copy = (bits <= _SAME_BITS) | (bits <= _NEAR_BITS) & (shares < _NEAR_SHARE)
    scores = np.where(is_copy, 1 - bits / (2 * _NEAR_BITS), 0)
    return np.where(np.isnan(bits) & (shares < limit), 1 - shares / (limit or 1), scores)


def _shares(near: Neighbours, pool: Neighbours) -> np.ndarray:
    """The distance of each pair as a share of their fifth distances (the geometric mean); infinity where unknown.

    Of many copies the fifth neighbour is a copy too: half of the median of the pool is the least that counts.
    """
    own, others = near.distances[:, _SCALE - 1, None], pool.distances[near.rows, _SCALE - 1]
    usual = pool.distances[np.isfinite(pool.distances[:, _SCALE - 1]), _SCALE - 1]
    if not len(usual):
        return np.full(near.rows.shape, np.inf)
    least = max(float(np.median(usual)) / 2, 1e-12)
    scale = np.sqrt(np.maximum(own, least) * np.maximum(others, least))
    known = (near.rows >= 0) & np.isfinite(scale)
    return np.where(known, near.distances / np.where(known, scale, 1.0), np.inf)


def _share_limit(near: Neighbours) -> float:
    """The share below which a pair without hashes is a near duplicate, by what is usual among the items."""
    shares = _shares(near, near)[:, 0]
    shares = shares[np.isfinite(shares)]
    if not len(shares):
        return 0.0
    median, deviation = robust_spread(np.log(np.maximum(shares, 1e-12)))
    return min(float(np.exp(median - _DEVIATIONS * deviation)), _NEAR_SHARE)


def _differing_bits(items: Items, near: Neighbours, pool: Items) -> np.ndarray:
    """The Hamming distance of the hashes of each pair; NaN where one has none."""
    own, others = items.perceptual_hashes[:, None], pool.perceptual_hashes[near.rows]
    bits = np.bitwise_count(own ^ others).astype(np.float64)
    return np.where((own < 0) | (others < 0) | (near.rows < 0), np.nan, bits)


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
