"""Pictures into the record: read, embedded, written, and made visible in whole steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kedge.gallery.pictures import Batch, Known, is_text, read_ahead
from kedge.gallery.record import Record
from kedge.model import Model

__all__ = ["Added", "Adding", "known_items"]

_BATCH = 64


class Added(list[int]):
    """The ids of what was added; what was not, and why."""

    def __init__(self, total: int) -> None:
        super().__init__()
        self.total = total
        """How many pictures there are to look at."""
        self.skipped: list[tuple[str, str]] = []
        """Path and reason of every picture that could not be read."""
        self.present = 0
        """How many were there already."""

    @property
    def done(self) -> int:
        """How many pictures have been looked at."""
        return len(self) + self.present + len(self.skipped)

    def __str__(self) -> str:
        return f"{len(self):,} added, {self.present:,} already there, {len(self.skipped):,} unreadable"


class Adding:
    """Adds pictures to a record. Whoever uses it must hold the gallery's lock."""

    def __init__(self, record: Record, model: Model, thumbnails: int, progress: Callable[[Added], None]) -> None:
        self._record = record
        self._model = model
        self._thumbnails = thumbnails
        self._progress = progress

    def add(
        self,
        files: Sequence[Path],
        labels: Sequence[str | None],
        metadata: Mapping[str, Sequence[Any]],
        every: int,
    ) -> Added:
        """Add what is not there yet; a commit after every so many pictures."""
        there, outdated = known_items(self._record, files)
        added = Added(len(files))
        first = self._record.reserve(len(files))
        self._record.add_columns(metadata)
        self._progress(added)
        pending: list[Any] = []
        waiting = 0

        def commit() -> None:
            nonlocal waiting
            # Forgotten first: what is interrupted here must not be written a second time.
            rows, old = pending[:], outdated[:]
            pending.clear()
            outdated.clear()
            waiting = 0
            if rows:
                self._record.commit(rows)
            self._record.delete(old)

        try:
            for batch in read_ahead(files, there, _BATCH, self._model.preprocessing, self._thumbnails):
                added.skipped += batch.skipped
                added.present += batch.present
                if batch.rows:
                    columns = self._embedded(batch, first, files, labels, metadata)
                    pending += self._record.write(columns)
                    outdated += [there[path].id for path in columns["path"] if path in there]
                    added += columns["id"]
                    waiting += len(batch.rows)
                if waiting >= every:
                    commit()
                self._progress(added)
        except KeyboardInterrupt:
            # Whoever adds in steps keeps what is whole.
            if every < len(files):
                commit()
            raise
        commit()
        return added

    def _embedded(
        self,
        batch: Batch,
        first: int,
        files: Sequence[Path],
        labels: Sequence[str | None],
        metadata: Mapping[str, Sequence[Any]],
    ) -> dict[str, Any]:
        columns: dict[str, Any] = {
            "id": [first + row for row in batch.rows],
            "path": [str(files[row]) for row in batch.rows],
            "label": [labels[row] for row in batch.rows],
            "hash": batch.hashes,
            "embedding": self._model.embed(batch.images).numpy(),
        }
        if self._thumbnails:
            columns["thumbnail"] = batch.thumbnails
        return columns | {name: [values[row] for row in batch.rows] for name, values in metadata.items()}


def known_items(record: Record, files: Sequence[str | Path]) -> tuple[dict[str, Known], list[int]]:
    """What the record knows of these paths, and the ids of older content that a kill left beside the newer."""
    where = "path IS NOT NULL AND hash IS NOT NULL"
    if len(files) <= 1024:  # beyond, one pass over all paths costs less than so long a filter
        quoted = ["'" + str(file).replace("'", "''") + "'" for file in files if is_text(str(file))]
        where += f" AND path IN ({', '.join(quoted)})" if quoted else " AND false"
    table = record.columns(["id", "path", "hash"], where).sort_by("id")
    there: dict[str, Known] = {}
    outdated = []
    for id, path, digest in zip(*(table.column(name).to_pylist() for name in ("id", "path", "hash")), strict=True):
        if path in there and there[path].hash != digest:
            outdated.append(there[path].id)
        there[path] = Known(id, digest)
    return there, outdated
