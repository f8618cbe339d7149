"""One version of a gallery as a list of items: what is counted, listed and drawn."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath

import numpy as np

from kedge.gallery.items import Items
from kedge.gallery.search import Columns

__all__ = ["UPLOADS", "Catalogue", "Listed", "shown_name"]

UPLOADS = "uploads"
"""The folder in a gallery for the pictures that were sent to it."""


@dataclass(frozen=True)
class Listed:
    """An item of the catalogue."""

    id: int
    path: str | None
    label: str | None


class Catalogue(Items):
    """The items of a snapshot in order of their ids."""

    @property
    def names(self) -> list[str]:
        """All labels, sorted."""
        return self.label_names

    @cached_property
    def counts(self) -> np.ndarray:
        """How many items each label has."""
        return np.bincount(self.labels[self.labels >= 0], minlength=len(self.names))

    @cached_property
    def held(self) -> np.ndarray:
        """How many items each anchor's list holds."""
        return self.snapshot.list_sizes()

    @property
    def homes(self) -> np.ndarray:
        """The anchor of each item's list."""
        return self.lists

    def listed(self, places: np.ndarray) -> list[Listed]:
        """Some items."""
        return [Listed(int(self.ids[place]), *self.describe(place)) for place in places.tolist()]

    def typical(self, anchor: int, k: int) -> Columns:
        """The items of an anchor's list that are nearest to it."""
        vector = self.snapshot.anchors.vectors[anchor : anchor + 1]
        [found] = self.snapshot.scan(vector, k, [np.array([anchor])])
        return found

    def spread(self, most: int) -> np.ndarray:
        """At most so many items, as evenly from all labels as they allow, always the same ones."""
        if len(self) <= most:
            return np.arange(len(self))
        # Each label's first items come first, then each label's second …
        chance = np.random.default_rng(0).permutation(len(self))
        by_label = chance[np.argsort(self.labels[chance], kind="stable")]
        own = self.labels[by_label]
        starts = np.flatnonzero(np.concatenate([[True], own[1:] != own[:-1]]))
        turn = np.arange(len(self)) - np.repeat(starts, np.diff([*starts, len(self)]))
        return np.sort(by_label[np.argsort(turn, kind="stable")[:most]])


def shown_name(path: str | None) -> str | None:
    """The last part of a path: where a server keeps its files is nobody's business. Uploads have no name."""
    if path is None or PurePath(path).parent.name == UPLOADS:
        return None
    return PurePath(path).name
