"""How well a gallery is searched: its labelled items among themselves, or the images of class folders against it."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from rich.console import RenderableType
from rich.progress import track

from kedge.console import stderr
from kedge.errors import ConfigError, DataError
from kedge.evaluation.classes import ClassScores, score_classes
from kedge.evaluation.queries import FolderQueries, spread
from kedge.evaluation.report import BaseReport, left_out_note
from kedge.model.io import kedge_version

if TYPE_CHECKING:
    from kedge.gallery import Gallery
    from kedge.gallery.gallery import Method

__all__ = ["GalleryReport", "evaluate_gallery"]

_DEPTH = 100
"""Hits of each search that are judged."""
_BATCH = 256
"""Queries that are searched together."""
METRICS = (f"mAP@{_DEPTH}", "P@1", "P@20")


@dataclass(frozen=True)
class GalleryReport(BaseReport):
    """The scores of searches in a gallery, two-stage and by brute force: mAP@100, P@1 and P@20.

    mAP@100 is the mean of the average precision of the first 100 hits, of which as many as can be relevant count.
    """

    methods: ClassVar[tuple[str, ...]] = ("two_stage", "brute_force")

    two_stage: dict[str, float]
    brute_force: dict[str, float]
    queries: int
    left_out: int
    meta: dict[str, Any] = field(default_factory=dict)
    classes: ClassScores | None = field(default=None, compare=False, repr=False)
    """Scores of each class and the confusion matrix, in which a query's predicted class is that of its first hit."""

    def __rich__(self) -> RenderableType:
        source = "its own items" if self.meta["against"] is None else self.meta["against"]
        notes = [f"{self.queries:,} queries from {source}", *left_out_note(self.left_out)]
        if self.meta["in_gallery"]:
            notes.append(f"{self.meta['in_gallery']:,} of them are items of the gallery, left out of their own hits")
        elif self.meta["trained"] and self.meta["against"] is None:
            notes.append("items that the model was trained on score higher than new images do")
        return self._score_table(f"{self.meta['gallery']} · {self.meta['items']:,} items", *notes)


class _Query(NamedTuple):
    """A query, and the item that it is itself, which is left out of its results."""

    label: str
    embedding: np.ndarray
    features: np.ndarray | None
    item: int | None


def evaluate_gallery(gallery: Gallery, against: str | Path | None = None, *, limit: int | None = None) -> GalleryReport:
    """Search a gallery as users do (`rank="auto"`), two-stage and by brute force, and count hits of the query's label.

    The queries are the gallery's own items that have a label, or the images of class folders in `against`. A query that
    is an item, by its id or its content, is not among its own hits. `limit` takes that many queries, spread evenly.
    Items that the model was trained on are found more easily than new images are.
    """
    started = time.perf_counter()
    labels, items_by_digest = _labels_and_digests(gallery)
    counts = Counter(label for label in labels.values() if label is not None)
    if not counts:
        raise DataError(f"{gallery.location} has no items with a label, so no hit can be right: add some with labels.")
    skipped: list[tuple[str, str]] = []
    if against is None:
        ids = sorted(id for id, label in labels.items() if label is not None)
        queries = _items(gallery, {ids[row]: str(labels[ids[row]]) for row in spread(len(ids), limit)})
    elif gallery.model is None:
        raise ConfigError(f"{gallery.location} has no model for other images: evaluate it with its own items.")
    else:
        read = FolderQueries.read(gallery.model, against, set(counts), limit=limit)
        skipped, embeddings = read.skipped, read.embeddings.cpu().numpy()
        features = read.features.numpy() if gallery.features else [None] * len(embeddings)
        items = map(items_by_digest.get, read.digests)
        queries = list(map(_Query, read.labels, embeddings, features, items))
    relevant = np.array([counts[label] - (item is not None and labels[item] == label) for label, *_, item in queries])
    judged = relevant > 0
    if not judged.any():
        raise DataError(f"No other item of {gallery.location} has the label of a query: add more items for each label.")
    scores, first_labels = _search(gallery, queries, relevant)
    numbers = {name: number for number, name in enumerate(sorted(counts))}
    classes = score_classes(
        list(numbers),
        np.array([numbers[query.label] for query in queries]),
        np.array([-1 if label is None else numbers.get(label, -1) for label in first_labels]),
        np.array([numbers[label] for label in labels.values() if label is not None]),
        {name: scores["brute_force"][:, METRICS.index(name)] for name in (METRICS[0], METRICS[2])},
        relevant,
    )
    meta = {
        "gallery": str(gallery.location),
        "items": len(labels),
        "against": None if against is None else str(against),
        "model": None if gallery.model is None else gallery.model.encoder_name,
        "model_fingerprint": None if gallery.model is None else gallery.model.fingerprint,
        "skipped": skipped,
        "trained": bool(gallery.classes),
        "in_gallery": 0 if against is None else sum(query.item is not None for query in queries),
        "versions": {"kedge": kedge_version()},
        "seconds": round(time.perf_counter() - started, 2),
    }
    means = (values[judged].mean(axis=0).tolist() for values in scores.values())
    two_stage, brute_force = (dict(zip(METRICS, of_method, strict=True)) for of_method in means)
    return GalleryReport(two_stage, brute_force, len(queries), int((~judged).sum()), meta, classes)


