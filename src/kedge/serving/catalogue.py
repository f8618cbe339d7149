"""One version of a gallery as a flat list of items: what is counted, listed and drawn."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath

import numpy as np

from kedge.gallery.search import Columns, Snapshot

__all__ = ["UPLOADS", "Catalogue", "Listed", "shown_name"]

UPLOADS = "uploads"
"""The folder in a gallery for uploaded images."""


@dataclass(frozen=True)
class Listed:
    """An item of the catalogue."""

    id: int
    path: str | None
    label: str | None


class Catalogue:
    """The items of a snapshot in order of their ids."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        rows = [np.arange(len(p.lists)) if p.alive is None else np.flatnonzero(p.alive) for p in snapshot.parts]
        ids = np.concatenate([part.lists.ids[some] for part, some in zip(snapshot.parts, rows, strict=True)])
        order = np.argsort(ids, kind="stable")
        self.ids: np.ndarray = ids[order]
        self._part = np.repeat(np.arange(len(rows)), [len(some) for some in rows])[order]
        self._row = np.concatenate(rows)[order]

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def names(self) -> list[str]:
        """All labels, sorted."""
        held = np.unique(self._labels_raw[self._labels_raw >= 0]).tolist()
        return sorted({self._all_names[row] for row in held})

    @cached_property
    def labels(self) -> np.ndarray:
        """Each item's row of `names`; -1 for none."""
        places = {name: row for row, name in enumerate(self.names)}
        table = np.array([*(places.get(name, -1) for name in self._all_names), -1], dtype=np.int64)
        found: np.ndarray = table[self._labels_raw]
        return found

    @cached_property
    def counts(self) -> np.ndarray:
        """How many items each label has."""
        return np.bincount(self.labels[self.labels >= 0], minlength=len(self.names))

    @cached_property
    def held(self) -> np.ndarray:
        """How many items each anchor's list holds."""
        return self.snapshot.held([part.alive for part in self.snapshot.parts])

    def listed(self, places: np.ndarray) -> list[Listed]:
        """Some items."""
        found: list[Listed] = []
        for place in places.tolist():
            lists = self.snapshot.parts[self._part[place]].lists
            (id,), (path,), (label,) = lists.describe(self._row[place : place + 1])
            found.append(Listed(id, path, label))
        return found

    def vectors(self, places: np.ndarray) -> np.ndarray:
        """The embeddings of some items."""
        found = np.empty((len(places), self.snapshot.anchors.vectors.shape[1]), np.float32)
        for number, part in enumerate(self.snapshot.parts):
            own = np.flatnonzero(self._part[places] == number)
            found[own] = part.lists.vectors[self._row[places[own]]]
        return found

    def vector(self, id: int) -> np.ndarray:
        """The embedding of one item, compared with its checksums; KeyError where there is none."""
        place = int(np.searchsorted(self.ids, id))
        if place == len(self) or self.ids[place] != id:
            raise KeyError(id)
        lists, row = self.snapshot.parts[self._part[place]].lists, self._row[place]
        lists.prepare([int(np.searchsorted(lists.offsets, row, side="right")) - 1])
        return np.array(lists.vectors[row])

    def typical(self, anchor: int, k: int) -> Columns:
        """The items of an anchor's list that are nearest to it."""
        masks = [part.alive for part in self.snapshot.parts]
        vector = self.snapshot.anchors.vectors[anchor : anchor + 1]
        [found] = self.snapshot.search(vector, k, [np.array([anchor])], masks)
        return found

    def spread(self, most: int) -> np.ndarray:
        """At most so many items, as evenly from all labels as they allow, always the same ones."""
        if len(self) <= most:
            return np.arange(len(self))
        # Each label's first items come first, then each label's second …
        shuffled = np.random.default_rng(0).permutation(len(self))
        by_label = shuffled[np.argsort(self.labels[shuffled], kind="stable")]
        own = self.labels[by_label]
        starts = np.flatnonzero(np.concatenate([[True], own[1:] != own[:-1]]))
        turn = np.arange(len(self)) - np.repeat(starts, np.diff([*starts, len(self)]))
        return np.sort(by_label[np.argsort(turn, kind="stable")[:most]])

    @cached_property
    def _all_names(self) -> list[str]:
        return [name for part in self.snapshot.parts for name in part.lists.label_names]

    @cached_property
    def _labels_raw(self) -> np.ndarray:
        """Rows of `_all_names`; -1 for none."""
        offset, found = 0, []
        for part in self.snapshot.parts:
            labels = part.lists.labels.astype(np.int64)
            found.append(np.where(labels >= 0, labels + offset, -1))
            offset += len(part.lists.label_names)
        return self._picked(found)

    def _picked(self, by_part: list[np.ndarray]) -> np.ndarray:
        """Values of all rows of all parts, for the items in their order."""
        starts = np.cumsum([0, *(len(values) for values in by_part)])[:-1]
        together = np.concatenate([*by_part, np.empty(0, np.int64)])
        found: np.ndarray = together[starts[self._part] + self._row]
        return found


def shown_name(path: str | None) -> str | None:
    """The last part of a path: where a server keeps its files is nobody's business. Uploads have no name."""
    if path is None or PurePath(path).parent.name == UPLOADS:
        return None
    return PurePath(path).name
