"""Items that stand twice, in one gallery or in two.

Exact duplicates have the same content, wherever they stand. Near duplicates are sought among the items of one
nearest anchor, whatever their labels: never more than one such cell is in memory. How near is near follows from the
items: the distance of a pair is taken as a share of the distance to their fifth neighbours, so that dense and sparse
regions count alike, and a pair is reported whose share lies three robust standard deviations below the
median (both of logarithms).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kedge.audit.findings import Finding, Kind
from kedge.audit.items import Items
from kedge.audit.places import Places, spread

__all__ = ["Neighbours", "find_copies", "find_leaks", "find_near", "near_limit", "neighbours"]

_NEIGHBOUR = 5
_DEVIATIONS = 3.0
_HIGHEST = 0.5
"""Whatever the items say, a near duplicate is at least twice as near as the fifth neighbour."""
_SLACK = 4
_FLOATS = 2**23
"""So many distances are held at once."""


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
        known = pool.scale[np.isfinite(pool.scale)]
        usual = float(np.median(known)) if len(known) else np.nan
        mine, theirs = self.scale, pool.scale[self.nearest]
        both = np.sqrt(np.where(np.isnan(mine), usual, mine) * np.where(np.isnan(theirs), usual, theirs))
        shares = np.where(both == 0, 0.0, self.distance / np.where(both == 0, 1.0, both))
        return np.where(self.nearest < 0, np.nan, shares)


def find_copies(items: Items) -> tuple[list[Finding], np.ndarray]:
    """Every item whose content stands under a smaller id, and which rows are left without them."""
    originals = _first_of_each(items, items.contents())
    copies = np.flatnonzero(originals != np.arange(len(items)))
    found = [_pair("duplicate", items, row, items, int(originals[row]), 1.0, 0.0) for row in copies.tolist()]
    return found, np.flatnonzero(originals == np.arange(len(items)))


def neighbours(items: Items, cells: np.ndarray, rows: np.ndarray) -> Neighbours:
    """The nearest of `rows` to each of them, among those of the same cell."""
    return _neighbours(items, cells, rows, items, cells, rows)


def near_limit(found: Neighbours) -> float | None:
    """The share below which a pair is a near duplicate; None where there are too few items to tell."""
    shares = found.shares(found)
    shares = shares[np.isfinite(shares)]
    if len(shares) == 0:
        return None
    middle, deviation = spread(np.log(np.maximum(shares, 1e-12)))
    return min(float(np.exp(middle - _DEVIATIONS * deviation)), _HIGHEST)


def find_near(items: Items, found: Neighbours, limit: float) -> Iterator[Finding]:
    """Pairs within the limit, each once, under the larger id."""
    shares = found.shares(found)
    for row in np.flatnonzero(shares < limit).tolist():
        other = int(found.nearest[row])
        first, second = (row, other) if items.ids[row] < items.ids[other] else (other, row)
        if row == first and found.nearest[other] == row:
            continue  # the other row of the pair reports it
        score, distance = _near_score(shares[row], limit), float(found.distance[row])
        yield _pair("near duplicate", items, second, items, first, score, distance)


def find_leaks(
    items: Items, places: Places, unique: np.ndarray, found: Neighbours, limit: float | None, others: Items
) -> Iterator[Finding]:
    """Items of another gallery that stand in this one too: the same content, or within the limit."""
    both = np.concatenate([items.contents(), others.contents()])
    _, group = np.unique(both, axis=0, return_inverse=True)
    group = group.reshape(-1)
    holder = np.full(len(both), -1)
    order = np.argsort(-items.ids)
    holder[group[: len(items)][order]] = order
    same = holder[group[len(items) :]]
    for other in np.flatnonzero(same >= 0).tolist():
        yield _pair("leak", items, int(same[other]), others, other, 1.0, 0.0)
    if limit is None:
        return
    rest = np.flatnonzero(same < 0)
    other_cells = np.zeros(len(others), np.int64)
    for rows, vectors in others.blocks():
        other_cells[rows] = items.anchors.nearest(vectors, 1)[:, 0]
    near = _neighbours(others, other_cells, rest, items, places.cells, unique)
    shares = near.shares(found)
    for other in np.flatnonzero(shares < limit).tolist():
        score = _near_score(shares[other], limit)
        yield _pair("leak", items, int(near.nearest[other]), others, other, score, float(near.distance[other]))


def _neighbours(
    queries: Items, query_cells: np.ndarray, query_rows: np.ndarray, pool: Items, cells: np.ndarray, rows: np.ndarray
) -> Neighbours:
    """The nearest of `rows` in `pool` to each of `query_rows`, cell by cell; itself left out."""
    nearest = np.full(len(queries), -1)
    distance, scale = np.full(len(queries), np.inf), np.full(len(queries), np.nan)
    for cell in np.unique(query_cells[query_rows]).tolist():
        mine, theirs = query_rows[query_cells[query_rows] == cell], rows[cells[rows] == cell]
        least = 2 if queries is pool else 1
        if len(theirs) < least:
            continue
        # Around the anchor the numbers are small, so that fewer digits are lost.
        centre = pool.anchors.vectors[cell]
        around = pool.vectors(theirs) - centre
        squares = np.einsum("ij,ij->i", around, around)
        size = max(1, _FLOATS // len(theirs))
        for start in range(0, len(mine), size):
            block = mine[start : start + size]
            points = around[start : start + size] if queries is pool else queries.vectors(block) - centre
            scores = squares - 2 * (points @ around.T)
            if queries is pool:
                scores[np.arange(len(block)), np.arange(start, start + len(block))] = np.inf
            columns, lengths = _nearest_exactly(scores, points, around, len(theirs) - least + 1)
            nearest[block], distance[block] = theirs[columns[:, 0]], lengths[:, 0]
            if lengths.shape[1] >= _NEIGHBOUR:
                scale[block] = lengths[:, _NEIGHBOUR - 1]
    return Neighbours(nearest, distance, scale)


def _nearest_exactly(
    scores: np.ndarray, points: np.ndarray, around: np.ndarray, available: int
) -> tuple[np.ndarray, np.ndarray]:
    """The first columns by quick scores, ordered by exact distances."""
    wanted = min(_NEIGHBOUR + _SLACK, available)
    columns = np.argpartition(scores, wanted - 1, axis=1)[:, :wanted]
    lengths = np.stack([np.linalg.norm(around[column] - points, axis=1) for column in columns.T], axis=1)
    order = np.argsort(lengths, axis=1, kind="stable")
    return np.take_along_axis(columns, order, 1), np.take_along_axis(lengths, order, 1).astype(np.float64)


def _first_of_each(items: Items, keys: np.ndarray) -> np.ndarray:
    """For each row, the row of the smallest id with the same key."""
    _, group = np.unique(keys, axis=0, return_inverse=True)
    first = np.zeros(len(items), np.int64)
    order = np.argsort(-items.ids)
    first[group.reshape(-1)[order]] = order
    return first[group.reshape(-1)]


def _near_score(share: float, limit: float) -> float:
    """1 for no distance at all, a half at the limit."""
    return float(1 - 0.5 * share / limit)


def _pair(kind: Kind, items: Items, row: int, others: Items, other: int, score: float, distance: float) -> Finding:
    path, label = items.describe(row)
    other_path, other_label = others.describe(other)
    return Finding(
        kind=kind,
        id=int(items.ids[row]),
        path=path,
        label=label,
        score=score,
        distance=distance,
        suggestion=other_label if other_label != label else None,
        other_id=int(others.ids[other]),
        other_path=other_path,
    )
