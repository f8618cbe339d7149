"""The items of a snapshot as one sequence, whatever part and list they are in."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from kedge.gallery.search import Snapshot

__all__ = ["Items"]


class Items:
    """The items of a snapshot, in order of their ids or as they lie on disk (`by_id=False`).

    A few numbers for each are in memory; vectors and paths are read from the inverted lists when asked for.
    """

    def __init__(self, snapshot: Snapshot, *, by_id: bool = True) -> None:
        self.snapshot = snapshot
        self._lists = [part.lists for part in snapshot.parts]
        rows = [np.arange(len(p.lists)) if p.alive is None else np.flatnonzero(p.alive) for p in snapshot.parts]
        self._part = np.repeat(np.arange(len(rows)), [len(of_part) for of_part in rows])
        self._row = np.concatenate([*rows, np.empty(0, np.int64)]).astype(np.int64)
        self.ids: np.ndarray = self._gather([lists.ids for lists in self._lists])
        if by_id:
            order = np.argsort(self.ids, kind="stable")
            self.ids, self._part, self._row = self.ids[order], self._part[order], self._row[order]

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def lists(self) -> np.ndarray:
        """The list of each item, which is the number of its anchor."""
        return self._gather([lists.list_of_row for lists in self._lists])

    @cached_property
    def label_names(self) -> list[str]:
        """All labels that an item has, sorted."""
        used = np.unique(self._label_codes)
        return sorted({self._all_names[code] for code in used.tolist() if code >= 0})

    @cached_property
    def labels(self) -> np.ndarray:
        """The index of each item's label in `label_names`; -1 for none."""
        numbers = {name: number for number, name in enumerate(self.label_names)}
        # One more at the end, for the code -1.
        by_code = np.array([*(numbers.get(name, -1) for name in self._all_names), -1], dtype=np.int64)
        labels: np.ndarray = by_code[self._label_codes]
        return labels

    def vectors(self, positions: np.ndarray) -> np.ndarray:
        """The embeddings of some items."""
        vectors = np.empty((len(positions), self.snapshot.anchors.vectors.shape[1]), np.float32)
        for number, lists in enumerate(self._lists):
            mine = np.flatnonzero(self._part[positions] == number)
            vectors[mine] = lists.vectors[self._row[positions[mine]]]
        return vectors

    def describe(self, position: int) -> tuple[str | None, str | None]:
        """Path and label of an item."""
        _, (path,), (label,) = self._lists[self._part[position]].describe(self._row[position : position + 1])
        return path, label

    @cached_property
    def _all_names(self) -> list[str]:
        return [name for lists in self._lists for name in lists.label_names]

    @cached_property
    def _label_codes(self) -> np.ndarray:
        """Indices into `_all_names`; -1 for none."""
        first, codes = 0, []
        for lists in self._lists:
            codes.append(np.where(lists.labels >= 0, lists.labels.astype(np.int64) + first, -1))
            first += len(lists.label_names)
        return self._gather(codes)

    def _gather(self, by_part: list[np.ndarray]) -> np.ndarray:
        """Values of all rows of all parts, for the items in their order."""
        values = np.empty(len(self._row), by_part[0].dtype)
        for number, of_part in enumerate(by_part):
            mine = self._part == number
            values[mine] = of_part[self._row[mine]]
        return values
