"""The gallery in two dimensions: drawn when first asked for, and kept while the anchors stay the same."""

from __future__ import annotations

import threading
from http import HTTPStatus

import numpy as np

from kedge.gallery.anchors import Anchors
from kedge.serving.catalogue import Catalogue
from kedge.serving.errors import Refused
from kedge.serving.layout import Layout

__all__ = ["MAX_ANCHORS", "Maps"]

MAX_ANCHORS = 2000
"""A map of more takes too long to draw, and cannot be read."""
_SAMPLE = 4000
"""So many items say how the map is laid out."""


class Maps:
    """Makes maps, one at a time."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._layout: Layout | None = None
        self._anchors: Anchors | None = None

    def layout(self, catalogue: Catalogue) -> Layout:
        """How these items lie; new items do not move the old ones."""
        anchors = catalogue.snapshot.anchors
        if len(anchors) > MAX_ANCHORS:
            raise Refused(
                HTTPStatus.UNPROCESSABLE_ENTITY,
                f"There is a map of up to {MAX_ANCHORS:,} anchors; this gallery has {len(anchors):,}.",
            )
        with self._mutex:
            if self._layout is None or self._anchors is None or not _same(self._anchors, anchors):
                sample = catalogue.spread(_SAMPLE)
                self._layout = Layout.of(anchors.vectors, catalogue.vectors(sample), catalogue.homes[sample])
                self._anchors = anchors
            return self._layout

    def place(self, vector: np.ndarray) -> tuple[float, float] | None:
        """Where a query lies; None before there is a map."""
        layout = self._layout
        if layout is None:
            return None
        x, y = layout.place(vector[None])[0].tolist()
        return x, y


def _same(one: Anchors, other: Anchors) -> bool:
    """Whether a map of one is a map of the other: those with a name may move a little, the others have only a place."""
    if one.names != other.names:
        return False
    return None not in one.names or np.array_equal(one.vectors, other.vectors)
