"""The anchors that route a gallery: learned ones, means of labels the model never saw, k-means centres."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from kedge.gallery.anchor_index import MANY, AnchorIndex
from kedge.gallery.crew import read_together
from kedge.gallery.kmeans import k_means
from kedge.gallery.labels import normalized
from kedge.gallery.record import Record, embeddings_of

__all__ = ["Anchors", "settle_anchors"]

_SAMPLE = 50_000
_ROUNDS = 10
_MOST_CENTRES = 1024
_BLOCK = 16384


@dataclass(frozen=True)
class Anchors:
    """One row per list. `names` are labels; None for a centre that stands for no label."""

    vectors: np.ndarray
    names: tuple[str | None, ...]
    learned: int
    """The first so many were learned with the encoder; the others follow the items."""
    index: AnchorIndex | None = None
    """The way to the nearest of very many; those that it does not hold are looked at one by one."""

    def __len__(self) -> int:
        return len(self.vectors)

    @cached_property
    def _squares(self) -> np.ndarray:
        squares: np.ndarray = np.einsum("ij,ij->i", self.vectors, self.vectors)
        return squares

    @cached_property
    def _halves(self) -> np.ndarray:
        return self._squares / 2

    def nearest(self, queries: np.ndarray, count: int) -> np.ndarray:
        """The `count` nearest anchors of each query, nearest first; ties by order."""
        if self.index is not None:
            return self._through_index(self.index, queries, count)[0]
        if len(queries) == 1:
            # Not the library of the matrix product: its threads would stay awake and in the way of the next step.
            scores = read_together(queries, self.vectors, "sqeuclidean", "float32")[None]
        else:
            # Half the squared distance, less what is the same for all anchors.
            scores = queries @ self.vectors.T
            np.subtract(self._halves, scores, out=scores)
        if count == 1:
            return np.asarray(scores.argmin(axis=1, keepdims=True))
        order: np.ndarray = np.argsort(scores, axis=1, kind="stable")
        return order[:, :count]

    def nearest_squares(self, queries: np.ndarray) -> np.ndarray:
        """The squared distance of each query to its nearest anchor."""
        if self.index is not None:
            return self._through_index(self.index, queries, 1)[1][:, 0]
        squares: np.ndarray = self.distances(queries).min(axis=1)
        return squares

    def _through_index(self, index: AnchorIndex, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        numbers, squares = index.nearest(queries, count)
        if len(index) == len(self):
            return numbers, squares
        # Those that came later are few.
        later = Anchors(self.vectors[len(index) :], self.names[len(index) :], 0).distances(queries)
        places = np.broadcast_to(np.arange(len(index), len(self)), later.shape)
        squares = np.concatenate([squares, later], axis=1)
        numbers = np.concatenate([numbers, places], axis=1)
        order = np.lexsort((numbers, squares), axis=1)[:, :count]
        return np.take_along_axis(numbers, order, 1), np.take_along_axis(squares, order, 1)

    def distances(self, queries: np.ndarray) -> np.ndarray:
        """Squared distances, queries × anchors."""
        found: np.ndarray = queries @ self.vectors.T
        found *= -2
        found += self._squares
        found += np.einsum("ij,ij->i", queries, queries)[:, None]
        np.maximum(found, 0, out=found)
        return found

    def assign(self, embeddings: np.ndarray, labels: Sequence[str | None], *, by_label: bool) -> np.ndarray:
        """The list of each item: that of its label, or of its nearest anchor.

        With `by_label` false, only labels that the model never saw keep a list of their own.
        """
        places = {normalized(name): row for row, name in enumerate(self.names) if name is not None}
        kept = [places.get(normalized(label), -1) if label is not None else -1 for label in labels]
        lists = np.array(kept, dtype=np.int32).reshape(-1)
        if not by_label:
            lists[lists < self.learned] = -1
        open_rows = np.flatnonzero(lists < 0)
        for start in range(0, len(open_rows), _BLOCK):
            rows = open_rows[start : start + _BLOCK]
            lists[rows] = self.nearest(embeddings[rows], 1)[:, 0]
        return lists


def settle_anchors(record: Record, learned: np.ndarray | None, classes: Sequence[str]) -> Anchors:
    """The anchors for what the record holds now."""
    vectors = [] if learned is None else [learned]
    means, names = _means(_labelled(record, set(classes) if learned is not None else set()))
    vectors += [means] if len(means) else []
    count = 0 if learned is None else len(learned)
    if vectors:
        known: tuple[str | None, ...] = tuple(classes[:count])
        together = np.ascontiguousarray(np.concatenate(vectors), dtype=np.float32)
        index = AnchorIndex.build(together) if len(together) >= MANY else None
        return Anchors(together, (*known, *names), count, index)
    centres = _centres(record)
    return Anchors(centres, (None,) * len(centres), 0)


def extend_anchors(anchors: Anchors, embeddings: np.ndarray, labels: Sequence[str | None]) -> Anchors:
    """The anchors with those labels added that `anchors` does not have yet."""
    known = {normalized(name) for name in anchors.names if name is not None}
    means, names = _means([(embeddings, _unknown_labels(labels, known))])
    if not names:
        return anchors
    return replace(anchors, vectors=np.concatenate([anchors.vectors, means]), names=(*anchors.names, *names))


def _unknown_labels(labels: Sequence[str | None], known: set[str]) -> list[str | None]:
    return [None if label is None or normalized(label) in known else normalized(label) for label in labels]


def _labelled(record: Record, known: set[str]) -> Iterable[tuple[np.ndarray, Sequence[str | None]]]:
    """Embeddings and labels of those rows whose label is not known; the other labels are None."""
    where, known = "label IS NOT NULL", set(map(normalized, known))
    if known:
        # Labels alone are quickly read, and most galleries have no other ones.
        seen = (label for batch in record.batches(["label"], where) for label in batch.column("label").unique())
        if all(normalized(label.as_py()) in known for label in seen):
            return
    for batch in record.batches(["label", "embedding"], where):
        yield embeddings_of(batch, record.dim), _unknown_labels(batch.column("label").to_pylist(), known)


def _means(batches: Iterable[tuple[np.ndarray, Sequence[str | None]]]) -> tuple[np.ndarray, list[str]]:
    """The mean embedding of every label, in the order they appear."""
    sums: dict[str, np.ndarray] = {}
    counts: dict[str, int] = {}
    for embeddings, labels in batches:
        places: dict[str, int] = {}
        homes = np.array([places.setdefault(label, len(places)) if label else -1 for label in labels], dtype=np.int64)
        rows = np.argsort(homes, kind="stable")
        rows = rows[np.searchsorted(homes[rows], 0) :]
        if not len(rows):
            continue
        starts = np.searchsorted(homes[rows], np.arange(len(places)))
        totals = np.add.reduceat(embeddings[rows], starts, axis=0, dtype=np.float64)
        for name, total, size in zip(places, totals, np.diff([*starts.tolist(), len(rows)]).tolist(), strict=True):
            sums[name] = sums.get(name, 0) + total
            counts[name] = counts.get(name, 0) + size
    names = list(sums)
    dim = len(next(iter(sums.values()))) if sums else 0
    means = np.array([sums[name] / counts[name] for name in names], dtype=np.float32).reshape(len(names), dim)
    return means, names


def _centres(record: Record) -> np.ndarray:
    """k-means centres of a sample, about as many as the square root of the items."""
    total = len(record)
    if total == 0:
        return np.zeros((1, record.dim), np.float32)
    chance = np.random.default_rng(0)
    share = min(1.0, _SAMPLE / total)
    parts = []
    for batch in record.batches(["embedding"]):
        rows = embeddings_of(batch, record.dim)
        parts.append(rows[chance.random(len(rows)) < share] if share < 1 else rows)
    sample = np.concatenate(parts).astype(np.float32)
    count = int(np.clip(round(np.sqrt(total)), 1, min(_MOST_CENTRES, len(sample))))
    return k_means(sample, count, rounds=_ROUNDS)
