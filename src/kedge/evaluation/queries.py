"""Query images from class folders, embedded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from unicodedata import normalize

import numpy as np
import torch
from torch import Tensor

from kedge.datasets.digests import file_digests
from kedge.errors import ConfigError, DataError
from kedge.images import list_classes
from kedge.model import Model
from kedge.model.features import file_features

__all__ = ["FolderQueries", "spread"]


def spread(count: int, limit: int | None) -> np.ndarray:
    """At most `limit` of so many rows, spread evenly; all of them for None."""
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}; give at least 1, or None for every query.")
    return np.arange(count) if limit is None or limit >= count else np.arange(limit) * count // limit


@dataclass(frozen=True)
class FolderQueries:
    """The images of class folders: a label, embedding, features and a digest of the content (SHA-256) for each."""

    labels: list[str]
    embeddings: Tensor
    features: Tensor
    digests: list[str]
    skipped: list[tuple[str, str]]
    """Path and reason of every image that is left out."""

    @classmethod
    def read(cls, model: Model, folder: str | Path, known: set[str], *, limit: int | None = None) -> FolderQueries:
        """Of each class folder in `folder`; those whose class is not one of the `known` are left out."""
        classes, files, numbers = list_classes(folder)
        if not classes:
            raise DataError(f"{folder} has no class folders: put the images of each class in a folder of its name.")
        # Systems differ in how they spell the names of folders.
        spelled = {normalize("NFC", name): name for name in known}
        labels = [spelled.get(normalize("NFC", name)) for name in classes]
        if not any(labels):
            names = ", ".join(classes[:3]) + (", …" if len(classes) > 3 else "")
            raise DataError(
                f"None of the classes in {folder} ({names}) is among the {len(known):,} to search: "
                "name the folders as the classes are named."
            )
        labelled = [(str(file), labels[number]) for file, number in zip(files, numbers, strict=True)]
        reason = "is of a class that is not among those to search."
        skipped = [(file, reason) for file, label in labelled if label is None]
        asked = [(file, label) for file, label in labelled if label is not None]
        asked = [asked[row] for row in spread(len(asked), limit)]
        features, unreadable = file_features(model, [file for file, _ in asked], title="queries")
        skipped += [(asked[row][0], reason) for row, reason in unreadable.items()]
        rows = [row for row in range(len(asked)) if row not in unreadable]
        if not rows:
            raise DataError(f"None of the {len(asked):,} images in {folder} can be read; the last one {skipped[-1][1]}")
        embeddings = torch.cat([model.embed_features(part).float() for part in torch.split(features[rows], 4096)])
        digests = file_digests([asked[row][0] for row in rows])
        return cls([asked[row][1] for row in rows], embeddings, features[rows], digests, skipped)
