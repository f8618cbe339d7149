"""Items ordered by list in one array, so that a list is a slice of it: the fast view of the record.

On disk it is a folder of plain arrays that are memory-mapped; in memory the same arrays hold the newest rows.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kedge.errors import GalleryError
from kedge.files import whole_file
from kedge.gallery.anchors import Anchors
from kedge.gallery.record import Record, embeddings_of

__all__ = ["Lists", "open_lists", "write_lists"]

FORMAT = 1
_CURRENT = "current"
_TRIES = 3
"""A view may be replaced while it is opened: then the next one is there."""
_ARRAYS = ("vectors", "norms", "ids", "offsets", "labels", "path_bytes", "path_bounds")


@dataclass(frozen=True)
class Lists:
    """`vectors[offsets[l]:offsets[l + 1]]` are the items of list `l`, by id."""

    vectors: np.ndarray
    norms: np.ndarray
    ids: np.ndarray
    offsets: np.ndarray
    labels: np.ndarray
    """Rows of `label_names`; -1 for none."""
    path_bytes: np.ndarray
    path_bounds: np.ndarray
    label_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def describe(self, rows: np.ndarray) -> tuple[list[str | None], list[str | None], list[int]]:
        """Paths, labels and lists of some rows."""
        letters = memoryview(self.path_bytes)  # type: ignore[arg-type]
        bounds = zip(self.path_bounds.take(rows).tolist(), self.path_bounds.take(rows + 1).tolist(), strict=True)
        paths = [str(letters[a:b], "utf-8", "surrogateescape") if b > a else None for a, b in bounds]
        names = self.label_names
        labels = [names[place] if place >= 0 else None for place in self.labels[rows].tolist()]
        lists: list[int] = (self.offsets.searchsorted(rows, side="right") - 1).tolist()
        return paths, labels, lists

    @classmethod
    def empty(cls, dim: int, count: int) -> Lists:
        """`count` lists without an item."""
        none = np.empty(0, np.int64)
        return cls.in_memory(none, count, none, np.empty((0, dim), np.float32), [], [])

    @classmethod
    def in_memory(
        cls,
        lists: np.ndarray,
        count: int,
        ids: np.ndarray,
        embeddings: np.ndarray,
        labels: Sequence[str | None],
        paths: Sequence[str | None],
    ) -> Lists:
        """Items given in order of their ids, sorted into `count` lists."""
        order = np.argsort(lists, kind="stable")
        names = tuple(dict.fromkeys(label for label in labels if label is not None))
        places = {name: row for row, name in enumerate(names)}
        codes = np.array([places.get(label, -1) if label is not None else -1 for label in labels], dtype=np.int32)
        blobs = [_encoded(paths[row]) for row in order]
        vectors = np.ascontiguousarray(embeddings[order], dtype=np.float32)
        return cls(
            vectors=vectors,
            norms=np.einsum("ij,ij->i", vectors, vectors),
            ids=ids[order],
            offsets=np.concatenate([[0], np.cumsum(np.bincount(lists, minlength=count))]),
            labels=codes.reshape(-1)[order],
            path_bytes=np.frombuffer(b"".join(blobs), np.uint8),
            path_bounds=np.cumsum([0, *(len(blob) for blob in blobs)], dtype=np.int64),
            label_names=names,
        )


def write_lists(root: Path, record: Record, anchors: Anchors, *, by_label: bool) -> None:
    """Write the view of what the record holds now, all or nothing, in memory for one batch at a time.

    Whoever writes must hold the gallery's lock. Each view has a folder of its own, and `current` names the one that
    counts, so that a reader never sees parts of two.
    """
    root.mkdir(exist_ok=True)
    folder = root / secrets.token_hex(8)
    folder.mkdir()
    try:
        names = _fill(folder, record, anchors, by_label=by_label)
        header = {"format": FORMAT, "version": record.version, "learned": anchors.learned, "names": anchors.names}
        (folder / "lists.json").write_text(json.dumps({**header, "label_names": names}))
        for file in folder.iterdir():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        with whole_file(root / _CURRENT) as stream:
            stream.write(folder.name.encode())
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    # Those of before, and what killed writers left; who has one open keeps what is mapped.
    for other in root.iterdir():
        if other.is_dir() and other != folder:
            shutil.rmtree(other, ignore_errors=True)


def open_lists(root: Path) -> tuple[Lists, Anchors] | None:
    """The view and its anchors; None where there is none that can be used."""
    for _ in range(_TRIES):
        found = _open_current(root)
        if found is not None:
            return found
    return None


def _open_current(root: Path) -> tuple[Lists, Anchors] | None:
    try:
        folder = root / (root / _CURRENT).read_text()
        header = json.loads((folder / "lists.json").read_text())
        if header["format"] != FORMAT:
            return None
        # As plain arrays over the mapped bytes: memmap's own class is slow to slice.
        arrays = {name: np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in _ARRAYS}
        anchors = Anchors(np.load(folder / "anchors.npy"), tuple(header["names"]), int(header["learned"]))
        return Lists(**arrays, label_names=tuple(header["label_names"])), anchors
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None


def _fill(folder: Path, record: Record, anchors: Anchors, *, by_label: bool) -> list[str]:
    """First which list every row belongs to, then every row to its place. Returns the labels."""
    keys, homes, lengths = [], [], []
    for batch in record.batches(["id", "path", "label", "embedding"]):
        embeddings, labels = embeddings_of(batch, record.dim), batch.column("label").to_pylist()
        homes.append(anchors.assign(embeddings, labels, by_label=by_label))
        keys.append(np.asarray(batch.column("id")))
        lengths.append(np.array([len(_encoded(path)) for path in batch.column("path").to_pylist()], np.int64))
    ids = np.concatenate([*keys, np.empty(0, np.int64)])
    lists = np.concatenate([*homes, np.empty(0, np.int32)])
    sizes = np.concatenate([*lengths, np.empty(0, np.int64)])
    order = np.lexsort((ids, lists))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    bounds = np.concatenate([[0], np.cumsum(sizes[order])])

    total = len(ids)
    vectors = _new(folder, "vectors", (total, record.dim), np.float32)
    norms = _new(folder, "norms", (total,), np.float32)
    codes = _new(folder, "labels", (total,), np.int32)
    letters = _new(folder, "path_bytes", (int(bounds[-1]),), np.uint8)
    names: dict[str, int] = {}
    seen = 0
    for batch in record.batches(["path", "label", "embedding"]):
        embeddings = embeddings_of(batch, record.dim)
        rows = place[seen : seen + len(embeddings)]
        seen += len(embeddings)
        vectors[rows] = embeddings
        norms[rows] = np.einsum("ij,ij->i", embeddings, embeddings)
        labels = batch.column("label").to_pylist()
        codes[rows] = [names.setdefault(label, len(names)) if label is not None else -1 for label in labels]
        for row, path in zip(rows.tolist(), batch.column("path").to_pylist(), strict=True):
            blob = _encoded(path)
            letters[bounds[row] : bounds[row + 1]] = np.frombuffer(blob, np.uint8)
    if seen != total:
        raise GalleryError("The record changed while its lists were written.")
    for array in (vectors, norms, codes, letters):
        if isinstance(array, np.memmap):
            array.flush()
    offsets = np.concatenate([[0], np.cumsum(np.bincount(lists, minlength=len(anchors)))])
    for name, values in {
        "ids": ids[order],
        "path_bounds": bounds,
        "offsets": offsets,
        "anchors": anchors.vectors,
    }.items():
        np.save(folder / f"{name}.npy", values)
    return list(names)


def _new(folder: Path, name: str, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    path = folder / f"{name}.npy"
    if 0 in shape:
        np.save(path, np.empty(shape, dtype))
        return np.empty(shape, dtype)
    return np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)


def _encoded(path: str | None) -> bytes:
    return b"" if path is None else path.encode("utf-8", "surrogateescape")
