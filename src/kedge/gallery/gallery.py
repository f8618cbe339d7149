"""`Gallery`: a folder that holds a picture collection and finds pictures in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import pyarrow as pa
from filelock import FileLock, Timeout
from PIL import Image

from kedge.datasets import is_external
from kedge.errors import ConfigError, GalleryError
from kedge.gallery.adding import Added, Adding, pictures_of
from kedge.gallery.anchors import Anchors
from kedge.gallery.calibration import Calibration, fetch_calibration, load_calibration, save_calibration
from kedge.gallery.checksums import DamagedLists, FileChecksums
from kedge.gallery.copies import settle_copy
from kedge.gallery.folder import (
    About,
    ListKind,
    fetch_folder,
    make_folder,
    own_anchors,
    read_about,
    read_anchors,
    taken,
)
from kedge.gallery.labels import stored_labels
from kedge.gallery.pictures import listed, query_picture
from kedge.gallery.place import Place
from kedge.gallery.precision import PRECISIONS, Precision
from kedge.gallery.record import COLUMNS, LOCK, MEMORY, Record, Version
from kedge.gallery.search import Columns, Masks, Result, Snapshot
from kedge.gallery.view import View
from kedge.model import Model

__all__ = ["Gallery", "Item", "Method"]

Method = Literal["two_stage", "brute_force"]
_WAIT_SECONDS = 10.0
_LEAST_MEMORY = 64 << 20
_LARGEST = 1e18
"""The squares of larger lengths have no room in single precision."""


class Item(NamedTuple):
    """One item of a gallery."""

    id: int
    path: str | None
    label: str | None
    metadata: dict[str, Any]


class Gallery:
    """Pictures or vectors in a folder: added, removed, searched, by any number of readers and one writer.

    Make one with `create` or `open`.
    """

    def __init__(
        self, place: Place, about: About, learned: np.ndarray | None, model: Model | None, *, memory: int = MEMORY
    ) -> None:
        self.place = place
        self.path = place.folder
        """The folder; of a gallery in an object store, the one for what this machine keeps of it."""
        self.model = model
        self.classes: tuple[str, ...] = tuple(about.classes)
        self.lists: ListKind = about.lists
        self.dim = int(about.dim)
        self.precision: Precision = about.precision
        self.thumbnails = int(about.thumbnails)
        self.calibration = load_calibration(self.path)
        checksums = FileChecksums(self.path)
        self._record = Record(place, self.dim, memory=memory, checksums=checksums)
        self._view = View(
            place,
            self.dim,
            memory=memory,
            learned=learned,
            classes=self.classes,
            by_label=self.lists == "label",
            precision=self.precision,
            checksums=checksums,
        )

    # ------------------------------------------------------------------ making and opening

    @classmethod
    def create(
        cls,
        path: str | Path,
        model: Model | None = None,
        *,
        anchors: np.ndarray | None = None,
        classes: Sequence[str] | None = None,
        dim: int | None = None,
        lists: ListKind = "label",
        precision: Precision = "float32",
        thumbnails: int = 0,
    ) -> Gallery:
        """An empty gallery for the pictures that `model` embeds, or for vectors of one's own.

        Vectors of one's own come with `anchors` (one row per class, named by `classes`) or only with their `dim`:
        then labels route a search by their means, and vectors without labels by k-means centres. `lists` says
        where an item sits: in the list of its label, where that is known, or of its nearest anchor. With a
        `precision` of bfloat16 or int8 a search reads a half or a quarter of the bytes and then compares the
        nearest exactly; `kedge info` states what share of them it finds. `thumbnails` is the longer side of small
        copies that the gallery keeps of its pictures; 0 keeps none.
        """
        place = Place.of(path)
        if lists not in get_args(ListKind):
            raise ConfigError(f"lists must be one of {', '.join(get_args(ListKind))}, found {lists!r}.")
        if precision not in PRECISIONS:
            raise ConfigError(f"precision must be one of {', '.join(PRECISIONS)}, found {precision!r}.")
        if not 0 <= thumbnails <= 1024:
            raise ConfigError(f"thumbnails must lie between 0 and 1024 pixels, found {thumbnails}.")
        if taken(place):
            raise GalleryError(f"{place} is there already: open it with Gallery.open, or choose another path.")
        if model is not None:
            if anchors is not None or classes is not None or dim is not None:
                raise ConfigError("A model brings its own anchors, classes and dimension: give only the model.")
            learned, names, dim = _learned(model), model.classes, model.dim
        else:
            learned, names, dim = own_anchors(anchors, classes, dim)
        fingerprint = None if model is None else model.fingerprint
        about = About(dim, lists, list(names), fingerprint, precision, thumbnails)
        with _reaching(place):
            make_folder(place, about, model, learned)
            return cls(place, about, learned, model)

    @classmethod
    def open(cls, path: str | Path, model: Model | None = None, *, memory: int = MEMORY) -> Gallery:
        """A gallery that is there. It holds its model; one that is in memory already saves loading it.

        `memory` is what it may keep in bytes, beside the files that the system keeps in memory where there is room.
        """
        if memory < _LEAST_MEMORY:
            raise ConfigError(f"memory must be at least {_LEAST_MEMORY >> 20} MiB, found {memory / 2**20:g} MiB.")
        place = Place.of(path)
        with _reaching(place):
            fetch_folder(place)
            fetch_calibration(place)
        about = read_about(place)
        settle_copy(place)
        if about.model is None:
            if model is not None:
                raise ConfigError(f"{place} was made without a model: open it without one.")
            return cls(place, about, read_anchors(place.folder, about), None, memory=memory)
        if model is not None and model.fingerprint != about.model:
            raise ConfigError(
                f"{place} was made with the model {about.model}, found {model.fingerprint}: open it with that one."
            )
        model = model or Model.load(place.folder / "model")
        if model.fingerprint != about.model:
            raise GalleryError(
                f"{place} was made with the model {about.model}, but holds {model.fingerprint}: put it back."
            )
        if list(model.classes) != list(about.classes):
            raise GalleryError(f"{place} knows other classes than its model: one of them is damaged; put it back.")
        return cls(place, about, _learned(model), model, memory=memory)

    # ------------------------------------------------------------------ what it holds

    def __len__(self) -> int:
        return len(self.snapshot())

    def __repr__(self) -> str:
        return f"Gallery({str(self.place)!r}, {len(self):,} items, dim={self.dim}, lists={self.lists})"

    def snapshot(self) -> Snapshot:
        """The newest state: its anchors and lists. It stays what it is, whatever writers do meanwhile."""
        return self._view.newest()

    def checked_snapshot(self) -> Snapshot:
        """The same for whoever reads all of it: every list was compared with its checksums, and the table too."""
        self._record.refresh()
        self._record.verify()
        return self._view.checked()

    def item(self, id: int) -> Item:
        """What the gallery knows of one item."""
        row = self._row(id)
        metadata = {name: value for name, value in row.items() if name not in COLUMNS}
        return Item(id, row["path"], row["label"], metadata)

    def thumbnail(self, id: int) -> bytes | None:
        """The small copy (JPEG) that the gallery keeps of an item's picture, if it keeps any."""
        content: bytes | None = self._row(id)["thumbnail"]
        return content

    def vector(self, id: int) -> np.ndarray:
        """The embedding of one item."""
        embedding: np.ndarray = self._row(id)["embedding"]
        return embedding

    def ids(self, where: str | None = None) -> list[int]:
        """The items that match, such as `"label = 'cat'"`, in order."""
        self._record.refresh()
        return sorted(self._record.columns(["id"], where).column("id").to_pylist())

    def check_filter(self, where: str) -> None:
        """Raise unless a filter is one expression over the columns of this gallery, and nothing behind it."""
        self._record.refresh()
        self._record.check_filter(where)

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """All items, some thousand at a time: id, path, label, hash, embedding, thumbnail and metadata."""
        self._record.refresh()
        return self._record.batches(columns)

    def check(self) -> str:
        """Compare all that the gallery holds with its checksums; a sentence on what was found.

        Damaged lists are rebuilt; a damaged table raises, and the error names the items and the last good version.
        """
        self._record.refresh()
        if (damage := self._record.check()) is not None:
            raise GalleryError(damage.sentence(self.place))
        self._view.reopen()
        before = self.snapshot()
        after = self._view.checked()
        ids = np.sort(np.concatenate([*self._all_ids(), np.empty(0, np.int64)]))
        if len(twice := np.unique(ids[1:][ids[1:] == ids[:-1]])):
            some = ", ".join(map(str, twice[:20].tolist()))
            raise GalleryError(f"{self.place} holds items with one id ({some}): remove these ids and add them again.")
        lists = "as they were written" if before is after else "were damaged and have been rebuilt"
        return f"the table of {len(ids):,} items is as it was written, its lists {lists}"

    def _all_ids(self) -> Iterator[np.ndarray]:
        for batch in self._record.batches(["id"]):
            yield np.asarray(batch.column("id"))

    def touch(self) -> None:
        """Raise unless the table can be read; for whoever watches over a server."""
        self._record.touch()

    def versions(self) -> list[Version]:
        """The states that can be restored, oldest first."""
        return self._record.versions()

    def restore(self, version: int) -> None:
        """Make an old state the current one."""
        with self.writing():
            self._record.restore(version)

    # ------------------------------------------------------------------ writing

    def add(
        self,
        source: Any,
        labels: Sequence[str | None] | None = None,
        *,
        metadata: Mapping[str, Sequence[Any]] | None = None,
        commit_every: int | None = None,
        progress: Callable[[Added], None] | None = None,
    ) -> Added:
        """Add pictures: a file, several, a folder, whose first-level folders are labels, or a labelled dataset.

        A dataset is a map-style one of PyTorch, a Hugging Face `Dataset` or `DatasetDict`, or a dictionary of such.
        What is there already (same path, same content) is left out; a picture that cannot be read is reported in
        the result and is not fatal. Returns the ids of what was added: all of them are there or, after a kill, none;
        with `commit_every`, those that were complete when it came. `progress` is called as the work goes on.
        """
        if self.model is None:
            raise ConfigError(f"{self.place} was made without a model: use add_embeddings.")
        if commit_every is not None and commit_every < 1:
            raise ConfigError(f"commit_every must be at least 1, found {commit_every}.")
        files, names = pictures_of(source, labels) if is_external(source) else listed(source, labels)
        names = stored_labels(names)
        columns = _checked_metadata(metadata, len(files))
        adding = Adding(self._record, self.model, self.thumbnails, progress or (lambda _: None))
        with self.writing():
            return adding.add(files, names, columns, commit_every or len(files))

    def add_embeddings(
        self,
        vectors: np.ndarray,
        labels: Sequence[str | None] | None = None,
        paths: Sequence[str | None] | None = None,
        metadata: Mapping[str, Sequence[Any]] | None = None,
    ) -> list[int]:
        """Add vectors of one's own, one row each; all of them or, after a kill, none. Returns their ids."""
        matrix = self.checked(vectors)
        count = len(matrix)
        columns = _checked_metadata(metadata, count)
        for name, values in (("label", labels), ("path", paths)):
            if values is not None:
                if len(values) != count:
                    raise ConfigError(f"{name}s must have {count} entries, one per vector, found {len(values)}.")
                columns[name] = stored_labels(values) if name == "label" else list(values)
        if any(path is not None and "\0" in path for path in columns.get("path", ())):
            raise ConfigError("paths must not hold a NUL character.")
        if count == 0:
            return []
        with self.writing():
            self._record.add_columns({name: columns[name] for name in metadata or {}})
            first = self._record.reserve(count)
            ids = list(range(first, first + count))
            self._record.commit(self._record.write({"id": ids, "embedding": matrix, **columns}))
        return ids

    def remove(self, ids: int | Sequence[int]) -> int:
        """Remove items; how many of them were there."""
        with self.writing():
            return self._record.delete([ids] if isinstance(ids, int) else ids)

    def calibrate(self, held_out: str | Path | Sequence[str | Path] | np.ndarray, accept: float = 0.95) -> Calibration:
        """Learn from held-out items how far from every anchor a query is unknown, and keep it.

        `held_out` are pictures (a folder, files) or vectors of classes that the gallery knows, which were not trained
        on; of items like these, the share `accept` will count as known.
        """
        if isinstance(held_out, np.ndarray):
            vectors = self.checked(held_out)
        elif self.model is None:
            raise ConfigError(f"{self.place} was made without a model: calibrate with vectors.")
        else:
            vectors = self.model.embed(listed(held_out, None)[0]).numpy()
        nearest = np.sqrt(self._view.checked().anchors.nearest_squares(vectors))
        calibration = Calibration.from_distances(nearest, accept)
        with self.writing():
            save_calibration(self.place, calibration)
            self.calibration = calibration
        return calibration

    def optimize(self, *, forget: float | None = None) -> None:
        """Fold everything that is new into the lists, and join the record's small files.

        States older than `forget` days can then not be restored, and their files make room; by default all are kept.
        """
        if forget is not None and not forget >= 0:
            raise ConfigError(f"forget must be a number of days, at least 0, found {forget}.")
        with self.writing():
            # What is damaged must not be written on, and the versions before it must not be forgotten.
            if (damage := self._record.check()) is not None:
                raise GalleryError(damage.sentence(self.place))
            self._record.add_checksums()
            self._record.compact()
            if forget is not None:
                self._record.forget(forget)
            self._record.seal((), everything=True)
            self._view.write_lists(self._record)

    # ------------------------------------------------------------------ searching

    def search(
        self,
        query: str | Path | bytes | int | Image.Image | np.ndarray,
        k: int = 20,
        method: Method = "two_stage",
        probes: int = 1,
        at_least: int = 0,
        where: str | None = None,
        *,
        allow_url: bool = False,
    ) -> Result:
        """The k items most like a picture (path, bytes, PIL image), a vector or an item (its id, itself left out).

        The picture behind an http(s) address is fetched only with `allow_url`.
        """
        vector, without = self.query_vector(query, allow_url=allow_url)
        matrix = self.checked(vector[None])
        return self._search(self.snapshot(), matrix, k, method, probes, at_least, where, without)[0]

    def query_vector(
        self, query: str | Path | bytes | int | Image.Image | np.ndarray, *, allow_url: bool = False
    ) -> tuple[np.ndarray, int | None]:
        """The vector of what someone searches with, and the id that is left out where it is an item."""
        if isinstance(query, (int, np.integer)) and not isinstance(query, bool):
            return self.vector(int(query)), int(query)
        if isinstance(query, np.ndarray) and query.ndim == 1:
            return query, None
        if self.model is None:
            raise ConfigError(f"{self.place} was made without a model: search with a vector or an id.")
        return self.model.embed(query_picture(query, allow_url=allow_url)).numpy()[0], None

    def search_embeddings(
        self,
        queries: np.ndarray,
        k: int = 20,
        method: Method = "two_stage",
        probes: int = 1,
        at_least: int = 0,
        where: str | None = None,
        *,
        without: int | None = None,
        snapshot: Snapshot | None = None,
    ) -> list[Result]:
        """The k nearest items of each vector, but for one that is left out; in the newest state, or in a `snapshot`."""
        state = self.snapshot() if snapshot is None else snapshot
        return self._search(state, self.checked(queries), k, method, probes, at_least, where, without)

    def _search(
        self,
        snapshot: Snapshot,
        queries: np.ndarray,
        k: int,
        method: Method,
        probes: int,
        at_least: int,
        where: str | None,
        without: int | None,
    ) -> list[Result]:
        if k < 1:
            raise ConfigError(f"k must be at least 1, found {k}.")
        if method not in ("two_stage", "brute_force"):
            raise ConfigError(f"method must be one of {', '.join(get_args(Method))}, found {method!r}.")
        if not probes >= 1:
            raise ConfigError(f"probes must be at least 1, found {probes}.")
        started = time.perf_counter()
        try:
            hits, looked = self._found(snapshot, queries, k, method, probes, at_least, where, without)
        except DamagedLists:
            snapshot = self._view.repaired(snapshot)
            hits, looked = self._found(snapshot, queries, k, method, probes, at_least, where, without)
        seconds = (time.perf_counter() - started) / max(1, len(queries))
        unknown = self._unknown(snapshot, queries)
        return [Result(*found, seconds) for found in zip(hits, looked, unknown, strict=True)]

    def _found(
        self,
        snapshot: Snapshot,
        queries: np.ndarray,
        k: int,
        method: Method,
        probes: int,
        at_least: int,
        where: str | None,
        without: int | None,
    ) -> tuple[list[Columns], list[list[str | None]]]:
        """The hits of each query, and the anchors whose lists were looked at."""
        masks = self._view.masks(snapshot, where)
        names = snapshot.anchors.names
        if method == "brute_force":
            return snapshot.search(queries, k, None, masks, without), [list(names)] * len(queries)
        probes = min(probes, len(names))
        probed = snapshot.probed(queries, probes, at_least, masks)
        hits = snapshot.search(queries, k, probed, masks, without)
        empty = [row for row, columns in enumerate(hits) if not columns.ids]
        if empty:
            self._next_lists(snapshot, queries, k, probes, masks, without, empty, probed, hits)
        return hits, [[names[place] for place in places.tolist()] for places in probed]

    @staticmethod
    def _next_lists(
        snapshot: Snapshot,
        queries: np.ndarray,
        k: int,
        probes: int,
        masks: Masks,
        without: int | None,
        empty: list[int],
        probed: list[np.ndarray],
        hits: list[Columns],
    ) -> None:
        """Where the nearest lists hold nothing, go on to the nearest list that holds something."""
        enough = 1 if without is None else 2  # the item that is left out counts as one
        farther = snapshot.probed(queries[empty], probes, enough, masks)
        for row, places, columns in zip(
            empty, farther, snapshot.search(queries[empty], k, farther, masks, without), strict=True
        ):
            probed[row], hits[row] = places, columns

    def _unknown(self, snapshot: Snapshot, queries: np.ndarray) -> list[bool | None]:
        if self.calibration is None:
            return [None] * len(queries)
        nearest = np.sqrt(snapshot.anchors.nearest_squares(queries))
        unknown: list[bool | None] = (nearest > self.calibration.threshold).tolist()
        return unknown

    # ------------------------------------------------------------------ shared

    def _row(self, id: int) -> dict[str, Any]:
        self._record.refresh()
        row = self._record.row(id)
        if row is None:
            raise ConfigError(f"There is no item {id} in {self.place}.")
        return row

    def checked(self, vectors: Any) -> np.ndarray:
        """Vectors as this gallery compares them, one row each."""
        matrix = np.ascontiguousarray(vectors, dtype=np.float32)
        if matrix.ndim != 2 or matrix.shape[1] != self.dim:
            shape = " × ".join(map(str, matrix.shape))
            raise ConfigError(f"vectors must be N × {self.dim}, as this gallery holds, found {shape}.")
        # One number tells that all are fine; only where it does not, each is asked.
        if not np.vdot(matrix, matrix) < _LARGEST**2:
            if not np.isfinite(matrix).all():
                row = int(np.flatnonzero(~np.isfinite(matrix).all(axis=1))[0])
                raise ConfigError(f"vectors must be finite, found NaN or infinity in row {row}.")
            if (largest := float(np.abs(matrix).max())) > _LARGEST / self.dim:
                raise ConfigError(f"vectors must be below {_LARGEST / self.dim:.1e}, found {largest:.1e}: scale them.")
        return matrix

    def settled(self, record: Record) -> Anchors:
        """The anchors for what `record` holds now."""
        return self._view.settled(record)

    @contextmanager
    def writing(self) -> Iterator[Record]:
        """Be the only writer of the record; the system gives the lock back when its holder dies."""
        try:
            with FileLock(self.path / LOCK, timeout=_WAIT_SECONDS):
                self._record.refresh()
                self._record.forget_lost_versions()
                before = self._record.files()
                try:
                    yield self._record
                finally:
                    self._record.seal(before)
        except Timeout as error:
            raise GalleryError(f"Another process is writing to {self.place}: try again when it is done.") from error
        except OSError as error:
            reason = error.strerror or (str(error).splitlines() or [type(error).__name__])[0]
            raise GalleryError(f"{self.place} could not be written ({reason}): what it held before stays.") from error
        finally:
            self._view.look_again()


@contextmanager
def _reaching(place: Place) -> Iterator[None]:
    """An address that cannot be reached is one sentence."""
    try:
        yield
    except (OSError, ValueError) as error:
        if place.address is None or isinstance(error, (ConfigError, GalleryError)):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise GalleryError(f"{place} cannot be reached: check the address and its credentials ({reason}).") from error


def _learned(model: Model) -> np.ndarray | None:
    return None if model.anchors is None else model.anchors.cpu().numpy()


def _checked_metadata(metadata: Mapping[str, Sequence[Any]] | None, count: int) -> dict[str, list[Any]]:
    columns = {name: list(values) for name, values in (metadata or {}).items()}
    for name, values in columns.items():
        if name in COLUMNS:
            raise ConfigError(f"metadata cannot be named {name!r}: the gallery has a column of that name.")
        if len(values) != count:
            raise ConfigError(f"{name} must have {count} entries, one per item, found {len(values)}.")
    return columns
