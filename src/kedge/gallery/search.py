"""Two-stage search over one state of a gallery: nearest anchors first, then only their lists."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kedge.gallery.anchors import Anchors
from kedge.gallery.lists import Lists

__all__ = ["Hit", "Part", "Result", "Snapshot"]

Masks = list["np.ndarray | None"]
"""Which rows of each part count; None: all."""

_SLACK = 16
"""So many more than asked are taken by the quick distance, and ordered by the exact one."""


class Hit(NamedTuple):
    """One item that was found."""

    id: int
    path: str | None
    label: str | None
    distance: float
    anchor: str | None


@dataclass(frozen=True)
class Result:
    """What a search found: iterate it for hits, nearest first."""

    hits: list[Hit]
    anchors: list[str | None]
    """The anchors whose lists were looked at, nearest first."""
    unknown: bool | None
    """Whether the query is far from every anchor; None where the gallery was not calibrated."""
    seconds: float

    def __iter__(self) -> Iterator[Hit]:
        return iter(self.hits)

    def __len__(self) -> int:
        return len(self.hits)


@dataclass(frozen=True)
class Part:
    """Lists with those rows marked that still count; None where all do."""

    lists: Lists
    alive: np.ndarray | None = None


@dataclass(frozen=True)
class Snapshot:
    """One version of a gallery, which never changes: any number of threads may search it."""

    version: int
    anchors: Anchors
    parts: tuple[Part, ...]

    def __len__(self) -> int:
        return sum(len(p.lists) if p.alive is None else int(p.alive.sum()) for p in self.parts)

    def probed(self, queries: np.ndarray, probes: int, at_least: int, masks: Masks) -> list[np.ndarray]:
        """For each query the anchors to look at: the nearest, and more until their lists hold enough items."""
        order = self.anchors.nearest(queries, len(self.anchors) if at_least else probes)
        if not at_least:
            return list(order)
        held = self._held(masks)
        reached = [np.searchsorted(np.cumsum(held[row]), at_least) + 1 for row in order]
        return [row[: max(probes, count)] for row, count in zip(order, reached, strict=True)]

    def search(
        self, queries: np.ndarray, k: int, probed: list[np.ndarray], masks: Masks, without: int | None = None
    ) -> list[list[Hit]]:
        """For each query the k nearest items in its lists that no mask leaves out."""
        found = [
            _candidates(part.lists, mask, queries, k, probed) for part, mask in zip(self.parts, masks, strict=True)
        ]
        return [self._ranked(query, k, [part[row] for part in found], without) for row, query in enumerate(queries)]

    def _ranked(self, query: np.ndarray, k: int, candidates: list[np.ndarray], without: int | None) -> list[Hit]:
        """Candidates of all parts by their exact distance, ties by id."""
        distances, ids = [], []
        for part, rows in zip(self.parts, candidates, strict=True):
            # By differences: |x|² − 2x·q loses digits near zero.
            away = part.lists.vectors.take(rows, axis=0)
            away -= query
            distances.append(np.sqrt(np.einsum("ij,ij->i", away, away)))
            ids.append(part.lists.ids.take(rows))
        far = distances[0] if len(distances) == 1 else np.concatenate(distances)
        who = ids[0] if len(ids) == 1 else np.concatenate(ids)
        if without is not None:
            far[who == without] = np.inf
        order = np.lexsort((who, far))[:k]
        if without is not None:
            order = order[np.isfinite(far[order])]
        if len(candidates) == 1:
            return self._hits(self.parts[0].lists, candidates[0][order], who[order], far[order])
        hits: list[Hit] = []
        first = 0
        for part, rows in zip(self.parts, candidates, strict=True):
            spots = order[(order >= first) & (order < first + len(rows))]
            hits += self._hits(part.lists, rows[spots - first], who[spots], far[spots])
            first += len(rows)
        return sorted(hits, key=lambda hit: (hit.distance, hit.id))

    def _hits(self, lists: Lists, rows: np.ndarray, ids: np.ndarray, distances: np.ndarray) -> list[Hit]:
        names = self.anchors.names
        paths, labels, homes = lists.describe(rows)
        columns = zip(ids.tolist(), paths, labels, distances.tolist(), [names[home] for home in homes], strict=True)
        # What Hit(*values) does, at half the price: a search makes hundreds.
        make = tuple.__new__
        return [make(Hit, values) for values in columns]

    def _held(self, masks: Masks) -> np.ndarray:
        """How many items each list holds."""
        held = np.zeros(len(self.anchors), np.int64)
        for part, mask in zip(self.parts, masks, strict=True):
            offsets = part.lists.offsets
            counts = np.diff(offsets) if mask is None else np.diff(np.concatenate([[0], np.cumsum(mask)])[offsets])
            held[: len(counts)] += counts
        return held


def _candidates(
    lists: Lists, mask: np.ndarray | None, queries: np.ndarray, k: int, probed: list[np.ndarray]
) -> list[np.ndarray]:
    """Rows that may be among the k nearest, for each query; queries of one list share a matrix product."""
    found: list[list[np.ndarray]] = [[] for _ in queries]
    askers: dict[int, list[int]] = {}
    for row, places in enumerate(probed):
        for place in places.tolist():
            askers.setdefault(place, []).append(row)
    for place, rows in askers.items():
        if place >= len(lists.offsets) - 1:
            continue
        start, end = int(lists.offsets[place]), int(lists.offsets[place + 1])
        if start == end:
            continue
        asked = queries[rows[0]] if len(rows) == 1 else queries[rows].T
        scores = lists.vectors[start:end] @ asked
        scores *= -2
        scores += lists.norms[start:end] if len(rows) == 1 else lists.norms[start:end, None]
        for column, row in enumerate(rows):
            found[row].append(_smallest(scores if len(rows) == 1 else scores[:, column], mask, k + _SLACK, start, end))
    return [np.concatenate(parts) if parts else np.empty(0, np.int64) for parts in found]


def _smallest(scores: np.ndarray, mask: np.ndarray | None, count: int, start: int, end: int) -> np.ndarray:
    """The rows of the `count` smallest scores that the mask allows."""
    allowed = None if mask is None else np.flatnonzero(mask[start:end])
    if allowed is not None:
        scores = scores[allowed]
    chosen = np.argpartition(scores, count)[:count] if count < len(scores) else np.arange(len(scores))
    return (chosen if allowed is None else allowed[chosen]) + start
