"""`Gallery`: a folder that holds a picture collection and finds pictures in it."""

from __future__ import annotations

import json
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from filelock import FileLock, Timeout
from PIL import Image

from kedge.errors import ConfigError, GalleryError
from kedge.gallery.anchors import Anchors, extend_anchors, settle_anchors
from kedge.gallery.calibration import Calibration, load_calibration, save_calibration
from kedge.gallery.lists import Lists, open_lists, write_lists
from kedge.gallery.pictures import Added, listed, read_ahead
from kedge.gallery.record import COLUMNS, Record, Version, embeddings_of
from kedge.gallery.search import Part, Result, Snapshot
from kedge.images import read_picture
from kedge.model import Model

__all__ = ["Gallery", "ListKind", "Method"]

FORMAT = 1
KIND = "kedge-gallery"
ListKind = Literal["label", "anchor"]
Method = Literal["two_stage", "brute_force"]

_TAIL = 10_000
"""With more new rows than this, the lists are written anew before the next search."""
_WAIT_SECONDS = 10.0
_LOCK = "writer.lock"
_BATCH = 64


class Gallery:
    """Pictures or vectors in a folder: added, removed, searched, by any number of readers and one writer.

    Make one with `create` or `open`.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], learned: np.ndarray | None, model: Model | None) -> None:
        self.path = path
        self.classes: tuple[str, ...] = tuple(about["classes"])
        self.lists: ListKind = about["lists"]
        self.dim = int(about["dim"])
        self.model = model
        self._learned = learned
        self.calibration = load_calibration(path)
        self._record = Record(path, self.dim)
        self._mutex = threading.RLock()
        self._snapshot: Snapshot | None = None

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
    ) -> Gallery:
        """An empty gallery for the pictures that `model` embeds, or for vectors of one's own.

        Vectors of one's own come with `anchors` (one row per class, named by `classes`) or only with their `dim`:
        then labels route a search by their means, and vectors without labels by k-means centres. `lists` says
        where an item sits: in the list of its label, where that is known, or of its nearest anchor.
        """
        path = Path(path)
        if lists not in get_args(ListKind):
            raise ConfigError(f"lists must be one of {', '.join(get_args(ListKind))}, found {lists!r}.")
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise GalleryError(f"{path} is there already: open it with Gallery.open, or choose another path.")
        if model is not None:
            if anchors is not None or classes is not None or dim is not None:
                raise ConfigError("A model brings its own anchors, classes and dimension: give only the model.")
            learned = None if model.anchors is None else model.anchors.cpu().numpy()
            names, dim = model.classes, model.dim
        else:
            learned, names, dim = _own_anchors(anchors, classes, dim)
        about = {"kind": KIND, "format": FORMAT, "dim": dim, "lists": lists, "classes": list(names)}
        about["model"] = None if model is None else model.fingerprint
        # Made beside its place, so that a kill leaves no half of a gallery there.
        path.parent.mkdir(parents=True, exist_ok=True)
        making = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        making.mkdir()
        try:
            if model is not None:
                model.save(making / "model")
            elif learned is not None:
                np.save(making / "anchors.npy", learned)
            Record.create(making, dim)
            (making / "gallery.json").write_text(json.dumps(about, indent=2, ensure_ascii=False), encoding="utf-8")
            making.rename(path)
        finally:
            shutil.rmtree(making, ignore_errors=True)
        return cls(path, about, learned, model)

    @classmethod
    def open(cls, path: str | Path) -> Gallery:
        """A gallery that is there."""
        path = Path(path)
        about = _read_about(path)
        model = Model.load(path / "model") if about["model"] is not None else None
        if model is not None:
            if model.fingerprint != about["model"]:
                raise GalleryError(
                    f"{path} was made with the model {about['model']}, but holds {model.fingerprint}: put it back."
                )
            learned = None if model.anchors is None else model.anchors.cpu().numpy()
        else:
            file = path / "anchors.npy"
            learned = np.load(file, allow_pickle=False) if file.exists() else None
        return cls(path, about, learned, model)

    # ------------------------------------------------------------------ what it holds

    def __len__(self) -> int:
        return len(self._current())

    def __repr__(self) -> str:
        return f"Gallery({str(self.path)!r}, {len(self):,} items, dim={self.dim}, lists={self.lists})"

    def versions(self) -> list[Version]:
        """The states that can be restored, oldest first."""
        return self._record.versions()

    def restore(self, version: int) -> None:
        """Make an old state the current one."""
        with self._writing():
            self._record.restore(version)

    # ------------------------------------------------------------------ writing

    def add(
        self,
        source: str | Path | Sequence[str | Path],
        labels: Sequence[str | None] | None = None,
        *,
        metadata: Mapping[str, Sequence[Any]] | None = None,
    ) -> Added:
        """Add pictures: a file, several, or a folder, whose first-level folders are labels.

        All of them or, after a kill, none. What is there already (same path, same content) is left out; a picture
        that cannot be read is reported in the result and is not fatal. Returns the ids of what was added.
        """
        if self.model is None:
            raise ConfigError(f"{self.path} was made without a model: use add_embeddings.")
        files, names = listed(source, labels)
        with self._writing():
            there, outdated = self._hashes(files)
            added = Added()
            fragments = []
            first = self._record.reserve(len(files))
            self._record.add_columns(metadata or {})
            for start, batch in read_ahead(files, there, _BATCH, self.model.preprocessing):
                added.skipped += batch.skipped
                added.present += batch.present
                if not batch.rows:
                    continue
                embeddings = self.model.embed(batch.images).numpy()
                rows = [start + row for row in batch.rows]
                paths = [str(files[row]) for row in rows]
                outdated += [there[path][0] for path in paths if path in there]
                columns: dict[str, Any] = {
                    "id": [first + row for row in rows],
                    "path": paths,
                    "label": [names[row] for row in rows],
                    "hash": batch.hashes,
                    "embedding": embeddings,
                }
                columns |= {name: [values[row] for row in rows] for name, values in (metadata or {}).items()}
                fragments += self._record.write(columns)
                added += columns["id"]
            if fragments:
                self._record.commit(fragments)
            self._record.delete(outdated)
        return added

    def add_embeddings(
        self,
        vectors: np.ndarray,
        labels: Sequence[str | None] | None = None,
        paths: Sequence[str | None] | None = None,
        metadata: Mapping[str, Sequence[Any]] | None = None,
    ) -> list[int]:
        """Add vectors of one's own, one row each; all of them or, after a kill, none. Returns their ids."""
        matrix = self._checked(vectors)
        count = len(matrix)
        columns: dict[str, Any] = {"label": labels, "path": paths, **(metadata or {})}
        for name, values in columns.items():
            if values is not None and len(values) != count:
                raise ConfigError(f"{name} must have {count} entries, one per vector, found {len(values)}.")
        if clash := sorted(set(metadata or {}) & set(COLUMNS)):
            raise ConfigError(f"metadata cannot be named {clash[0]!r}: the gallery has a column of that name.")
        if count == 0:
            return []
        with self._writing():
            self._record.add_columns(metadata or {})
            first = self._record.reserve(count)
            ids = list(range(first, first + count))
            given = {name: list(values) for name, values in columns.items() if values is not None}
            self._record.commit(self._record.write({"id": ids, "embedding": matrix, **given}))
        return ids

    def remove(self, ids: int | Sequence[int]) -> int:
        """Remove items; how many of them were there."""
        with self._writing():
            return self._record.delete([ids] if isinstance(ids, int) else ids)

    def calibrate(self, held_out: str | Path | Sequence[str | Path] | np.ndarray, accept: float = 0.95) -> Calibration:
        """Learn from held-out items how far from every anchor a query is unknown, and keep it.

        `held_out` are pictures (a folder, files) or vectors of classes that the gallery knows, which were not trained
        on; of items like these, the share `accept` will count as known.
        """
        if isinstance(held_out, np.ndarray):
            vectors = self._checked(held_out)
        elif self.model is None:
            raise ConfigError(f"{self.path} was made without a model: calibrate with vectors.")
        else:
            vectors = self.model.embed(listed(held_out, None)[0]).numpy()
        nearest = np.sqrt(self._current().anchors.distances(vectors).min(axis=1))
        calibration = Calibration.from_distances(nearest, accept)
        with self._writing():
            save_calibration(self.path, calibration)
            self.calibration = calibration
        return calibration

    def optimize(self) -> None:
        """Fold everything that is new into the lists, and join the record's small files."""
        with self._writing():
            self._record.compact()
            self._write_lists()
            self._snapshot = None

    # ------------------------------------------------------------------ searching

    def search(
        self,
        query: str | Path | bytes | int | Image.Image | np.ndarray,
        k: int = 20,
        method: Method = "two_stage",
        probes: int = 1,
        at_least: int = 0,
        where: str | None = None,
    ) -> Result:
        """The k items most like a picture (path, bytes, PIL image), a vector or an item (its id, itself left out)."""
        snapshot = self._current()
        without = None
        if isinstance(query, (int, np.integer)) and not isinstance(query, bool):
            without = int(query)
            vector = self._vector_of(without)
        elif isinstance(query, np.ndarray) and query.ndim == 1:
            vector = query
        elif self.model is None:
            raise ConfigError(f"{self.path} was made without a model: search with a vector or an id.")
        else:
            picture: Any = read_picture(query) if isinstance(query, bytes) else query
            vector = self.model.embed(picture).numpy()[0]
        matrix = self._checked(np.asarray(vector)[None])
        return self._search(snapshot, matrix, k, method, probes, at_least, where, without)[0]

    def search_embeddings(
        self,
        queries: np.ndarray,
        k: int = 20,
        method: Method = "two_stage",
        probes: int = 1,
        at_least: int = 0,
        where: str | None = None,
    ) -> list[Result]:
        """The k nearest items of each vector."""
        return self._search(self._current(), self._checked(queries), k, method, probes, at_least, where, None)

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
        if method not in get_args(Method):
            raise ConfigError(f"method must be one of {', '.join(get_args(Method))}, found {method!r}.")
        lists = len(snapshot.anchors)
        if not probes >= 1:
            raise ConfigError(f"probes must be at least 1, found {probes}.")
        started = time.perf_counter()
        masks = self._masks(snapshot, where)
        if method == "brute_force":
            probed = [np.arange(lists)] * len(queries)
        else:
            probed = snapshot.probed(queries, min(probes, lists), at_least, masks)
        hits = snapshot.search(queries, k, probed, masks, without)
        seconds = (time.perf_counter() - started) / max(1, len(queries))
        names = snapshot.anchors.names
        return [
            Result(found, [names[place] for place in places.tolist()], strange, seconds)
            for found, places, strange in zip(hits, probed, self._unknown(snapshot, queries), strict=True)
        ]

    # ------------------------------------------------------------------ the current state

    def _current(self) -> Snapshot:
        """The newest state; what it was when the call began, whatever writers do meanwhile."""
        with self._mutex:
            version = self._record.refresh()
            if self._snapshot is None or self._snapshot.version != version:
                self._snapshot = self._look()
            return self._snapshot

    def _look(self) -> Snapshot:
        ids = np.asarray(self._record.columns(["id"]).column("id"))
        opened = open_lists(self.path / "lists")
        if opened is None or len(np.setdiff1d(ids, opened[0].ids, assume_unique=True)) > _TAIL:
            opened = self._renewed_lists() or opened
        if opened is None:
            # A writer is at work: until it is done, everything is searched from memory.
            anchors = settle_anchors(self._record, self._learned, self.classes)
            opened = Lists.empty(self.dim, len(anchors)), anchors
        lists, anchors = opened
        alive = np.isin(lists.ids, ids, assume_unique=True)
        new = np.setdiff1d(ids, lists.ids, assume_unique=True)
        parts = [Part(lists, None if alive.all() else alive)]
        if len(new):
            tail, anchors = self._tail(new, anchors)
            parts.append(Part(tail))
        return Snapshot(self._record.version, anchors, tuple(parts))

    def _renewed_lists(self) -> tuple[Lists, Anchors] | None:
        try:
            with FileLock(self.path / _LOCK, timeout=0):
                self._write_lists()
        except Timeout:
            return None
        return open_lists(self.path / "lists")

    def _tail(self, new: np.ndarray, anchors: Anchors) -> tuple[Lists, Anchors]:
        table = self._record.columns(["id", "path", "label", "embedding"], f"id >= {int(new.min())}")
        table = table.filter(np.isin(np.asarray(table.column("id")), new)).sort_by("id")
        embeddings, labels = embeddings_of(table, self.dim), table.column("label").to_pylist()
        anchors = extend_anchors(anchors, embeddings, labels)
        homes = anchors.assign(embeddings, labels, by_label=self.lists == "label")
        ids = np.asarray(table.column("id"))
        return Lists.in_memory(homes, len(anchors), ids, embeddings, labels, table.column("path").to_pylist()), anchors

    def _write_lists(self) -> None:
        anchors = settle_anchors(self._record, self._learned, self.classes)
        write_lists(self.path / "lists", self._record, anchors, by_label=self.lists == "label")

    def _masks(self, snapshot: Snapshot, where: str | None) -> list[np.ndarray | None]:
        if where is None:
            return [part.alive for part in snapshot.parts]
        wanted = self._record.ids_where(where, snapshot.version)
        masks: list[np.ndarray | None] = []
        for part in snapshot.parts:
            mask = np.isin(part.lists.ids, wanted, assume_unique=True)
            masks.append(mask if part.alive is None else mask & part.alive)
        return masks

    def _unknown(self, snapshot: Snapshot, queries: np.ndarray) -> list[bool | None]:
        if self.calibration is None:
            return [None] * len(queries)
        nearest = np.sqrt(snapshot.anchors.distances(queries).min(axis=1))
        unknown: list[bool | None] = (nearest > self.calibration.threshold).tolist()
        return unknown

    def _vector_of(self, id: int) -> np.ndarray:
        table = self._record.columns(["embedding"], f"id = {id}")
        if len(table) == 0:
            raise ConfigError(f"There is no item {id} in {self.path}.")
        vector: np.ndarray = embeddings_of(table, self.dim)[0]
        return vector

    def _hashes(self, files: Sequence[Path]) -> tuple[dict[str, tuple[int, str]], list[int]]:
        """Id and content hash by path, and the ids of older content that a killed `add` left beside the newer."""
        where = "path IS NOT NULL AND hash IS NOT NULL"
        if len(files) <= 1024:  # beyond, one pass over all paths costs less than so long a filter
            quoted = ("'" + str(file).replace("'", "''") + "'" for file in files)
            where += f" AND path IN ({', '.join(quoted)})" if files else " AND false"
        table = self._record.columns(["id", "path", "hash"], where).sort_by("id")
        there: dict[str, tuple[int, str]] = {}
        outdated = []
        for id, path, digest in zip(*(table.column(name).to_pylist() for name in ("id", "path", "hash")), strict=True):
            if path in there and there[path][1] != digest:
                outdated.append(there[path][0])
            there[path] = (id, digest)
        return there, outdated

    def _checked(self, vectors: Any) -> np.ndarray:
        matrix = np.asarray(vectors, dtype=np.float32)
        if matrix.ndim != 2 or matrix.shape[1] != self.dim:
            shape = " × ".join(map(str, matrix.shape))
            raise ConfigError(f"vectors must be N × {self.dim}, as this gallery holds, found {shape}.")
        if not np.isfinite(matrix).all():
            row = int(np.flatnonzero(~np.isfinite(matrix).all(axis=1))[0])
            raise ConfigError(f"vectors must be finite, found NaN or infinity in row {row}.")
        return matrix

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Be the only writer; the system gives the lock back when its holder dies."""
        try:
            with FileLock(self.path / _LOCK, timeout=_WAIT_SECONDS), self._mutex:
                self._record.refresh()
                yield
        except Timeout as error:
            raise GalleryError(f"Another process is writing to {self.path}: try again when it is done.") from error


def _own_anchors(
    anchors: np.ndarray | None, classes: Sequence[str] | None, dim: int | None
) -> tuple[np.ndarray | None, tuple[str, ...], int]:
    if anchors is None:
        if dim is None or dim < 1:
            raise ConfigError("Give a model, anchors, or the dim of the vectors.")
        return None, tuple(classes or ()), dim
    matrix = np.asarray(anchors, dtype=np.float32)
    if matrix.ndim != 2 or 0 in matrix.shape or not np.isfinite(matrix).all():
        raise ConfigError(f"anchors must be a finite matrix, one row per class, found shape {matrix.shape}.")
    names = tuple(classes) if classes is not None else tuple(map(str, range(len(matrix))))
    if len(names) != len(matrix) or len(set(names)) < len(names):
        raise ConfigError(f"classes must be {len(matrix)} different names, one per anchor.")
    return matrix, names, matrix.shape[1]


def _read_about(path: Path) -> dict[str, Any]:
    file = path / "gallery.json"
    if not path.exists():
        raise GalleryError(f"There is no gallery {path}: check the path, or make one with Gallery.create.")
    try:
        about = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise GalleryError(f"{path} is no gallery: it holds no {file.name}.") from error
    except (OSError, ValueError) as error:
        raise GalleryError(f"{file} is damaged: it cannot be read as JSON.") from error
    if not isinstance(about, dict) or about.get("kind") != KIND:
        raise GalleryError(f"{path} is no Kedge gallery.")
    if about.get("format", 0) > FORMAT:
        raise GalleryError(f"{path} has format {about['format']}, this Kedge reads up to {FORMAT}: upgrade Kedge.")
    return about
