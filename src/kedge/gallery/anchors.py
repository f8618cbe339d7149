"""The anchors that route a gallery: learned ones, means of labels the model never saw, k-means centres."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kedge.gallery.crew import read_together
from kedge.gallery.record import Record, embeddings_of

__all__ = ["Anchors", "settle_anchors"]

_SAMPLE = 50_000
_ROUNDS = 10
_MOST_CENTRES = 1024


@dataclass(frozen=True)
class Anchors:
    """One row per list. `names` are labels; None for a centre that stands for no label."""

    vectors: np.ndarray
    names: tuple[str | None, ...]
    learned: int
    """The first so many were learned with the encoder; the others follow the items."""

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
        places = {name: row for row, name in enumerate(self.names) if name is not None}
        kept = [places.get(label, -1) if label is not None else -1 for label in labels]
        lists = np.array(kept, dtype=np.int32).reshape(-1)
        if not by_label:
            lists[lists < self.learned] = -1
        open_rows = np.flatnonzero(lists < 0)
        for start in range(0, len(open_rows), 4096):
            rows = open_rows[start : start + 4096]
            lists[rows] = self.nearest(embeddings[rows], 1)[:, 0]
        return lists


def settle_anchors(record: Record, learned: np.ndarray | None, classes: Sequence[str]) -> Anchors:
    """The anchors for what the record holds now."""
    vectors = [] if learned is None else [learned]
    means, names = _means(_labelled(record), known=set(classes) if learned is not None else set())
    vectors += [means] if len(means) else []
    count = 0 if learned is None else len(learned)
    if vectors:
        known: tuple[str | None, ...] = tuple(classes[:count])
        together = np.ascontiguousarray(np.concatenate(vectors), dtype=np.float32)
        return Anchors(together, (*known, *names), count)
    centres = _centres(record)
    return Anchors(centres, (None,) * len(centres), 0)


def extend_anchors(anchors: Anchors, embeddings: np.ndarray, labels: Sequence[str | None]) -> Anchors:
    """The anchors with those labels added that `anchors` does not have yet."""
    known = {name for name in anchors.names if name is not None}
    means, names = _means([(embeddings, labels)], known=known)
    if not names:
        return anchors
    return Anchors(np.concatenate([anchors.vectors, means]), (*anchors.names, *names), anchors.learned)


def _labelled(record: Record) -> Iterable[tuple[np.ndarray, Sequence[str | None]]]:
    for batch in record.batches(["label", "embedding"], "label IS NOT NULL"):
        yield embeddings_of(batch, record.dim), batch.column("label").to_pylist()


def _means(
    batches: Iterable[tuple[np.ndarray, Sequence[str | None]]], *, known: set[str]
) -> tuple[np.ndarray, list[str]]:
    """The mean embedding of every label that is not known, in the order they appear."""
    sums: dict[str, np.ndarray] = {}
    counts: dict[str, int] = {}
    for embeddings, labels in batches:
        column = np.array([label if label is not None and label not in known else "" for label in labels], dtype=object)
        for name in dict.fromkeys(column.tolist()):
            if name:
                rows = column == name
                sums[name] = sums.get(name, 0) + embeddings[rows].sum(0, dtype=np.float64)
                counts[name] = counts.get(name, 0) + int(rows.sum())
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
    centres = sample[np.sort(chance.choice(len(sample), count, replace=False))]
    for _ in range(_ROUNDS):
        places = Anchors(centres, (None,) * count, 0).assign(sample, [None] * len(sample), by_label=False)
        sizes = np.bincount(places, minlength=count)
        sums = np.zeros((count, record.dim))
        np.add.at(sums, places, sample)
        # A centre that lost all its items stays where it is.
        centres = np.where(sizes[:, None] > 0, sums / np.maximum(sizes, 1)[:, None], centres).astype(np.float32)
    return centres