def _search(
    gallery: Gallery, queries: list[_Query], relevant: np.ndarray
) -> tuple[dict[Method, np.ndarray], list[str | None]]:
    """The scores of each query under both methods, and the label of its first hit in two stages."""
    methods: tuple[Method, Method] = ("two_stage", "brute_force")
    scores: dict[Method, np.ndarray] = {method: np.zeros((len(queries), len(METRICS))) for method in methods}
    first_labels: list[str | None] = [None] * len(queries)
    # Those of a batch are alike: all of them, or none, have features, and are items of the gallery.
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for row, query in enumerate(queries):
        kinds.setdefault((query.features is None, query.item is None), []).append(row)
    batches = [rows[start : start + _BATCH] for rows in kinds.values() for start in range(0, len(rows), _BATCH)]
    snapshot, console = gallery.snapshot(), stderr()
    for rows in track(batches, "searching", console=console, transient=True, disable=not console.is_terminal):
        batch = [queries[row] for row in rows]
        features = [query.features for query in batch if query.features is not None]
        for method in methods:
            results = gallery.search_embeddings(
                np.stack([query.embedding for query in batch]),
                _DEPTH,
                method,
                features=np.stack(features) if features else None,
                exclude_id=[query.item for query in batch if query.item is not None] or None,
                snapshot=snapshot,
            )
            for row, query, result in zip(rows, batch, results, strict=True):
                hits = [hit.label for hit in result]
                right = np.array([label == query.label for label in hits], bool)
                scores[method][row] = _judge(right, int(relevant[row]))
                if method == "two_stage":
                    first_labels[row] = hits[0] if hits else None
    return scores, first_labels


def _judge(right: np.ndarray, relevant: int) -> tuple[float, float, float]:
    """The scores of one result, by `METRICS`; `right` says of each hit whether it is relevant."""
    precision = np.cumsum(right) / np.arange(1, len(right) + 1)
    average = float(precision[right].sum()) / max(1, min(relevant, _DEPTH))
    return average, float(right[:1].sum()), float(right[:20].sum() / 20)


def _labels_and_digests(gallery: Gallery) -> tuple[dict[int, str | None], dict[str, int]]:
    """The label of every item, and the items by the digest of their content."""
    labels: dict[int, str | None] = {}
    items: dict[str, int] = {}
    for batch in gallery.batches(["id", "label", "hash"]):
        ids, names, digests = (batch.column(name).to_pylist() for name in ("id", "label", "hash"))
        labels.update(zip(ids, names, strict=True))
        items.update(zip(digests, ids, strict=True))
    return labels, items


def _items(gallery: Gallery, labels: dict[int, str]) -> list[_Query]:
    """Items as queries, in order of their ids."""
    from kedge.gallery.schema import vectors_of

    queries = []
    for batch in gallery.batches(["id", "embedding", *(["features"] if gallery.features else [])]):
        embeddings = vectors_of(batch)
        features = vectors_of(batch, "features") if gallery.features else None
        for row, id in enumerate(batch.column("id").to_pylist()):
            if id in labels:
                # Features of zeros: the item came without any.
                own = None if features is None or not features[row].any() else features[row].copy()
                queries.append(_Query(labels[id], embeddings[row].copy(), own, id))
    return sorted(queries, key=lambda query: query.item or 0)
