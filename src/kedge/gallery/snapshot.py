"""The newest version of a gallery as a snapshot that can be searched: inverted lists on disk, a tail in memory."""

from __future__ import annotations

import logging
import math
import threading
import time
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from filelock import FileLock, Timeout

from kedge.errors import GalleryError
from kedge.gallery.anchors import Anchors, Space, anchors_of, extend_anchors
from kedge.gallery.inverted_lists import DamagedLists, InvertedLists, StoredLists, open_lists, write_lists
from kedge.gallery.location import LOCK
from kedge.gallery.schema import require_valid, rows_with, vectors_of
from kedge.gallery.search import Part, Snapshot
from kedge.gallery.table import Table

__all__ = ["Changes", "Items", "SnapshotLoader", "changes_since", "stolen_items"]

_MAX_TAIL = 10_000
"""With more new rows than this, the lists are written anew before the next search."""
_ROW_OVERHEAD = 512
"""Bytes that a row of the tail takes beside its vector."""
_JUDGED, _MAX_STOLEN = 10_000, 0.02
"""Items by which it is judged whether a new label's anchor takes others from their lists, and the share it may take."""
_log = logging.getLogger(__name__)


class Changes(NamedTuple):
    """Which rows of the lists are alive (None: all), the ids that are not in them, and the data files of those."""

    alive: np.ndarray | None
    new: np.ndarray
    data_files: set[str]


def changes_since(stored: StoredLists, table: Table) -> Changes:
    """What has changed since the lists were written; only data files that came or changed are read."""
    now, then, listed = table.data_files(), stored.data_files, stored.lists.ids
    changed = {file for file, deletions in now.items() if then.get(file) != deletions}
    # Files go when they are compacted, and when an older version is restored.
    gone = not then.keys() <= now.keys()
    if gone:
        changed = set(now)
    batches = [(np.empty(0, np.int64), np.empty(0, bool)), *table.ids_in(changed)]
    ids, is_deleted = (np.concatenate(columns) for columns in zip(*batches, strict=True))
    alive = np.sort(ids[~is_deleted])
    if not gone and changed.isdisjoint(then):
        # Rows that only came, which is how most of it happens, are in no list.
        return Changes(None, alive, changed)
    mask = np.isin(listed, alive)
    new = alive[~np.isin(alive, listed)]
    if not gone:
        mask |= ~np.isin(listed, ids[is_deleted])
    return Changes(None if mask.all() else mask, new, changed)


