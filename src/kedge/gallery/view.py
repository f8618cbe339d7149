"""The newest state of a gallery as something that can be searched: lists on disk, a tail in memory."""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from filelock import FileLock, Timeout

from kedge.errors import GalleryError
from kedge.gallery.anchors import Anchors, extend_anchors, settle_anchors
from kedge.gallery.changes import Change, Marks, compare
from kedge.gallery.checksums import DamagedLists, FileChecksums
from kedge.gallery.lists import Lists, Opened, open_lists, write_lists
from kedge.gallery.place import Place
from kedge.gallery.precision import Precision
from kedge.gallery.record import LOCK, Record, embeddings_of, require_valid
from kedge.gallery.search import Part, Snapshot

__all__ = ["LOCK", "View"]

_TAIL = 10_000
"""With more new rows than this, the lists are written anew before the next search."""
_ROW = 512
"""Bytes that a new row takes beside its vector."""
_DELAY = 2.0
"""Seconds until what was opened is compared with its checksums in the background: the first searches come first."""
_log = logging.getLogger(__name__)


class View:
    """Looks at a record through its lists, and has them written when they are missing or far behind.

    The record is its own, apart from the one that a writer of the same process moves on.
    """

    def __init__(
        self,
        place: Place,
        dim: int,
        *,
        memory: int,
        learned: np.ndarray | None,
        classes: Sequence[str],
        by_label: bool,
        precision: Precision,
        checksums: FileChecksums,
    ) -> None:
        self.precision = precision
        self.folder = place.folder
        self._fresh = place.fresh
        self._memory = memory
        self._record = Record(place, dim, memory=memory, checksums=checksums)
        self._learned = learned
        self._classes = classes
        self._by_label = by_label
        self._mutex = threading.RLock()
        self._snapshot: Snapshot | None = None
        self._opened: Opened | None = None
        self._damaged: set[str] = set()
        """Folders of lists that are not as they were written."""
        self._looked = -math.inf

    def newest(self) -> Snapshot:
        """The newest state, at most a millisecond old (a second in an object store); it never changes."""
        now = time.monotonic()
        known = self._snapshot
        if known is not None and now - self._looked < self._fresh:
            return known
        with self._mutex:
            version = self._record.refresh()
            if self._snapshot is None or self._snapshot.version != version:
                self._snapshot = self._look()
            self._looked = now
            return self._snapshot

    def checked(self) -> Snapshot:
        """The newest state, all its lists compared with their checksums; damaged ones are rebuilt."""
        snapshot = self.newest()
        try:
            for part in snapshot.parts:
                part.lists.prepare_all()
        except DamagedLists:
            return self.repaired(snapshot)
        return snapshot

    def repaired(self, damaged: Snapshot) -> Snapshot:
        """The newest state without the damaged lists of this one: rebuilt from the table, or searched from memory."""
        with self._mutex:
            opened = self._opened
            if opened is not None and any(part.lists is opened.lists for part in damaged.parts):
                _log.warning("The inverted lists of %s are damaged: they are rebuilt.", self._record.place)
                self._damaged.add(opened.name)
                self._opened = self._snapshot = None
                self._looked = -math.inf
            return self.newest()

    def opened_from(self, name: str) -> bool:
        """Whether the lists are those of this folder."""
        return self._opened is not None and self._opened.name == name

    def reopen(self) -> None:
        """Open the lists from disk at the next call, to compare them once more."""
        with self._mutex:
            self._opened = self._snapshot = None
            self._looked = -math.inf

    def look_again(self) -> None:
        """Ask the record at the next call, however soon it comes: something was written here."""
        with self._mutex:
            self._looked = -math.inf

    def settled(self, record: Record) -> Anchors:
        """The anchors for what `record` holds now."""
        return settle_anchors(record, self._learned, self._classes)

    def write_lists(self, record: Record) -> None:
        """Write the lists for what `record` holds now. Whoever calls must hold the gallery's lock."""
        anchors = self.settled(record)
        write_lists(self.folder / "lists", record, anchors, by_label=self._by_label, precision=self.precision)
        with self._mutex:
            self._snapshot = None

    def masks(self, snapshot: Snapshot, where: str | None) -> list[np.ndarray | None]:
        """Which rows of each part count."""
        if where is None:
            return [part.alive for part in snapshot.parts]
        wanted = Marks()
        for ids in self._record.ids_where(where, snapshot.version):
            wanted.set(ids, 1)
        masks: list[np.ndarray | None] = []
        for part in snapshot.parts:
            mask = wanted.of(part.lists.ids) == 1
            masks.append(mask if part.alive is None else mask & part.alive)
        return masks

    def _look(self) -> Snapshot:
        opened = open_lists(self.folder / "lists", self._opened)
        if opened is not None and opened.name in self._damaged:
            opened = None
        change = None if opened is None else compare(opened, self._record)
        if change is None or len(change.new) > _TAIL:
            renewed = self._renewed()
            if renewed is not None:
                opened, change = renewed, compare(renewed, self._record)
        if opened is None or change is None:
            # A writer is at work, or there is no room: until then, everything is searched from memory.
            anchors = self.settled(self._record)
            opened = Opened(Lists.empty(self._record.dim, len(anchors)), anchors, {})
            change = compare(opened, self._record)
        if opened is not self._opened and opened.name:
            check = threading.Timer(_DELAY, _check, [weakref.ref(self), opened.name])
            check.daemon = True
            check.start()
        self._opened = opened
        parts, anchors = [Part(opened.lists, change.alive)], opened.anchors
        if len(change.new):
            tail, anchors = self._tail(change, anchors)
            parts.append(Part(tail))
        return Snapshot(self._record.version, anchors, tuple(parts))

    def _renewed(self) -> Opened | None:
        try:
            with FileLock(self.folder / LOCK, timeout=0):
                self.write_lists(self._record)
        except (Timeout, OSError):
            return None
        return open_lists(self.folder / "lists")

    def _tail(self, change: Change, anchors: Anchors) -> tuple[Lists, Anchors]:
        needed = len(change.new) * (4 * self._record.dim + _ROW)
        if needed > self._memory // 2:
            raise GalleryError(
                f"{len(change.new):,} items of {self._record.place} are not in its lists yet and would take more than "
                f"half of the {self._memory >> 20:,} MiB: wait for its writer, run kedge optimize or allow more."
            )
        some = self._record.rows_in(change.files, ["id", "path", "label", "embedding"])
        kept = [batch.filter(pa.array(np.isin(np.asarray(batch.column("id")), change.new))) for batch in some]
        table = pa.Table.from_batches(kept).sort_by("id")
        embeddings, labels = embeddings_of(table, self._record.dim), table.column("label").to_pylist()
        require_valid(np.asarray(table.column("id")), embeddings)
        anchors = extend_anchors(anchors, embeddings, labels)
        homes = anchors.assign(embeddings, labels, by_label=self._by_label)
        ids = np.asarray(table.column("id"))
        return Lists.in_memory(homes, len(anchors), ids, embeddings, labels, table.column("path").to_pylist()), anchors


def _check(view: weakref.ref[View], name: str) -> None:
    """Compare lists and table with their checksums, in the background."""
    this = view()
    try:
        if this is not None and this.opened_from(name):
            this.checked()
            this._record.verify()
    except GalleryError as error:
        if this is not None and this.folder.exists():
            _log.error("%s", error)
