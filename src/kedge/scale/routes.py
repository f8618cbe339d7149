"""The anchors that an index of the record was built with, kept beside it under the name of that index."""

from __future__ import annotations

import hashlib
import io
from typing import Any

import numpy as np

from kedge.gallery import Gallery
from kedge.gallery.anchors import Anchors
from kedge.gallery.place import Place
from kedge.io import Folder

__all__ = ["Routes", "indexed", "place_of_all", "record_at"]

_PREFIX = "anchors_"
_FOLDER = "index"


def place_of_all(gallery: Gallery) -> Place:
    """Where every worker finds the gallery, whatever folder it runs in."""
    place = gallery.place
    return place if place.address else Place(place.folder.absolute())


def record_at(gallery: Gallery) -> str:
    """Where Lance finds the record."""
    return place_of_all(gallery).record


def indexed(dataset: Any) -> dict[str, set[int]]:
    """The indices over anchors that a record has, and which of its fragments each one knows."""
    return {
        index.name: {int(one) for segment in index.segments for one in segment.fragment_ids}
        for index in dataset.describe_indices()
        if index.name.startswith(_PREFIX)
    }


class Routes:
    """Anchors by the name of the index that was built with them."""

    def __init__(self, gallery: Gallery) -> None:
        self._files = Folder(str(gallery.place))

    def keep(self, anchors: Anchors) -> str:
        """Keep anchors; the name for their index."""
        stream = io.BytesIO()
        np.savez(
            stream,
            vectors=anchors.vectors,
            names=np.array([name or "" for name in anchors.names], dtype=np.str_),
            named=np.array([name is not None for name in anchors.names]),
            learned=anchors.learned,
        )
        name = _PREFIX + hashlib.sha256(stream.getvalue()).hexdigest()[:16]
        self._files.write(f"{_FOLDER}/{name}.npz", stream.getvalue())
        return name

    def read(self, name: str) -> Anchors | None:
        """The anchors of an index; None if they are gone."""
        content = self._files.read(f"{_FOLDER}/{name}.npz")
        if content is None:
            return None
        with np.load(io.BytesIO(content), allow_pickle=False) as kept:
            names = zip(kept["names"].tolist(), kept["named"].tolist(), strict=True)
            return Anchors(
                kept["vectors"], tuple(name if named else None for name, named in names), int(kept["learned"])
            )

    def forget_all_but(self, name: str) -> None:
        """Remove the anchors of every other index."""
        for file in self._files.names(_FOLDER):
            if file != f"{name}.npz":
                self._files.remove_file(f"{_FOLDER}/{file}")