class SnapshotLoader:
    """Loads snapshots of a table in one space, and writes its inverted lists where they are missing or far behind."""

    def __init__(self, table: Table, space: Space) -> None:
        self._table = table
        self._space = space
        self._folder = table.location.folder
        self._lock = threading.RLock()
        self._snapshot: Snapshot | None = None
        self._stored: StoredLists | None = None
        self._damaged: set[str] = set()
        """Folders of lists that are not as they were written."""
        self._refreshed = -math.inf

    def latest(self) -> Snapshot:
        """The newest version, at most a millisecond old (a second in an object store)."""
        now = time.monotonic()
        snapshot = self._snapshot
        if snapshot is not None and now - self._refreshed < self._table.location.max_age:
            return snapshot
        with self._lock:
            version = self._table.refresh()
            if self._snapshot is None or self._snapshot.version != version:
                self._snapshot = self._load(self._table.pin())
            self._refreshed = now
            return self._snapshot

    def at(self, version: int) -> Snapshot:
        """A version that was just the newest, such as the one that is searched in another space."""
        with self._lock:
            if self._snapshot is None or self._snapshot.version != version:
                self._snapshot = self._load(self._table.at(version))
                self._refreshed = -math.inf  # there may be a newer one
            return self._snapshot

    def verified(self) -> Snapshot:
        """The newest version, all its lists compared with their checksums.

        Damaged ones are rebuilt from the table or, while somebody writes, replaced by lists in memory.
        """
        snapshot = self.latest()
        try:
            for part in snapshot.parts:
                part.lists.verify()
        except DamagedLists:
            with self._lock:
                stored = self._stored
                if stored is not None and any(part.lists is stored.lists for part in snapshot.parts):
                    _log.warning("The inverted lists of %s are damaged and are being rebuilt.", self._table.location)
                    self._damaged.add(stored.name)
                    self.reopen()
                return self.latest()
        return snapshot

    def reopen(self) -> None:
        """Open the lists from disk at the next call, to verify them once more."""
        with self._lock:
            self._stored = self._snapshot = None
            self._refreshed = -math.inf

    def invalidate(self) -> None:
        """Ask the table at the next call, however soon it comes: this process has written."""
        self._refreshed = -math.inf

    def anchors(self, table: Table) -> Anchors:
        """The anchors for what `table` holds now."""
        return anchors_of(table, self._space)

    def write_lists(self, table: Table) -> None:
        """Write the lists for what `table` holds now. The caller must hold the gallery's lock."""
        space = self._space
        root = self._folder / space.folder
        write_lists(root, table, self.anchors(table), by_label=space.by_label, column=space.column)
        with self._lock:
            self._snapshot = None

    def matching(self, snapshot: Snapshot, where: str) -> np.ndarray:
        """The ids of the items that match a filter."""
        return np.asarray(self._table.at(snapshot.version).columns(["id"], where).column("id"))

    def _load(self, table: Table) -> Snapshot:
        stored = open_lists(self._folder / self._space.folder, self._stored)
        if stored is not None and stored.name in self._damaged:
            stored = None
        changes = None if stored is None else changes_since(stored, table)
        if changes is None or len(changes.new) > _MAX_TAIL:
            rebuilt = self._rebuild(table)
            if rebuilt is not None:
                stored, changes = rebuilt, changes_since(rebuilt, table)
        if stored is None or changes is None:
            # A writer is at work, or there is no room: until then, everything is searched from memory.
            anchors = self.anchors(table)
            stored = StoredLists(InvertedLists.empty(self._space.dim, len(anchors)), anchors, {})
            changes = changes_since(stored, table)
        self._stored = stored
        parts, anchors = [Part(stored.lists, changes.alive)], stored.anchors
        if len(changes.new):
            tail, anchors = self._load_tail(table, changes, anchors)
            parts.append(Part(tail))
        return Snapshot(table.version, anchors, tuple(parts))

    def _rebuild(self, table: Table) -> StoredLists | None:
        try:
            with FileLock(self._folder / LOCK, timeout=0):
                self.write_lists(table)
        except (Timeout, OSError):
            return None
        return open_lists(self._folder / self._space.folder)

    def _load_tail(self, table: Table, changes: Changes, anchors: Anchors) -> tuple[InvertedLists, Anchors]:
        column = self._space.column
        needed = len(changes.new) * (4 * self._space.dim + _ROW_OVERHEAD)
        if needed > table.memory // 2:
            raise GalleryError(
                f"{len(changes.new):,} items of {table.location} are not in its lists yet and need more than half of "
                f"the {table.memory >> 20:,} MiB of memory allowed; run kedge optimize, or allow more."
            )
        batches = table.batches(["id", "path", "label", column], data_files=changes.data_files)
        new = [batch.filter(pa.array(np.isin(np.asarray(batch.column("id")), changes.new))) for batch in batches]
        rows = pa.Table.from_batches([rows_with(batch, column) for batch in new]).sort_by("id")
        ids, embeddings = np.asarray(rows.column("id")), vectors_of(rows, column)
        labels, paths = rows.column("label").to_pylist(), rows.column("path").to_pylist()
        require_valid(ids, embeddings)
        if self._space.has_labels:
            anchors = extend_anchors(anchors, self._space, embeddings, labels)
        lists = anchors.assign(embeddings, labels, by_label=self._space.by_label)
        return InvertedLists.in_memory(lists, len(anchors), ids, embeddings, labels, paths), anchors


