"""The newest state of a gallery as something that can be searched: lists on disk, a tail in memory."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from kedge.gallery.anchors import Anchors, extend_anchors, settle_anchors
from kedge.gallery.lists import Lists, open_lists, write_lists
from kedge.gallery.precision import Precision
from kedge.gallery.record import Record, embeddings_of
from kedge.gallery.search import Part, Snapshot

__all__ = ["LOCK", "View"]

LOCK = "writer.lock"
_FRESH_SECONDS = 0.001
_TAIL = 10_000
"""With more new rows than this, the lists are written anew before the next search."""


class View:
    """Looks at a record through its lists, and has them written when they are missing or far behind.

    The record is its own, apart from the one that a writer of the same process moves on.
    """

    def __init__(
        self,
        folder: Path,
        dim: int,
        *,
        learned: np.ndarray | None,
        classes: Sequence[str],
        by_label: bool,
        precision: Precision,
    ) -> None:
        self.precision = precision
        self._folder = folder
        self._record = Record(folder, dim)
        self._learned = learned
        self._classes = classes
        self._by_label = by_label
        self._mutex = threading.RLock()
        self._snapshot: Snapshot | None = None
        self._looked = -math.inf

    def newest(self) -> Snapshot:
        """The newest state, at most a millisecond old; it stays what it is, whatever writers do meanwhile."""
        now = time.monotonic()
        known = self._snapshot
        if known is not None and now - self._looked < _FRESH_SECONDS:
            return known
        with self._mutex:
            version = self._record.refresh()
            if self._snapshot is None or self._snapshot.version != version:
                self._snapshot = self._look()
            self._looked = now
            return self._snapshot

    def look_again(self) -> None:
        """Ask the record at the next call, however soon it comes: something was written here."""
        with self._mutex:
            self._looked = -math.inf

    def write_lists(self, record: Record) -> None:
        """Write the lists for what `record` holds now. Whoever calls must hold the gallery's lock."""
        anchors = settle_anchors(record, self._learned, self._classes)
        write_lists(self._folder / "lists", record, anchors, by_label=self._by_label, precision=self.precision)
        with self._mutex:
            self._snapshot = None

    def masks(self, snapshot: Snapshot, where: str | None) -> list[np.ndarray | None]:
        """Which rows of each part count."""
        if where is None:
            return [part.alive for part in snapshot.parts]
        wanted = self._record.ids_where(where, snapshot.version)
        masks: list[np.ndarray | None] = []
        for part in snapshot.parts:
            mask = np.isin(part.lists.ids, wanted, assume_unique=True)
            masks.append(mask if part.alive is None else mask & part.alive)
        return masks

    def _look(self) -> Snapshot:
        ids = np.asarray(self._record.columns(["id"]).column("id"))
        opened = open_lists(self._folder / "lists")
        if opened is None or len(np.setdiff1d(ids, opened[0].ids, assume_unique=True)) > _TAIL:
            opened = self._renewed() or opened
        if opened is None:
            # A writer is at work, or there is no room: until then, everything is searched from memory.
            anchors = settle_anchors(self._record, self._learned, self._classes)
            opened = Lists.empty(self._record.dim, len(anchors)), anchors
        lists, anchors = opened
        alive = np.isin(lists.ids, ids, assume_unique=True)
        new = np.setdiff1d(ids, lists.ids, assume_unique=True)
        parts = [Part(lists, None if alive.all() else alive)]
        if len(new):
            tail, anchors = self._tail(new, anchors)
            parts.append(Part(tail))
        return Snapshot(self._record.version, anchors, tuple(parts))

    def _renewed(self) -> tuple[Lists, Anchors] | None:
        try:
            with FileLock(self._folder / LOCK, timeout=0):
                self.write_lists(self._record)
        except (Timeout, OSError):
            return None
        return open_lists(self._folder / "lists")

    def _tail(self, new: np.ndarray, anchors: Anchors) -> tuple[Lists, Anchors]:
        table = self._record.columns(["id", "path", "label", "embedding"], f"id >= {int(new.min())}")
        table = table.filter(np.isin(np.asarray(table.column("id")), new)).sort_by("id")
        embeddings, labels = embeddings_of(table, self._record.dim), table.column("label").to_pylist()
        anchors = extend_anchors(anchors, embeddings, labels)
        homes = anchors.assign(embeddings, labels, by_label=self._by_label)
        ids = np.asarray(table.column("id"))
        return Lists.in_memory(homes, len(anchors), ids, embeddings, labels, table.column("path").to_pylist()), anchors
