"""Items ordered by list in one array, so that a list is a slice of it: the fast view of the record.

On disk it is a folder of plain arrays that are memory-mapped; in memory the same arrays hold the newest rows.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kedge.errors import GalleryError
from kedge.gallery.anchor_index import ARRAYS as INDEX_ARRAYS
from kedge.gallery.anchor_index import AnchorIndex
from kedge.gallery.anchors import Anchors
from kedge.gallery.checksums import RowBlocks, block_checksums, sealed_text, unsealed_text
from kedge.gallery.precision import PRECISIONS, Codes, Precision, described
from kedge.gallery.record import Record, embeddings_of, require_valid
from kedge.gallery.scan import Slice, measured_recall
from kedge.io import atomic_write

__all__ = ["Lists", "Opened", "open_lists", "write_lists"]

FORMAT = 4
_CURRENT = "current"
_TRIES = 3
"""A view may be replaced while it is opened: then the next one is there."""
_ARRAYS = ("vectors", "norms", "ids", "offsets", "labels", "paths")
_CODE_ARRAYS = ("codes", "scales", "norms", "errors")
_ROW_ARRAYS = ("vectors", "norms", "ids", "labels", "paths", "code_codes", "code_scales", "code_norms")
"""Those with a row for each item, in the order of their common checksums."""
_BLOCKS = "checksums"
_AT_ONCE = 16 << 20
"""Bytes of other arrays that are compared with their checksums while the lists are opened, and not later."""
_CAN_FETCH = hasattr(mmap, "MADV_WILLNEED")
_PATH_WIDTH = 256
"""Bytes; the few paths that are longer stand in the header."""


@dataclass(frozen=True)
class Lists:
    """`vectors[offsets[l]:offsets[l + 1]]` are the items of list `l`, by id."""

    vectors: np.ndarray
    norms: np.ndarray
    ids: np.ndarray
    offsets: np.ndarray
    labels: np.ndarray
    """Rows of `label_names`; -1 for none."""
    paths: np.ndarray
    """As bytes of one width, so that some are taken without touching the others; empty for none or a long one."""
    label_names: tuple[str, ...]
    long_paths: dict[int, str] = field(default_factory=dict)
    codes: Codes | None = None
    recall: float | None = None
    """The share of the 100 nearest that a search through the codes finds, measured on some of the items."""
    mapped: tuple[Any, ...] = ()
    """Those arrays of which a search reads the rows of a list, as they lie on disk."""
    blocks: RowBlocks | None = None
    """Checksums of what lies on disk; None for lists in memory."""

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def _names(self) -> np.ndarray:
        return np.array([*self.label_names, None], dtype=object)  # -1 is the last

    def list_at(self, place: int) -> Slice:
        """The rows of a list; none for one that came later."""
        if place + 1 >= len(self.offsets):
            return Slice(place, 0, 0)
        return Slice(place, int(self.offsets[place]), int(self.offsets[place + 1]))

    @cached_property
    def _seen(self) -> np.ndarray:
        return np.zeros(len(self.offsets), bool)

    def prepare(self, places: Sequence[int]) -> None:
        """Prefetch lists that nobody looked at yet (MADV_WILLNEED), and compare their bytes with their checksums."""
        if self.blocks is None or self.blocks.all_intact:
            return
        new = [place for place in places if place + 1 < len(self.offsets) and not self._seen[place]]
        slices = [(int(self.offsets[place]), int(self.offsets[place + 1])) for place in new]
        for start, end in slices:
            if start == end:
                continue
            for array in self.mapped:
                width = array.nbytes // len(array)
                first = (array.offset + start * width) // mmap.PAGESIZE * mmap.PAGESIZE
                array._mmap.madvise(mmap.MADV_WILLNEED, first, array.offset + end * width - first)
        for place, (start, end) in zip(new, slices, strict=True):
            self.blocks.check(start, end)
            self._seen[place] = True

    def prepare_all(self) -> None:
        """Compare all bytes with their checksums, unless that was done before."""
        if self.blocks is not None:
            self.blocks.check_all()

    def describe(self, rows: np.ndarray) -> tuple[list[int], list[str | None], list[str | None]]:
        """Ids, paths and labels of some rows."""
        if not len(rows):
            return [], [], []
        text = b"\0".join(self.paths.take(rows).tolist()).decode("utf-8", "surrogateescape")
        paths: list[str | None] = text.split("\0")  # type: ignore[assignment]
        if "" in paths:
            paths = [path or self.long_paths.get(row) for path, row in zip(paths, rows.tolist(), strict=True)]
        return self.ids.take(rows).tolist(), paths, self._names.take(self.labels.take(rows)).tolist()

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
        vectors = np.ascontiguousarray(embeddings[order], dtype=np.float32)
        sorted_paths = [paths[row] for row in order]
        cells, long = _cells(sorted_paths, _width(sorted_paths))
        return cls(
            vectors=vectors,
            norms=np.einsum("ij,ij->i", vectors, vectors),
            ids=ids[order],
            offsets=np.concatenate([[0], np.cumsum(np.bincount(lists, minlength=count))]),
            labels=codes.reshape(-1)[order],
            paths=cells,
            label_names=names,
            long_paths=long,
        )


class Opened(NamedTuple):
    """Lists, their anchors, and which files of the record they were made of."""

    lists: Lists
    anchors: Anchors
    pieces: dict[str, str]
    name: str = ""
    """Of the folder; none for lists in memory."""


def write_lists(
    root: Path, record: Record, anchors: Anchors, *, by_label: bool, precision: Precision = "float32"
) -> None:
    """Write the view of what the record holds now, all or nothing, in memory for one batch at a time.

    Whoever writes must hold the gallery's lock. Each view has a folder of its own, and `current` names the one that
    counts, so that a reader never sees parts of two.
    """
    root.mkdir(exist_ok=True)
    folder = root / secrets.token_hex(8)
    folder.mkdir()
    try:
        header = _fill(folder, record, anchors, by_label=by_label, precision=precision)
        header |= {"format": FORMAT, "pieces": record.pieces(), "learned": anchors.learned, "names": anchors.names}
        header["arrays"] = _describe_arrays(folder)
        if precision != "float32":
            header["recall"] = measured_recall(_load(folder, header).lists)
        (folder / "lists.json").write_bytes(sealed_text(json.dumps(header)))
        for file in folder.iterdir():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        with atomic_write(root / _CURRENT) as stream:
            stream.write(folder.name.encode())
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    # Those of before, and what killed writers left; who has one open keeps what is mapped.
    for other in root.iterdir():
        if other.is_dir() and other != folder:
            shutil.rmtree(other, ignore_errors=True)


def open_lists(root: Path, known: Opened | None = None) -> Opened | None:
    """The view and its anchors; None where there is none that can be used. Those `known` are not opened again."""
    for _ in range(_TRIES):
        found = _open_current(root, known)
        if found is not None:
            return found
    return None


def _open_current(root: Path, known: Opened | None) -> Opened | None:
    try:
        name = (root / _CURRENT).read_text()
        if known is not None and known.name == name:
            return known
        header = json.loads(unsealed_text((root / name / "lists.json").read_bytes()))
        return _load(root / name, header) if header["format"] == FORMAT else None
    except Exception:
        return None  # whatever is wrong with them, they can be rebuilt


def _describe_arrays(folder: Path) -> dict[str, Any]:
    """Type, shape and checksum of each array; those with a row for each item have one for every block of rows."""
    arrays = {file.stem: np.load(file, mmap_mode="r") for file in sorted(folder.glob("*.npy"))}
    rows = [arrays[name] for name in _ROW_ARRAYS if name in arrays]
    arrays[_BLOCKS] = block_checksums([np.asarray(array) for array in rows], len(arrays["ids"]))
    np.save(folder / f"{_BLOCKS}.npy", arrays[_BLOCKS])
    return {
        name: [array.dtype.str, list(array.shape), None if name in _ROW_ARRAYS else zlib.crc32(array.data)]
        for name, array in arrays.items()
    }


def _load(folder: Path, header: dict[str, Any]) -> Opened:
    # As plain arrays over the mapped bytes: memmap's own class is slow to slice.
    def mapped(name: str) -> np.ndarray:
        array = np.load(folder / f"{name}.npy", mmap_mode="r")
        dtype, shape, checksum = header["arrays"][name]
        if array.dtype.str != dtype or list(array.shape) != shape:
            raise ValueError(f"{name}.npy has another type or shape than when it was written.")
        files[name] = array
        plain = np.asarray(array)
        if checksum is not None and array.nbytes > _AT_ONCE:
            later.append((plain, checksum))
        elif checksum is not None and zlib.crc32(plain.data) != checksum:
            raise ValueError(f"{name}.npy is damaged.")
        return plain

    files: dict[str, Any] = {}
    later: list[tuple[np.ndarray, int]] = []

    names = tuple(header["names"])
    index = AnchorIndex(**{name: mapped(f"index_{name}") for name in INDEX_ARRAYS}) if header.get("indexed") else None
    vectors = mapped("anchors")
    if index is None:
        vectors = np.array(vectors)
    anchors = Anchors(vectors, names, int(header["learned"]), index)
    narrow = PRECISIONS[header["precision"]]
    codes = None
    if narrow is not None:
        codes = Codes(narrow, **{name: mapped(f"code_{name}") for name in _CODE_ARRAYS}, centres=anchors.vectors)
    checksums = mapped(_BLOCKS)
    read = ["ids", "labels", "paths", "vectors" if codes is None else "code_codes"]
    arrays = {name: mapped(name) for name in _ARRAYS}
    rows = [np.asarray(files[name]) for name in _ROW_ARRAYS if name in files]
    lists = Lists(
        **arrays,
        label_names=tuple(header["label_names"]),
        long_paths={int(row): path for row, path in header["long_paths"].items()},
        codes=codes,
        recall=header.get("recall"),
        mapped=tuple(files[name] for name in read if isinstance(files[name], np.memmap)) if _CAN_FETCH else (),
        blocks=RowBlocks(rows, checksums, later),
    )
    return Opened(lists, anchors, header["pieces"], folder.name)


def _fill(folder: Path, record: Record, anchors: Anchors, *, by_label: bool, precision: Precision) -> dict[str, Any]:
    """First which list every row belongs to, then every row to its place. Returns what stands in no array."""
    keys, homes, width = [], [], 1
    for batch in record.batches(["id", "path", "label", "embedding"]):
        embeddings, labels = embeddings_of(batch, record.dim), batch.column("label").to_pylist()
        keys.append(np.asarray(batch.column("id")))
        require_valid(keys[-1], embeddings)
        homes.append(anchors.assign(embeddings, labels, by_label=by_label))
        width = max(width, _width(batch.column("path").to_pylist()))
    ids = np.concatenate([*keys, np.empty(0, np.int64)])
    lists = np.concatenate([*homes, np.empty(0, np.int32)])
    order = np.lexsort((ids, lists))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))

    total, dim = len(ids), record.dim
    vectors = _new(folder, "vectors", (total, dim), np.dtype(np.float32))
    norms = _new(folder, "norms", (total,), np.dtype(np.float32))
    labelled = _new(folder, "labels", (total,), np.dtype(np.int32))
    paths = _new(folder, "paths", (total,), np.dtype(f"S{width}"))
    arrays = [vectors, norms, labelled, paths]
    narrow = PRECISIONS[precision]
    if narrow is not None:
        codes = _new(folder, "code_codes", (total, dim), np.dtype(narrow.dtype))
        scales = _new(folder, "code_scales", (total,), np.dtype(np.float32))
        lengths = _new(folder, "code_norms", (total,), np.dtype(np.float32))
        # Subtracting the anchor costs digits too.
        errors = np.sqrt(np.einsum("ij,ij->i", anchors.vectors, anchors.vectors)) * np.float32(2**-22)
        nearest = np.zeros_like(errors)
        arrays += [codes, scales, lengths]
    names: dict[str, int] = {}
    long: dict[int, str] = {}
    seen = 0
    for batch in record.batches(["path", "label", "embedding"]):
        embeddings = embeddings_of(batch, dim)
        rows = place[seen : seen + len(embeddings)]
        home = lists[seen : seen + len(embeddings)]
        seen += len(embeddings)
        vectors[rows] = embeddings
        norms[rows] = np.einsum("ij,ij->i", embeddings, embeddings)
        labels = batch.column("label").to_pylist()
        labelled[rows] = [names.setdefault(label, len(names)) if label is not None else -1 for label in labels]
        paths[rows], beyond = _cells(batch.column("path").to_pylist(), width)
        long |= {int(rows[row]): path for row, path in beyond.items()}
        if narrow is not None:
            apart = embeddings - anchors.vectors[home]
            code, scale = narrow.encode(apart)
            codes[rows], scales[rows] = code, scale
            lengths[rows], error = described(narrow, apart, code, scale)
            np.maximum.at(nearest, home, error)
    if seen != total:
        raise GalleryError("The record changed while its lists were written.")
    for array in arrays:
        if isinstance(array, np.memmap):
            array.flush()
    offsets = np.concatenate([[0], np.cumsum(np.bincount(lists, minlength=len(anchors)))])
    whole = {"ids": ids[order], "offsets": offsets, "anchors": anchors.vectors}
    if narrow is not None:
        whole["code_errors"] = errors + nearest
    if anchors.index is not None:
        whole |= {f"index_{name}": getattr(anchors.index, name) for name in INDEX_ARRAYS}
    for name, values in whole.items():
        np.save(folder / f"{name}.npy", np.ascontiguousarray(values))
    return {
        "indexed": anchors.index is not None,
        "precision": precision,
        "label_names": list(names),
        "long_paths": long,
    }


def _new(folder: Path, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    path = folder / f"{name}.npy"
    if 0 in shape:
        np.save(path, np.empty(shape, dtype))
        return np.empty(shape, dtype)
    array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    if hasattr(os, "posix_fallocate"):
        # Room for all of it now: a full disk would otherwise end the process at some later assignment.
        with path.open("r+b") as stream:
            os.posix_fallocate(stream.fileno(), 0, path.stat().st_size)
    return array


def _width(paths: Sequence[str | None]) -> int:
    return min(_PATH_WIDTH, max((len(_encoded(path)) for path in paths), default=1) or 1)


def _cells(paths: Sequence[str | None], width: int) -> tuple[np.ndarray, dict[int, str]]:
    """Paths as bytes of one width, and those that are longer, by row."""
    blobs = [_encoded(path) for path in paths]
    long = {row: paths[row] or "" for row, blob in enumerate(blobs) if len(blob) > width}
    cells = np.array([b"" if len(blob) > width else blob for blob in blobs], dtype=f"S{width}")
    return cells, long


def _encoded(path: str | None) -> bytes:
    return b"" if path is None else path.encode("utf-8", "surrogateescape")
