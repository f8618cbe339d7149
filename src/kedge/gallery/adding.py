"""Pictures into the record: read, embedded, written, and made visible in whole steps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge.datasets.external import sources_of
from kedge.datasets.sources import Source
from kedge.errors import ConfigError, PictureError
from kedge.gallery.pictures import Batch, Known, is_text, read_ahead
from kedge.gallery.record import Record
from kedge.model import Model

__all__ = ["Added", "Adding", "StoredPicture", "known_items", "pictures_of"]

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
        files: Sequence[Any],
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
        files: Sequence[Any],
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


@dataclass(frozen=True)
class StoredPicture:
    """A picture of a dataset in the place of a file: under this name, with what the file would hold."""

    source: Source
    row: int
    name: str

    def __str__(self) -> str:
        return self.name

    def read_bytes(self) -> bytes:
        """What the file would hold; an OSError where it cannot be had."""
        try:
            return self.source.content(self.row)
        except PictureError as error:
            raise OSError(str(error)) from error


def pictures_of(
    given: Any, labels: Sequence[str | None] | None = None
) -> tuple[list[Path | StoredPicture], list[str | None]]:
    """The pictures of a PyTorch or Hugging Face dataset, all splits of it, and the class of each.

    Those that come from files are these files. The others get names that change with their content: of two datasets
    with one name, neither must replace the other's pictures.
    """
    files: list[Path | StoredPicture] = []
    names: list[str | None] = []
    for source in sources_of(given):
        names += map(source.name_of, source.labels())
        identity = source.identity
        version = None if identity is None else _digest(repr(identity).encode())
        for row in range(len(source)):
            path = source.path(row)
            stored = StoredPicture(source, row, f"{source.name}-{version}/{row}")
            if version is None and path is None:
                stored = StoredPicture(source, row, f"{source.name}/{_content_digest(stored)}")
            files.append(Path(path) if path is not None else stored)
    if labels is not None and len(labels) != len(files):
        raise ConfigError(f"labels must have {len(files)} entries, one per picture, found {len(labels)}.")
    return files, names if labels is None else list(labels)


def _content_digest(picture: StoredPicture) -> str:
    try:
        return _digest(picture.read_bytes())
    except OSError:  # adding it will say why
        return str(picture.row)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


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
