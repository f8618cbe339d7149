"""The items of one version of a gallery by row, and their nearest neighbours by looks, in bounded memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from rich.progress import track

from kedge.audit.report import Finding, Kind
from kedge.console import stderr
from kedge.errors import ImageError
from kedge.gallery import Gallery
from kedge.gallery.anchors import EXACT_ITEMS
from kedge.gallery.snapshot import Items as GalleryItems
from kedge.images import prefetch, read_image
from kedge.images.phash import perceptual_hash

__all__ = ["Items", "Neighbours", "find_neighbours"]

_MAX_NUMBERS = 1 << 22
"""That are held at once beside the vectors."""
_LISTS = 2
"""In a large gallery an item is compared with those of its nearest lists only."""
_QUERIES, _BLOCK = 1024, 4096
"""Vectors that are compared at once."""


class Items(GalleryItems):
    """Rows 0 … n − 1 are what the gallery holds now; a few numbers for each are in memory, its vector is not.

    Vectors are the embeddings or, with `looks`, the features.
    """

    def __init__(self, gallery: Gallery, *, looks: bool) -> None:
        super().__init__(gallery.verified_snapshot(looks=looks), by_id=False)
        self._gallery = gallery
        self.anchors = self.snapshot.anchors

    def blocks(self, rows: np.ndarray, numbers: int = 1024) -> Iterator[tuple[slice, np.ndarray]]:
        """The vectors of some rows, so many at a time that as many times `numbers` fit in memory."""
        size = max(1, _MAX_NUMBERS // numbers)
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            yield part, self.vectors(rows[part])

    @cached_property
    def contents(self) -> np.ndarray:
        """16 bytes per item that are the same for the same content: of its hash or, without one, of its vector."""
        keys, hashed = np.empty((len(self), 2), np.uint64), np.zeros(len(self), bool)
        for rows, digests in self._column("hash"):
            keys[rows] = [_digest(digest.encode()) for digest in digests]
            hashed[rows] = True
        others = np.flatnonzero(~hashed)
        for part, vectors in self.blocks(others):
            vectors += 0.0  # -0 is 0
            keys[others[part]] = [_digest(vector.tobytes()) for vector in vectors]
        return keys

    @cached_property
    def perceptual_hashes(self) -> np.ndarray:
        """63 bits per image, of its thumbnail or file; -1 where neither is there, and for an image of one colour."""
        hashes, hashed = np.full(len(self), -1, np.int64), np.zeros(len(self), bool)
        for rows, contents in self._column("thumbnail"):
            hashes[rows], hashed[rows] = list(prefetch(_hash, contents)), True
        others = np.flatnonzero(~hashed)
        console = stderr()
        bar: dict[str, Any] = {"console": console, "transient": True, "disable": not console.is_terminal}
        files = (self.describe(row)[0] for row in others.tolist())
        hashes[others] = list(track(prefetch(_hash, files), "reading images", len(others), **bar))
        return np.where(hashes == 0, -1, hashes)

    def _column(self, name: str) -> Iterator[tuple[np.ndarray, list[Any]]]:
        """Values of a column with their rows, where there are any."""
        if name not in self._gallery.columns:
            return
        order = np.argsort(self.ids)
        for batch in self._gallery.batches(["id", name]):
            batch = batch.filter(batch.column(name).is_valid())
            ids = np.asarray(batch.column("id"))
            rows = order[np.searchsorted(self.ids, ids, sorter=order).clip(max=len(order) - 1)]
            there = self.ids[rows] == ids  # the table may hold newer items than this version
            if there.any():
                yield rows[there], batch.filter(there).column(name).to_pylist()

    def finding(self, kind: Kind, row: int, score: float, distance: float, **others: Any) -> Finding:
        """Something about the item in a row."""
        path, label = self.describe(row)
        return Finding(kind, int(self.ids[row]), path, label, float(score), float(distance), **others)


def _hash(image: str | bytes | None) -> int:
    """The perceptual hash of a file or of its content; -1 where it cannot be read."""
    with suppress(ImageError):
        return -1 if image is None else perceptual_hash(read_image(image))
    return -1


def _digest(content: bytes) -> np.ndarray:
    return np.frombuffer(hashlib.blake2b(content, digest_size=16).digest(), np.uint64)


# ---------------------------------------------------------------------- neighbours


@dataclass(frozen=True)
class Neighbours:
    """The nearest rows of a pool to each row, nearest first; -1 and infinity where there are no more."""

    rows: np.ndarray
    distances: np.ndarray


def find_neighbours(queries: Items, asking: np.ndarray, pool: Items, members: np.ndarray, count: int) -> Neighbours:
    """The `count` nearest of `members`, rows of `pool`, to each of `asking`, rows of `queries`; itself left out."""
    nearest = np.full((len(queries), count), -1)
    scores = np.full((len(queries), count), np.inf, np.float32)
    if not len(members):
        return Neighbours(nearest, scores.astype(np.float64))
    # Around their mean the numbers are small, so that fewer digits are lost.
    centre = pool.vectors(members[:_BLOCK]).mean(axis=0)
    for group, candidates in _groups(queries, asking, pool, members):
        for start in range(0, len(group), _QUERIES):
            block = group[start : start + _QUERIES]
            points = queries.vectors(block) - centre
            for first in range(0, len(candidates), _BLOCK):
                part = candidates[first : first + _BLOCK]
                vectors = pool.vectors(part) - centre
                found = np.einsum("ij,ij->i", vectors, vectors) - 2 * (points @ vectors.T)
                if queries is pool:
                    found[block[:, None] == part] = np.inf
                both = np.concatenate([scores[block], found], axis=1)
                kept = np.argpartition(both, count - 1, axis=1)[:, :count]
                names = np.concatenate([nearest[block], np.broadcast_to(part, found.shape)], axis=1)
                nearest[block] = np.take_along_axis(names, kept, 1)
                scores[block] = np.take_along_axis(both, kept, 1)
    nearest[np.isinf(scores)] = -1
    return _exactly(queries, asking, pool, nearest)


def _groups(
    queries: Items, asking: np.ndarray, pool: Items, members: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows that ask, and those that are compared with them; no pair comes twice."""
    if len(members) <= EXACT_ITEMS:
        yield asking, members
        return
    homes, probes = _nearest_lists(pool, members, pool, 1)[:, 0], _nearest_lists(queries, asking, pool, _LISTS)
    for number in np.unique(homes).tolist():
        yield asking[(probes == number).any(axis=1)], members[homes == number]


def _nearest_lists(items: Items, rows: np.ndarray, pool: Items, count: int) -> np.ndarray:
    anchors = pool.anchors
    return np.concatenate([anchors.nearest(vectors, count) for _, vectors in items.blocks(rows, len(anchors))])


def _exactly(queries: Items, asking: np.ndarray, pool: Items, nearest: np.ndarray) -> Neighbours:
    """Distances by differences, and the neighbours in their order."""
    distances = np.full(nearest.shape, np.inf)
    for start in range(0, len(asking), _QUERIES):
        block = asking[start : start + _QUERIES]
        rows, there = nearest[block], nearest[block] >= 0
        gaps = pool.vectors(rows[there]) - queries.vectors(np.repeat(block, there.sum(axis=1)))
        own = distances[block]
        own[there] = np.linalg.norm(gaps, axis=1)
        distances[block] = own
    order = np.argsort(distances, axis=1, kind="stable")
    return Neighbours(np.take_along_axis(nearest, order, 1), np.take_along_axis(distances, order, 1))