class Items:
    """The items of a snapshot as one sequence, in order of their ids or as they lie on disk (`by_id=False`).

    A few numbers for each are in memory; vectors and paths are read from the inverted lists when asked for.
    """

    def __init__(self, snapshot: Snapshot, *, by_id: bool = True) -> None:
        self.snapshot = snapshot
        self._lists = [part.lists for part in snapshot.parts]
        alive = [np.ones(len(p.lists), bool) if p.alive is None else p.alive for p in snapshot.parts]
        self._rows = np.flatnonzero(np.concatenate(alive))
        """The row of each item, counted through all parts."""
        self.ids: np.ndarray = self._gather([lists.ids for lists in self._lists])
        if by_id:
            order = np.argsort(self.ids, kind="stable")
            self.ids, self._rows = self.ids[order], self._rows[order]

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def lists(self) -> np.ndarray:
        """The list of each item, which is the number of its anchor."""
        rows = [np.repeat(np.arange(len(part.offsets) - 1), np.diff(part.offsets)) for part in self._lists]
        return self._gather(rows).astype(np.int32)

    @cached_property
    def _coded_labels(self) -> tuple[list[str], np.ndarray]:
        names = [*(name for lists in self._lists for name in lists.label_names), None]  # None for the code -1
        first = np.cumsum([0, *(len(lists.label_names) for lists in self._lists)])
        codes = [np.where(lists.labels < 0, -1, lists.labels + n) for lists, n in zip(self._lists, first, strict=False)]
        code_of_item = self._gather(codes)
        used = sorted({name for code in np.unique(code_of_item).tolist() if (name := names[code]) is not None})
        numbers = {name: number for number, name in enumerate(used)}
        return used, np.array([numbers.get(name or "", -1) for name in names])[code_of_item]

    @property
    def label_names(self) -> list[str]:
        """All labels that an item has, sorted."""
        return self._coded_labels[0]

    @property
    def labels(self) -> np.ndarray:
        """The index of each item's label in `label_names`; -1 for none."""
        return self._coded_labels[1]

    def vectors(self, positions: np.ndarray) -> np.ndarray:
        """The vectors of some items, compared with their checksums."""
        return self.snapshot.vectors(self._rows[positions])

    def describe(self, position: int) -> tuple[str | None, str | None]:
        """Path and label of an item."""
        [(lists, _, row)] = self.snapshot.split(self._rows[position : position + 1])
        _, (path,), (label,) = lists.describe(row)
        return path, label

    def _gather(self, by_part: list[np.ndarray]) -> np.ndarray:
        """Values of all rows of all parts, for the items in their order."""
        return np.concatenate(by_part)[self._rows]


def stolen_items(snapshot: Snapshot, added: set[str]) -> tuple[str, float] | None:
    """The new label whose anchor takes most items of other labels from their lists, and the share that new ones take.

    None where that share is small. Judged by a sample.
    """
    items, anchors = Items(snapshot, by_id=False), snapshot.anchors
    is_new = np.array([name in added for name in anchors.names])
    numbers = {name: number for number, name in enumerate(anchors.names) if name not in added}
    own = np.array([*(numbers.get(name, -1) for name in items.label_names), -1])[items.labels]
    others = np.flatnonzero(own >= 0)
    if not len(others) or not is_new.any():
        return None
    sample = np.random.default_rng(0).permutation(others)[:_JUDGED]
    vectors, before = items.vectors(sample), np.flatnonzero(~is_new)
    nearest = anchors.nearest(vectors, 1)[:, 0]
    stolen = is_new[nearest] & (before[anchors.subset(before).nearest(vectors, 1)[:, 0]] == own[sample])
    if stolen.mean() <= _MAX_STOLEN:
        return None
    return str(anchors.names[np.bincount(nearest[stolen]).argmax()]), float(stolen.mean())
