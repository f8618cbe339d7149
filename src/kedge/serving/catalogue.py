"""What a server shows of one version of a gallery: its items as a flat list, and the image files that may be read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from starlette.exceptions import HTTPException

from kedge.errors import ConfigError
from kedge.gallery.result import Hit, described
from kedge.gallery.snapshot import Items

__all__ = ["UPLOADS", "Catalogue", "ImageFiles", "shown_name"]

UPLOADS = "uploads"
"""The folder in a gallery for uploaded images."""


class Catalogue(Items):
    """The items of a snapshot in order of their ids: what is counted, listed and drawn."""

    @cached_property
    def label_counts(self) -> np.ndarray:
        """How many items each of `label_names` has."""
        return np.bincount(self.labels[self.labels >= 0], minlength=len(self.label_names))

    def vector(self, id: int) -> np.ndarray:
        """The embedding of one item, compared with its checksums."""
        position = int(np.searchsorted(self.ids, id))
        if position == len(self) or self.ids[position] != id:
            raise HTTPException(404, f"There is no item {id}.")
        return self.vectors(np.array([position])).reshape(-1)

    def typical(self, anchor: int, k: int) -> list[Hit]:
        """The items of an anchor's list that are nearest to it."""
        vector = self.snapshot.anchors.vectors[anchor : anchor + 1]
        [nearest] = self.snapshot.scan(vector, k, [np.array([anchor])])
        return [Hit(*row) for row in zip(*described(nearest), strict=True)]

    def spread(self, count: int) -> np.ndarray:
        """At most so many items, as evenly from all labels as they allow, always the same ones."""
        import pandas as pd

        if len(self) <= count:
            return np.arange(len(self))
        # Each label's first items come first, then each label's second …
        shuffled = np.random.default_rng(0).permutation(len(self))
        turn = pd.Series(shuffled).groupby(self.labels[shuffled]).cumcount()
        return np.sort(shuffled[np.argsort(turn.to_numpy(), kind="stable")[:count]])


class ImageFiles:
    """Allow-list of image files, since a gallery's table can name any: those below named folders, and uploads."""

    def __init__(self, gallery: Path, folders: Sequence[Path]) -> None:
        for folder in folders:
            if not folder.is_dir():
                raise ConfigError(f"--images must be a folder of this machine, found {folder}.")
        # Whoever made the gallery may have made its uploads a link to anywhere, so that only the gallery is resolved.
        self._folders = [gallery.resolve() / UPLOADS, *(folder.resolve() for folder in folders)]

    def find(self, path: str | None) -> Path | None:
        """The file at a path of the table; None unless it lies, links followed, in one of the folders."""
        if path is None:
            return None
        try:
            file = Path(path).resolve()
            is_shown = any(file.is_relative_to(folder) for folder in self._folders) and file.is_file()
        except (OSError, ValueError):  # a path that no file can have
            return None
        return file if is_shown else None


def shown_name(path: str | None) -> str | None:
    """The last part of a path: where a server keeps its files is nobody's business. Uploads have no name."""
    if path is None:
        return None
    # Every hit of every answer has one: PurePath takes ten times as long.
    folder, name = os.path.split(path.rstrip("/"))
    return None if os.path.basename(folder) == UPLOADS else name  # noqa: PTH119
