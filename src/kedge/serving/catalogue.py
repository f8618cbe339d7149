"""One version of a gallery as a flat list of items: what is counted, listed and drawn."""

from __future__ import annotations

from functools import cached_property
from pathlib import PurePath

import numpy as np

from kedge.gallery.search import Columns
from kedge.gallery.snapshot import Items

__all__ = ["UPLOADS", "Catalogue", "shown_name"]

UPLOADS = "uploads"
"""The folder in a gallery for uploaded images."""


class Catalogue(Items):
    """The items of a snapshot in order of their ids."""

    @cached_property
    def label_counts(self) -> np.ndarray:
        """How many items each of `label_names` has."""
        return np.bincount(self.labels[self.labels >= 0], minlength=len(self.label_names))

    @cached_property
    def list_sizes(self) -> np.ndarray:
        """How many items each anchor's list holds."""
        return self.snapshot.list_sizes()

    def vector(self, id: int) -> np.ndarray:
        """The embedding of one item, compared with its checksums; KeyError where there is none."""
        position = int(np.searchsorted(self.ids, id))
        if position == len(self) or self.ids[position] != id:
            raise KeyError(id)
        lists, row = self._lists[self._part[position]], self._row[position]
        lists.prefetch([int(np.searchsorted(lists.offsets, row, side="right")) - 1])
        return np.array(lists.vectors[row])

    def typical(self, anchor: int, k: int) -> Columns:
        """The items of an anchor's list that are nearest to it."""
        vector = self.snapshot.anchors.vectors[anchor : anchor + 1]
        [columns] = self.snapshot.scan(vector, k, [np.array([anchor])])
        return columns

    def spread(self, count: int) -> np.ndarray:
        """At most so many items, as evenly from all labels as they allow, always the same ones."""
        if len(self) <= count:
            return np.arange(len(self))
        # Each label's first items come first, then each label's second …
        shuffled = np.random.default_rng(0).permutation(len(self))
        by_label = shuffled[np.argsort(self.labels[shuffled], kind="stable")]
        labels = self.labels[by_label]
        starts = np.flatnonzero(np.concatenate([[True], labels[1:] != labels[:-1]]))
        turn = np.arange(len(self)) - np.repeat(starts, np.diff([*starts, len(self)]))
        return np.sort(by_label[np.argsort(turn, kind="stable")[:count]])


def shown_name(path: str | None) -> str | None:
    """The last part of a path: where a server keeps its files is nobody's business. Uploads have no name."""
    if path is None or PurePath(path).parent.name == UPLOADS:
        return None
    return PurePath(path).name
