"""Exact and near duplicates, in one gallery or between two.

Exact duplicates have the same content, whatever their lists. Near duplicates are sought among the items of one
nearest anchor, whatever their labels: never more than one such cell is in memory. How near is near follows from the
items: the distance of a pair is taken as a share of the distance to their fifth neighbours, so that dense and sparse
regions count alike, and a pair is reported whose share lies three robust standard deviations below the
median (both of logarithms).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kedge.audit.items import MAX_DISTANCES, Items
from kedge.audit.labels import robust_spread
from kedge.audit.report import Finding, Kind

__all__ = ["Neighbours", "find_copies", "find_leaks", "find_near", "near_limit", "neighbours"]

_NEIGHBOUR = 5
_DEVIATIONS = 3.0
_MAX_LIMIT = 0.5
"""Whatever the items say, a near duplicate is at least twice as near as the fifth neighbour."""
_CANDIDATES = _NEIGHBOUR + 4
"""Neighbours by quick scores, whose distances are then computed by differences."""


@dataclass(frozen=True)
class Neighbours:
    """The nearest item of each row, in a gallery; -1 where there is none."""

    nearest: np.ndarray
    distance: np.ndarray
    scale: np.ndarray
    """Distance to the fifth neighbour; NaN where there are fewer."""

    def shares(self, pool: Neighbours) -> np.ndarray:
        """The distance of each pair as a share of their fifth distances (the geometric mean); NaN where unknown.

        `pool` are the neighbours of the items in which `nearest` was sought. Where few items are around, what is
        usual in the pool counts.
        """
        finite = pool.scale[np.isfinite(pool.scale)]
        usual = float(np.median(finite)) if len(finite) else np.nan
        own, others = self.scale, pool.scale[self.nearest]
        scale = np.sqrt(np.where(np.isnan(own), usual, own) * np.where(np.isnan(others), usual, others))
        shares = np.where(scale == 0, 0.0, self.distance / np.where(scale == 0, 1.0, scale))
        return np.where(self.nearest < 0, np.nan, shares)


def find_copies(items: Items) -> tuple[list[Finding], np.ndarray]:
    """Every item whose content stands under a smaller id, and which rows are left without them."""
    keys = items.contents()
    originals = _originals(keys, keys, items.ids)
    is_copy = originals != np.arange(len(items))
    copies = np.flatnonzero(is_copy).tolist()
    findings = [_pair("duplicate", items, row, items, int(originals[row]), 1.0, 0.0) for row in copies]
    return findings, np.flatnonzero(~is_copy)


def neighbours(items: Items, cells: np.ndarray, rows: np.ndarray) -> Neighbours:
    """The nearest of `rows` to each of them, among those of the same cell."""
    return _neighbours(items, cells, rows, items, cells, rows)


def near_limit(near: Neighbours) -> float | None:
    """The share below which a pair is a near duplicate; None where there are too few items to tell."""
    shares = near.shares(near)
    shares = shares[np.isfinite(shares)]
    if len(shares) == 0:
        return None
    median, deviation = robust_spread(np.log(np.maximum(shares, 1e-12)))
    return min(float(np.exp(median - _DEVIATIONS * deviation)), _MAX_LIMIT)


def find_near(items: Items, near: Neighbours, limit: float) -> Iterator[Finding]:
    """Pairs within the limit, each once, under the larger id."""
    shares = near.shares(near)
    for row in np.flatnonzero(shares < limit).tolist():
        other = int(near.nearest[row])
        first, second = (row, other) if items.ids[row] < items.ids[other] else (other, row)
        if row == first and near.nearest[other] == row:
            continue  # the other row of the pair reports it
        score, distance = _near_score(shares[row], limit), near.distance[row]
        yield _pair("near duplicate", items, second, items, first, score, distance)


def find_leaks(
    items: Items, cells: np.ndarray, unique: np.ndarray, near: Neighbours, limit: float | None, others: Items
) -> Iterator[Finding]:
    """Items of another gallery that are in this one too: the same content, or within the limit."""
    originals = _originals(others.contents(), items.contents(), items.ids)
    for other in np.flatnonzero(originals >= 0).tolist():
        yield _pair("leak", items, int(originals[other]), others, other, 1.0, 0.0)
    if limit is None:
        return
    other_cells = np.zeros(len(others), np.int64)
    for rows, vectors in others.blocks():
        other_cells[rows] = items.anchors.nearest(vectors, 1)[:, 0]
    between = _neighbours(others, other_cells, np.flatnonzero(originals < 0), items, cells, unique)
    shares = between.shares(near)
    for other in np.flatnonzero(shares < limit).tolist():
        score, distance = _near_score(shares[other], limit), between.distance[other]
        yield _pair("leak", items, int(between.nearest[other]), others, other, score, distance)


def _neighbours(
    queries: Items, query_cells: np.ndarray, query_rows: np.ndarray, pool: Items, cells: np.ndarray, rows: np.ndarray
) -> Neighbours:
    """The nearest of `rows` in `pool` to each of `query_rows`, cell by cell; itself left out."""
    nearest = np.full(len(queries), -1)
    distance, scale = np.full(len(queries), np.inf), np.full(len(queries), np.nan)
    for cell in np.unique(query_cells[query_rows]).tolist():
        asking, members = query_rows[query_cells[query_rows] == cell], rows[cells[rows] == cell]
        available = len(members) - (queries is pool)
        if available < 1:
            continue
        # Around the anchor the numbers are small, so that fewer digits are lost.
        centre = pool.anchors.vectors[cell]
        vectors = pool.vectors(members) - centre
        norms = np.einsum("ij,ij->i", vectors, vectors)
        size = max(1, MAX_DISTANCES // len(members))
        for start in range(0, len(asking), size):
            block = asking[start : start + size]
            points = vectors[start : start + size] if queries is pool else queries.vectors(block) - centre
            scores = norms - 2 * (points @ vectors.T)
            if queries is pool:
                scores[np.arange(len(block)), np.arange(start, start + len(block))] = np.inf
            columns, lengths = _nearest_exactly(scores, points, vectors, min(_CANDIDATES, available))
            nearest[block], distance[block] = members[columns[:, 0]], lengths[:, 0]
            if lengths.shape[1] >= _NEIGHBOUR:
                scale[block] = lengths[:, _NEIGHBOUR - 1]
    return Neighbours(nearest, distance, scale)


def _nearest_exactly(
    scores: np.ndarray, points: np.ndarray, vectors: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """The first columns by quick scores, ordered by exact distances."""
    columns = np.argpartition(scores, count - 1, axis=1)[:, :count]
    lengths = np.stack([np.linalg.norm(vectors[column] - points, axis=1) for column in columns.T], axis=1)
    order = np.argsort(lengths, axis=1, kind="stable")
    return np.take_along_axis(columns, order, 1), np.take_along_axis(lengths, order, 1).astype(np.float64)


def _originals(keys: np.ndarray, pool: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """For each key the row of the pool with the same one, the smallest of its `ids`; -1 for none."""
    _, groups = np.unique(np.concatenate([pool, keys]), axis=0, return_inverse=True)
    groups = groups.reshape(-1)
    first = np.full(len(groups), -1)
    order = np.argsort(-ids)
    first[groups[: len(pool)][order]] = order  # the smallest id comes last, and stays
    return first[groups[len(pool) :]]


def _near_score(share: float, limit: float) -> float:
    """1 for no distance at all, a half at the limit."""
    return float(1 - 0.5 * share / limit)


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
