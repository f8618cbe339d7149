"""The newest version of a gallery as a snapshot that can be searched: inverted lists on disk, a tail in memory."""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from filelock import FileLock, Timeout

from kedge.errors import GalleryError
from kedge.gallery.anchors import Anchors, anchors_of, extend_anchors
from kedge.gallery.checksums import DamagedLists
from kedge.gallery.inverted_lists import InvertedLists, StoredLists, open_lists, write_lists
from kedge.gallery.schema import embeddings_of, require_valid
from kedge.gallery.search import Masks, Part, Snapshot
from kedge.gallery.table import LOCK, Table

__all__ = ["Changes", "IdSet", "SnapshotLoader", "changes_since"]

_MAX_TAIL = 10_000
"""With more new rows than this, the lists are written anew before the next search."""
_ROW_OVERHEAD = 512
"""Bytes that a row of the tail takes beside its vector."""
_CHECK_DELAY = 2.0
"""Seconds until what was opened is compared with its checksums in the background: the first searches come first."""
_log = logging.getLogger(__name__)


class IdSet:
    """A set of ids, one byte for each: millions are added and looked up at a time."""

    def __init__(self) -> None:
        self._members = np.zeros(1024, bool)

    def add(self, ids: np.ndarray) -> None:
        """Add ids, which must not be negative."""
        if (largest := int(ids.max(initial=0))) >= len(self._members):
            self._members = np.concatenate([self._members, np.zeros(largest + 1, bool)])
        self._members[ids] = True

    def remove(self, ids: np.ndarray) -> None:
        """Remove ids that are in the set."""
        self._members[ids] = False

    def contains(self, ids: np.ndarray) -> np.ndarray:
        """The mask of those that are in the set; ids may be anything, as in damaged lists."""
        mask: np.ndarray = self._members.take(ids, mode="clip")
        mask &= (ids >= 0) & (ids < len(self._members))
        return mask

    def ids(self) -> np.ndarray:
        """All ids, ascending."""
        return np.flatnonzero(self._members)


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
    alive, deleted = IdSet(), IdSet()
    for ids, is_deleted in table.ids_in(changed):
        alive.add(ids[~is_deleted])
        deleted.add(ids[is_deleted])
    if not gone and changed.isdisjoint(then):
        # Rows that only came, which is how most of it happens, are in no list.
        return Changes(None, alive.ids(), changed)
    mask = alive.contains(listed)
    alive.remove(listed[mask])
    if not gone:
        mask |= ~deleted.contains(listed)
    return Changes(None if mask.all() else mask, alive.ids(), changed)


class SnapshotLoader:
    """Loads snapshots of a table, and writes its inverted lists where they are missing or far behind."""

    def __init__(
        self, table: Table, *, memory: int, learned: np.ndarray | None, classes: Sequence[str], by_label: bool
    ) -> None:
        self._table = table
        self._folder = table.location.folder
        self._memory = memory
        self._learned = learned
        self._classes = classes
        self._by_label = by_label
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

    def verified(self) -> Snapshot:
        """The newest version, all its lists compared with their checksums; damaged ones are rebuilt."""
        snapshot = self.latest()
        try:
            for part in snapshot.parts:
                part.lists.verify()
        except DamagedLists:
            return self.repaired(snapshot)
        return snapshot

    def repaired(self, damaged: Snapshot) -> Snapshot:
        """The newest version without the damaged lists of this one: rebuilt from the table, or held in memory."""
        with self._lock:
            stored = self._stored
            if stored is not None and any(part.lists is stored.lists for part in damaged.parts):
                _log.warning("The inverted lists of %s are damaged: they are rebuilt.", self._table.location)
                self._damaged.add(stored.name)
                self.reopen()
            return self.latest()

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
        return anchors_of(table, self._learned, self._classes)

    def write_lists(self, table: Table) -> None:
        """Write the lists for what `table` holds now. The caller must hold the gallery's lock."""
        write_lists(self._folder / "lists", table, self.anchors(table), by_label=self._by_label)
        with self._lock:
            self._snapshot = None

    def masks(self, snapshot: Snapshot, where: str | None) -> Masks:
        """Which rows of each part match a filter."""
        if where is None:
            return snapshot.alive
        matching = IdSet()
        for ids in self._table.at(snapshot.version).ids_where(where):
            matching.add(ids)
        matches = [matching.contains(part.lists.ids) for part in snapshot.parts]
        return [mask if alive is None else mask & alive for mask, alive in zip(matches, snapshot.alive, strict=True)]

    def _load(self, table: Table) -> Snapshot:
        stored = open_lists(self._folder / "lists", self._stored)
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
            stored = StoredLists(InvertedLists.empty(table.dim, len(anchors)), anchors, {})
            changes = changes_since(stored, table)
        if stored is not self._stored and stored.name:
            timer = threading.Timer(_CHECK_DELAY, _verify_in_background, [weakref.ref(self), stored.name])
            timer.daemon = True
            timer.start()
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
        return open_lists(self._folder / "lists")

    def _load_tail(self, table: Table, changes: Changes, anchors: Anchors) -> tuple[InvertedLists, Anchors]:
        needed = len(changes.new) * (4 * table.dim + _ROW_OVERHEAD)
        if needed > self._memory // 2:
            raise GalleryError(
                f"{len(changes.new):,} items of {table.location} are not in its lists yet and would take more than "
                f"half of the {self._memory >> 20:,} MiB: wait for its writer, run kedge optimize or allow more."
            )
        batches = table.batches(["id", "path", "label", "embedding"], data_files=changes.data_files)
        new = [batch.filter(pa.array(np.isin(np.asarray(batch.column("id")), changes.new))) for batch in batches]
        rows = pa.Table.from_batches(new).sort_by("id")
        ids, embeddings = np.asarray(rows.column("id")), embeddings_of(rows, table.dim)
        labels, paths = rows.column("label").to_pylist(), rows.column("path").to_pylist()
        require_valid(ids, embeddings)
        anchors = extend_anchors(anchors, embeddings, labels)
        lists = anchors.assign(embeddings, labels, by_label=self._by_label)
        return InvertedLists.in_memory(lists, len(anchors), ids, embeddings, labels, paths), anchors

    def verify_opened(self, name: str) -> None:
        """Compare lists and table with their checksums, if the lists of this folder are still in use."""
        if self._stored is not None and self._stored.name == name:
            self.verified()
            self._table.latest().verify()


def _verify_in_background(reference: weakref.ref[SnapshotLoader], name: str) -> None:
    loader = reference()
    try:
        if loader is not None:
            loader.verify_opened(name)
    except GalleryError as error:
        if loader is not None and loader._folder.exists():
            _log.error("%s", error)
