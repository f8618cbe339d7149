"""`Gallery`: a folder that holds a collection of images or embeddings and searches it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
from PIL import Image

from kedge.datasets import is_external
from kedge.deprecation import renamed_keywords
from kedge.errors import ConfigError
from kedge.gallery.anchors import Anchors
from kedge.gallery.calibration import Calibration, CalibrationFile, save_calibration
from kedge.gallery.ingest import Added, add_images, dataset_images, list_with_labels
from kedge.gallery.inverted_lists import DamagedLists
from kedge.gallery.location import Location, wrap_url_errors
from kedge.gallery.manifest import ListKind, Manifest, create_folder, download_folder, open_model, read_manifest
from kedge.gallery.schema import COLUMNS, check_columns, check_vectors, require_positive
from kedge.gallery.search import Item, Result, Snapshot
from kedge.gallery.snapshot import SnapshotLoader
from kedge.gallery.table import MEMORY, Table, Version
from kedge.images import fetch_image, is_url, read_image
from kedge.model import Model

__all__ = ["Gallery", "Item", "Method"]

Method = Literal["two_stage", "brute_force"]
_METHODS = get_args(Method)
Query = str | Path | bytes | int | Image.Image | np.ndarray


class Gallery:
    """Images or embeddings in a folder, for any number of readers and one writer; made with `create` or `open`."""

    precision = "float32"  # of the inverted lists

    def __init__(
        self, location: Location, manifest: Manifest, learned: np.ndarray | None, model: Model | None, memory: int
    ) -> None:
        self.location = location
        self.path = location.folder
        """The folder; of a gallery in an object store, its local cache."""
        self.model = model
        self.classes: tuple[str, ...] = tuple(manifest.classes)
        self.lists: ListKind = manifest.lists
        self.dim = int(manifest.dim)
        self.thumbnails = int(manifest.thumbnails)
        self._calibration = CalibrationFile(self.path)
        self._calibration.load()
        self._table = Table(location, self.dim, memory=memory)
        self._snapshots = SnapshotLoader(self._table, learned, self.classes, by_label=self.lists == "label")

    @classmethod
    @renamed_keywords(precision=None)
    def create(
        cls,
        path: str | Path,
        model: Model | None = None,
        *,
        anchors: np.ndarray | None = None,
        classes: Sequence[str] | None = None,
        dim: int | None = None,
        lists: ListKind = "label",
        thumbnails: int = 0,
    ) -> Gallery:
        """An empty gallery for the images that `model` embeds, or for external embeddings.

        External embeddings come with `anchors` (one row per class, named by `classes`) or only with their `dim`:
        then labels route a search by their means, and vectors without labels by k-means centroids. `lists` says
        where an item sits: in the list of its label, where that is known, or of its nearest anchor. `thumbnails` is
        the longer side of the thumbnails that the gallery keeps of its images; 0 keeps none.
        """
        location = Location.of(path)
        with wrap_url_errors(location):
            return cls(
                location, *create_folder(location, model, anchors, classes, dim, lists, thumbnails), model, MEMORY
            )

    @classmethod
    def open(cls, path: str | Path, model: Model | None = None, *, memory: int = MEMORY) -> Gallery:
        """Open an existing gallery. It holds its model; one that is in memory already saves loading it.

        `memory` is what it may keep in bytes, beside the page cache.
        """
        if memory < 64 << 20:
            raise ConfigError(f"memory must be at least 64 MiB, found {memory / 2**20:g} MiB.")
        location = Location.of(path)
        with wrap_url_errors(location):
            download_folder(location)
        manifest = read_manifest(location)
        model, learned = open_model(location, manifest, model)
        return cls(location, manifest, learned, model, memory)

    def __len__(self) -> int:
        return len(self.snapshot())

    def __repr__(self) -> str:
        return f"Gallery({str(self.location)!r}, {len(self):,} items, dim={self.dim}, lists={self.lists})"

    @property
    def calibration(self) -> Calibration | None:
        """When a query is unknown, if the gallery was calibrated, by this process or another."""
        return self._calibration.load()

    def snapshot(self) -> Snapshot:
        """The newest version: its anchors and lists. It never changes, whatever writers do meanwhile."""
        return self._snapshots.latest()

    def verified_snapshot(self) -> Snapshot:
        """The same for a reader of all of it: all lists and the table were compared with their checksums."""
        self._table.latest().verify()
        return self._snapshots.verified()

    def item(self, id: int) -> Item:
        """Path, label and metadata of one item."""
        row = self._table.latest().row(id)
        return Item(id, row["path"], row["label"], {name: row[name] for name in row if name not in COLUMNS})

    def thumbnail(self, id: int) -> bytes | None:
        """The thumbnail (JPEG) of an item's image, if the gallery keeps any."""
        content: bytes | None = self._table.latest().row(id)["thumbnail"]
        return content

    def vector(self, id: int) -> np.ndarray:
        """The embedding of one item."""
        return np.asarray(self._table.latest().row(id)["embedding"])

    def ids(self, where: str | None = None) -> list[int]:
        """The items that match, such as `"label = 'cat'"`, in order."""
        return sorted(self._table.latest().columns(["id"], where).column("id").to_pylist())

    def check_filter(self, where: str) -> None:
        """Raise unless a filter is one expression over the columns of this gallery, and nothing behind it."""
        self._table.latest().check_filter(where)

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """All items in batches of some thousand: id, path, label, hash, embedding, thumbnail and metadata."""
        return self._table.latest().batches(columns)

    def check(self) -> str:
        """Compare all with its checksums, in a sentence; damaged lists are rebuilt, a damaged table raises."""
        table = self._table.latest()
        table.check()
        self._snapshots.reopen()
        before = self.snapshot()
        after = self._snapshots.verified()
        lists = "as they were written" if before is after else "were damaged and have been rebuilt"
        return f"the table of {len(table):,} items is as it was written, its lists {lists}"

    def touch(self) -> None:
        """Raise unless the table can be read; for health checks."""
        self._table.touch()

    def versions(self) -> list[Version]:
        """The versions that can be restored, oldest first."""
        return self._table.versions()

    def restore(self, version: int) -> None:
        """Make an old version the current one."""
        with self.writing() as table:
            table.restore(version)

    def add(
        self,
        source: Any,
        labels: Sequence[str | None] | None = None,
        *,
        metadata: Mapping[str, Sequence[Any]] | None = None,
        commit_every: int | None = None,
        progress: Callable[[Added], None] | None = None,
    ) -> Added:
        """Add images: a file, several, a folder, whose first-level folders are labels, or a labelled dataset.

        A dataset is a map-style one of PyTorch, a Hugging Face `Dataset` or `DatasetDict`, or a dictionary of such.
        What is there already (same path, same content) is left out; an image that cannot be read is reported in
        the result and is not fatal. Returns the ids of what was added: all of them are there or, after a kill, none;
        with `commit_every`, those that were complete when it came. `progress` is called as the work goes on.
        """
        if self.model is None:
            raise ConfigError(f"{self.location} was made without a model: use add_embeddings.")
        require_positive(commit_every=1 if commit_every is None else commit_every)
        files, names = dataset_images(source, labels) if is_external(source) else list_with_labels(source, labels)
        columns = check_columns(len(files), names, None, metadata)
        with self.writing() as table:
            return add_images(table, self.model, files, columns, self.thumbnails, commit_every or len(files), progress)

    def add_embeddings(
        self,
        vectors: np.ndarray,
        labels: Sequence[str | None] | None = None,
        paths: Sequence[str | None] | None = None,
        metadata: Mapping[str, Sequence[Any]] | None = None,
    ) -> list[int]:
        """Add external embeddings, one row each; all of them or, after a kill, none. Returns their ids."""
        matrix = self.check_vectors(vectors)
        columns = check_columns(len(matrix), labels, paths, metadata)
        if not len(matrix):
            return []
        with self.writing() as table:
            table.add_columns(columns)
            first = table.reserve_ids(len(matrix))
            ids = list(range(first, first + len(matrix)))
            table.commit(table.write({"id": ids, "embedding": matrix, **columns}))
        return ids

    def remove(self, ids: int | Sequence[int]) -> int:
        """Remove items; how many of them were there."""
        with self.writing() as table:
            return table.delete([ids] if isinstance(ids, int) else ids)

    def calibrate(self, held_out: str | Path | Sequence[str | Path] | np.ndarray, accept: float = 0.95) -> Calibration:
        """Learn from held-out items how far from every anchor a query is unknown, and keep it.

        `held_out` are images (a folder, files) or vectors of classes that the gallery knows, which were not trained
        on; of items like these, the share `accept` will count as known.
        """
        if isinstance(held_out, np.ndarray):
            vectors = self.check_vectors(held_out)
        elif self.model is None:
            raise ConfigError(f"{self.location} was made without a model: calibrate with vectors.")
        else:
            vectors = self.model.embed(list_with_labels(held_out)[0]).numpy()
        nearest = np.sqrt(self._snapshots.verified().anchors.nearest_squares(vectors))
        calibration = Calibration.from_distances(nearest, accept)
        with self.writing():
            save_calibration(self.location, calibration)
        return calibration

    def optimize(self, *, forget: float | None = None) -> None:
        """Fold everything that is new into the inverted lists, and join the table's small files.

        Versions older than `forget` days can then not be restored, and their files make room; by default all are kept.
        """
        if forget is not None and not forget >= 0:
            raise ConfigError(f"forget must be a number of days, at least 0, found {forget}.")
        with self.writing() as table:
            # What is damaged must not be written on, and the versions before it must not be forgotten.
            table.check()
            table.compact()
            if forget is not None:
                table.forget(forget)
            table.seal((), prune=True)
            self._snapshots.write_lists(table)

    @renamed_keywords(at_least="min_candidates")
    def search(
        self,
        query: Query,
        k: int = 20,
        method: Method = "two_stage",
        probes: int = 1,
        min_candidates: int = 0,
        where: str | None = None,
        *,
        allow_url: bool = False,
    ) -> Result:
        """The k items most like an image (path, bytes, PIL image), a vector or an item (its id, itself left out).

        Searches the inverted lists of the `probes` nearest anchors, and more until they hold `min_candidates` items.
        The image behind an http(s) URL is fetched only with `allow_url`.
        """
        vector, exclude_id = self.query_vector(query, allow_url=allow_url)
        return self.search_embeddings(vector[None], k, method, probes, min_candidates, where, exclude_id=exclude_id)[0]

    def query_vector(self, query: Query, *, allow_url: bool = False) -> tuple[np.ndarray, int | None]:
        """The vector of a query, and the id to exclude where the query is an item."""
        if isinstance(query, (int, np.integer)) and not isinstance(query, bool):
            return self.vector(int(query)), int(query)
        if isinstance(query, np.ndarray) and query.ndim == 1:
            return query, None
        if self.model is None:
            raise ConfigError(f"{self.location} was made without a model: search with a vector or an id.")
        image: Any = query
        if isinstance(query, str) and is_url(query):
            if not allow_url:
                raise ConfigError(f"{query} is an address: say allow_url=True (--url) to have it fetched.")
            image = fetch_image(query)
        elif isinstance(query, bytes):
            image = read_image(query)
        return self.model.embed(image).numpy()[0], None

    @renamed_keywords(at_least="min_candidates", without="exclude_id")
    def search_embeddings(
        self,
        queries: np.ndarray,
        k: int = 20,
        method: Method = "two_stage",
        probes: int = 1,
        min_candidates: int = 0,
        where: str | None = None,
        *,
        exclude_id: int | None = None,
        snapshot: Snapshot | None = None,
    ) -> list[Result]:
        """The k nearest items of each vector, but for `exclude_id`; in the newest version, or in a `snapshot`."""
        matrix = self.check_vectors(queries)
        require_positive(k=k, probes=probes)
        if method not in _METHODS:
            raise ConfigError(f"method must be one of {', '.join(_METHODS)}, found {method!r}.")
        lists = probes if method == "two_stage" else None
        snapshot = self.snapshot() if snapshot is None else snapshot
        started = time.perf_counter()
        try:
            masks = None if where is None else self._snapshots.masks(snapshot, where)
            hits, probed = snapshot.search(matrix, k, lists, min_candidates, masks, exclude_id)
        except DamagedLists:
            snapshot = self._snapshots.repaired(snapshot)
            masks = None if where is None else self._snapshots.masks(snapshot, where)
            hits, probed = snapshot.search(matrix, k, lists, min_candidates, masks, exclude_id)
        seconds = (time.perf_counter() - started) / max(1, len(matrix))
        names, nearest = snapshot.anchors.names, None
        if probed is None:
            anchors = [list(names)] * len(matrix)
        else:
            nearest = np.array([numbers[0] for numbers in probed], dtype=np.int64)
            anchors = [[names[number] for number in numbers.tolist()] for numbers in probed]
        unknown = self.is_unknown(snapshot.anchors, matrix, nearest)
        return [Result(*of_query, seconds) for of_query in zip(hits, anchors, unknown, strict=True)]

    def is_unknown(self, anchors: Anchors, queries: np.ndarray, nearest: np.ndarray | None = None) -> list[bool | None]:
        """Whether each query is far from every anchor, the `nearest` if known; None without a calibration."""
        if (calibration := self.calibration) is None:
            return [None] * len(queries)
        unknown: list[bool | None] = (
            np.sqrt(anchors.nearest_squares(queries, nearest)) > calibration.threshold
        ).tolist()
        return unknown

    def check_vectors(self, vectors: Any) -> np.ndarray:
        """Vectors as a float32 matrix of this gallery's dimension, one row each; raises where they are none."""
        return check_vectors(vectors, self.dim)

    def anchors_for(self, table: Table) -> Anchors:
        """The anchors for what `table` holds now."""
        return self._snapshots.anchors(table)

    @contextmanager
    def writing(self) -> Iterator[Table]:
        """Be the only writer of the table; the system releases the lock when its holder dies."""
        try:
            with self._table.writing():
                yield self._table
        finally:
            self._snapshots.invalidate()
