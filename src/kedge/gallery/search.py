"""Two-stage search over one state of a gallery: nearest anchors first, then only their lists."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kedge.gallery.anchors import Anchors
from kedge.gallery.lists import Lists

__all__ = ["Hit", "Part", "Result", "Snapshot"]

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
    unknown: bool
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

    def probed(self, query: np.ndarray, probes: int, at_least: int, masks: list[np.ndarray | None]) -> np.ndarray:
        """The anchors to look at: the nearest, and more until their lists hold enough items."""
        order: np.ndarray = self.anchors.nearest(query[None], len(self.anchors) if at_least else probes)[0]
        if at_least:
            held = np.cumsum([self._held(int(place), masks) for place in order])
            probes = max(probes, int(np.searchsorted(held, at_least)) + 1)
        return order[:probes]

    def search(
        self, query: np.ndarray, k: int, lists: np.ndarray, masks: list[np.ndarray | None], without: int | None = None
    ) -> list[Hit]:
        """The k nearest items in these lists that no mask leaves out."""
        found: list[tuple[float, int, int, int]] = []
        for place, (part, mask) in enumerate(zip(self.parts, masks, strict=True)):
            rows = [self._nearest(part.lists, mask, query, k, int(one)) for one in lists]
            kept = np.concatenate(rows) if rows else np.empty(0, np.int64)
            if without is not None:
                kept = kept[part.lists.ids[kept] != without]
            # By differences: |x|² − 2x·q loses digits near zero.
            exact = part.lists.vectors[kept] - query
            distances = np.sqrt(np.einsum("ij,ij->i", exact, exact))
            ids = part.lists.ids[kept].tolist()
            found += zip(distances.tolist(), ids, [place] * len(ids), kept.tolist(), strict=True)
        found.sort()
        return [self._hit(*one) for one in found[:k]]

    def _nearest(self, lists: Lists, mask: np.ndarray | None, query: np.ndarray, k: int, one: int) -> np.ndarray:
        if one >= len(lists.offsets) - 1:
            return np.empty(0, np.int64)
        start, end = int(lists.offsets[one]), int(lists.offsets[one + 1])
        if start == end:
            return np.empty(0, np.int64)
        scores = lists.norms[start:end] - 2 * (lists.vectors[start:end] @ query)
        if mask is not None:
            allowed = mask[start:end]
            scores[~allowed] = np.inf
        wanted = k + _SLACK
        rows = np.argpartition(scores, wanted)[:wanted] if wanted < end - start else np.arange(end - start)
        return rows[np.isfinite(scores[rows])] + start if mask is not None else rows + start

    def _held(self, one: int, masks: list[np.ndarray | None]) -> int:
        count = 0
        for part, mask in zip(self.parts, masks, strict=True):
            if one < len(part.lists.offsets) - 1:
                start, end = int(part.lists.offsets[one]), int(part.lists.offsets[one + 1])
                count += end - start if mask is None else int(mask[start:end].sum())
        return count

    def _hit(self, distance: float, id: int, place: int, row: int) -> Hit:
        lists = self.parts[place].lists
        anchor = int(np.searchsorted(lists.offsets, row, side="right")) - 1
        return Hit(id, lists.path(row), lists.label(row), distance, self.anchors.names[anchor])
