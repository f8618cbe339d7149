"""Inverted lists: items ordered by anchor in one array, so that a list is a slice of it.

On disk it is a folder of plain arrays that are memory-mapped; in memory the same arrays hold the newest rows.
"""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow.compute as pc

from kedge.errors import GalleryError
from kedge.gallery.anchor_index import ARRAYS as INDEX_ARRAYS
from kedge.gallery.anchor_index import AnchorIndex
from kedge.gallery.anchors import Anchors
from kedge.gallery.distances import in_threads, norms_of
from kedge.gallery.schema import require_valid, rows_with, seal_json, unseal_json, vectors_of
from kedge.gallery.table import Table
from kedge.io import atomic_write

__all__ = ["DamagedLists", "InvertedLists", "StoredLists", "open_lists", "write_lists"]

FORMAT = 4
_CURRENT = "current"
_RETRIES = 3
"""Lists may be replaced while they are opened: then the next ones are there."""
_ROW_ARRAYS = ("vectors", "norms", "ids", "labels", "paths")
"""Those with a row for each item, in the order of their common checksums."""
_BLOCKS = "checksums"
_BLOCK = 256
"""Rows that share a checksum."""
_WRITE = 1 << 22
"""Bytes of vectors that are read and written at once; more would each time get memory that was never touched."""
_PATH_WIDTH = 256
"""Bytes; the few paths that are longer are in the header."""


class DamagedLists(GalleryError):
    """Inverted lists whose bytes are not those that were written: they are rebuilt from the table."""


class BlockChecksums:
    """Compares memory-mapped rows with their checksums, a block at a time, before they are first used."""

    def __init__(self, arrays: Sequence[Any], checksums: np.ndarray) -> None:
        self._arrays = arrays
        self._checksums = checksums
        self._pending = np.ones(len(checksums), bool)
        self.all_intact = False

    def check(self, bounds: Sequence[tuple[int, int]]) -> None:
        """Compare the blocks that hold these ranges of rows, unless they were compared before."""
        if self.all_intact:
            return
        ranges = [(start // _BLOCK, -(-end // _BLOCK)) for start, end in bounds if start < end]
        ranges = [(first, last) for first, last in ranges if self._pending[first:last].any()]
        for first, last in ranges:
            self._prefetch(first * _BLOCK, last * _BLOCK)
        for first, last in ranges:
            for block in (first + np.flatnonzero(self._pending[first:last])).tolist():
                if _block_checksum(self._arrays, block) != self._checksums[block]:
                    raise DamagedLists("The inverted lists are damaged: their bytes are not those that were written.")
                self._pending[block] = False
        if ranges:
            self.all_intact = not self._pending.any()

    def _prefetch(self, start: int, end: int) -> None:
        """Ask for all pages of some rows at once (MADV_WILLNEED)."""
        for array in self._arrays if hasattr(mmap, "MADV_WILLNEED") else ():
            width, last = array.nbytes // len(array), min(end, len(array))
            first = (array.offset + start * width) // mmap.PAGESIZE * mmap.PAGESIZE
            array._mmap.madvise(mmap.MADV_WILLNEED, first, array.offset + last * width - first)


def _block_checksum(arrays: Sequence[np.ndarray], block: int) -> int:
    checksum = 0
    for array in arrays:
        checksum = zlib.crc32(array[block * _BLOCK : (block + 1) * _BLOCK].data, checksum)
    return checksum


@dataclass(frozen=True)
class InvertedLists:
    """`vectors[offsets[l]:offsets[l + 1]]` are the items of list `l`, by id."""

    vectors: np.ndarray
    norms: np.ndarray
    ids: np.ndarray
    offsets: np.ndarray
    labels: np.ndarray
    """Indices into `label_names`; -1 for none."""
    paths: np.ndarray
    """As bytes of one width, so that some are taken without touching the others; empty for none or a long one."""
    label_names: tuple[str, ...]
    long_paths: dict[int, str] = field(default_factory=dict)
    blocks: BlockChecksums | None = None
    """Checksums of what is on disk; None for lists in memory."""
    _intact: set[int] = field(default_factory=set, init=False)
    """Lists that were compared with them."""

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def _names(self) -> np.ndarray:
        return np.array([*self.label_names, None], dtype=object)  # -1 is the last

    def bounds(self, number: int) -> tuple[int, int]:
        """The first row of a list and the one after its last; a list that came later is empty."""
        if number + 1 >= len(self.offsets):
            return 0, 0
        return int(self.offsets[number]), int(self.offsets[number + 1])

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Prefetch lists not read yet, and compare their bytes with their checksums."""
        if self.blocks is None or self.blocks.all_intact:
            return
        if pending := [number for number in numbers if number not in self._intact]:
            self.blocks.check([self.bounds(number) for number in pending])
            self._intact.update(pending)

    def verify(self) -> None:
        """Compare all bytes with their checksums, unless that was done before."""
        if self.blocks is not None:
            self.blocks.check([(0, len(self))])

    def verify_rows(self, rows: np.ndarray) -> None:
        """Compare the bytes of some rows with their checksums, unless that was done before."""
        if self.blocks is not None and not self.blocks.all_intact:
            blocks = np.unique(rows // _BLOCK).tolist()
            self.blocks.check([(block * _BLOCK, min((block + 1) * _BLOCK, len(self))) for block in blocks])

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
    def empty(cls, dim: int, count: int) -> InvertedLists:
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
    ) -> InvertedLists:
        """Items in order of their ids, sorted into `count` lists."""
        order = np.argsort(lists, kind="stable")
        names: dict[str | None, int] = {None: -1}
        codes = np.array([names.setdefault(label, len(names) - 1) for label in labels], dtype=np.int32)
        vectors = np.ascontiguousarray(embeddings[order], dtype=np.float32)
        cells, long_paths = _path_cells([paths[row] for row in order])
        return cls(
            vectors=vectors,
            norms=norms_of(vectors),
            ids=ids[order],
            offsets=_offsets(lists, count),
            labels=codes.reshape(-1)[order],
            paths=cells,
            label_names=tuple(name for name in names if name is not None),
            long_paths=long_paths,
        )


class StoredLists(NamedTuple):
    """Inverted lists, their anchors, and the data files of the table that they hold."""

    lists: InvertedLists
    anchors: Anchors
    data_files: dict[str, str]
    name: str = ""
    """Of the folder; none for lists in memory."""


# ---------------------------------------------------------------------- opening


def open_lists(root: Path, known: StoredLists | None = None) -> StoredLists | None:
    """The current lists; None where there are none that can be used. Those `known` are not opened again."""
    for _ in range(_RETRIES):
        try:
            name = (root / _CURRENT).read_text()
            if known is not None and known.name == name:
                return known
            header = unseal_json((root / name / "lists.json").read_bytes())
            # Lists of another precision, which earlier releases wrote, are rebuilt.
            if header["format"] == FORMAT and header.get("precision", "float32") == "float32":
                return _load(root / name, header)
        except Exception:
            continue  # whatever is wrong with them, they can be rebuilt
    return None


def _load(folder: Path, header: dict[str, Any]) -> StoredLists:
    files: dict[str, Any] = {}

    # As plain arrays over the mapped bytes: memmap's own class is slow to slice.
    def load(name: str) -> np.ndarray:
        array = files[name] = np.load(folder / f"{name}.npy", mmap_mode="r")
        dtype, shape, checksum = header["arrays"][name]
        if array.dtype.str != dtype or list(array.shape) != shape:
            raise ValueError(f"{name}.npy has another type or shape than when it was written.")
        if checksum is not None and zlib.crc32(array.data) != checksum:
            raise ValueError(f"{name}.npy is damaged.")
        return np.asarray(array)

    index = AnchorIndex(**{name: load(f"index_{name}") for name in INDEX_ARRAYS}) if header.get("indexed") else None
    vectors = load("anchors") if index is not None else np.array(load("anchors"))
    lists = InvertedLists(
        **{name: load(name) for name in (*_ROW_ARRAYS, "offsets")},
        label_names=tuple(header["label_names"]),
        long_paths={int(row): path for row, path in header["long_paths"].items()},
        blocks=BlockChecksums([files[name] for name in _ROW_ARRAYS], load(_BLOCKS)),
    )
    anchors = Anchors(
        vectors, tuple(header["names"]), int(header["learned"]), index, bool(header.get("learned_first", False))
    )
    return StoredLists(lists, anchors, header["pieces"], folder.name)


# ---------------------------------------------------------------------- writing


def write_lists(root: Path, table: Table, anchors: Anchors, *, by_label: bool, column: str = "embedding") -> None:
    """Write the lists of a column of vectors as the table holds them now, all or nothing, a batch at a time in memory.

    The caller must hold the gallery's lock. Lists have a folder of their own, and `current` names the one that
    counts, so that a reader never sees parts of two.
    """
    root.mkdir(exist_ok=True)
    folder = root / secrets.token_hex(8)
    folder.mkdir()
    try:
        header = _write_arrays(folder, table, anchors, column, by_label=by_label)
        header |= {"format": FORMAT, "pieces": table.data_files(), "learned": anchors.learned, "names": anchors.names}
        header["learned_first"] = anchors.learned_first
        with ThreadPoolExecutor(1) as pool:  # the longest file reaches the disk while it is read for its checksums
            synced = pool.submit(_sync, folder / "vectors.npy")
            header["arrays"] = _describe_arrays(folder)
            synced.result()
        (folder / "lists.json").write_bytes(seal_json(header))
        for file in folder.iterdir():
            _sync(file)
        with atomic_write(root / _CURRENT) as stream:
            stream.write(folder.name.encode())
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    # Earlier lists, and what killed writers left; a process that has them open keeps what is mapped.
    for other in root.iterdir():
        if other.is_dir() and other != folder:
            shutil.rmtree(other, ignore_errors=True)


def _sync(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def _describe_arrays(folder: Path) -> dict[str, Any]:
    """Type, shape and checksum of each array; those with a row for each item have one for every block of rows."""
    arrays = {file.stem: np.load(file, mmap_mode="r") for file in sorted(folder.glob("*.npy"))}
    rows, blocks = [np.asarray(arrays[name]) for name in _ROW_ARRAYS], -(-len(arrays["ids"]) // _BLOCK)
    checksums = dict(in_threads(lambda block: (block, _block_checksum(rows, block)), range(blocks)))
    arrays[_BLOCKS] = np.array([checksums[block] for block in range(blocks)], dtype=np.uint32)
    np.save(folder / f"{_BLOCKS}.npy", arrays[_BLOCKS])
    return {
        name: [array.dtype.str, list(array.shape), None if name in _ROW_ARRAYS else zlib.crc32(array.data)]
        for name, array in arrays.items()
    }


def _write_arrays(folder: Path, table: Table, anchors: Anchors, column: str, *, by_label: bool) -> dict[str, Any]:
    """First assign every row to its list, then write every row. Returns what is in no array."""
    id_batches, list_batches, code_batches = [np.empty(0, np.int64)], [np.empty(0, np.int32)], [np.empty(0, np.int32)]
    names: dict[str | None, int] = {None: -1}
    width = 1
    for all_rows in table.batches(["id", "path", "label", column]):
        batch = rows_with(all_rows, column)
        embeddings, labels = vectors_of(batch, column), batch.column("label").to_pylist()
        id_batches.append(np.asarray(batch.column("id")))
        require_valid(id_batches[-1], embeddings)
        list_batches.append(anchors.assign(embeddings, labels, by_label=by_label))
        code_batches.append(np.array([names.setdefault(label, len(names) - 1) for label in labels], np.int32))
        width = max(width, pc.max(pc.binary_length(batch.column("path"))).as_py() or 1)
    ids, lists, width = np.concatenate(id_batches), np.concatenate(list_batches), min(width, _PATH_WIDTH)
    order = np.lexsort((ids, lists))
    position = np.empty_like(order)
    position[order] = np.arange(len(order))

    total, dim = len(ids), anchors.vectors.shape[1]
    vectors = _allocate(folder, "vectors", (total, dim), "<f4")
    norms = _allocate(folder, "norms", (total,), "<f4")
    paths = _allocate(folder, "paths", (total,), f"S{width}")
    long_paths: dict[int, str] = {}
    written, header_size = 0, (folder / "vectors.npy").stat().st_size - vectors.nbytes
    with (folder / "vectors.npy").open("r+b") as stream:
        for all_rows in table.batches(["path", column], batch_size=max(1, _WRITE // (4 * dim))):
            batch = rows_with(all_rows, column)
            embeddings = vectors_of(batch, column)
            rows = position[written : written + len(embeddings)]
            written += len(embeddings)
            _write_rows(stream, header_size, rows, embeddings)
            norms[rows] = norms_of(embeddings)
            paths[rows], long = _path_cells(batch.column("path").to_pylist(), width)
            long_paths |= {int(rows[row]): path for row, path in long.items()}
    if written != total:
        raise GalleryError("The table changed while its lists were written; run kedge optimize again.")
    for array in (norms, paths):
        if isinstance(array, np.memmap):
            array.flush()
    arrays = {"ids": ids[order], "labels": np.concatenate(code_batches)[order], "anchors": anchors.vectors}
    arrays["offsets"] = _offsets(lists, len(anchors))
    if anchors.index is not None:
        arrays |= {f"index_{name}": getattr(anchors.index, name) for name in INDEX_ARRAYS}
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", np.ascontiguousarray(values))
    label_names = [name for name in names if name is not None]
    return {"indexed": anchors.index is not None, "label_names": label_names, "long_paths": long_paths}


def _allocate(folder: Path, name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    path = folder / f"{name}.npy"
    if 0 in shape:
        np.save(path, empty := np.empty(shape, dtype))
        return empty
    array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    if hasattr(os, "posix_fallocate"):
        # Room for all of it now: a full disk would otherwise end the process at some later assignment.
        with path.open("r+b") as stream:
            os.posix_fallocate(stream.fileno(), 0, path.stat().st_size)
    return array


def _write_rows(stream: BinaryIO, offset: int, rows: np.ndarray, values: np.ndarray) -> None:
    """Write `values` as these rows of an array that starts at `offset`, adjacent ones at once.

    Far faster than through a mapping of the file, whose pages would be faulted in one by one.
    """
    order = np.argsort(rows)
    rows, values = rows[order], values[order]
    starts = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
    ends = np.append(starts, len(rows))[1:]
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        stream.seek(offset + int(rows[start]) * values.strides[0])
        stream.write(values[start:end].data)


def _offsets(lists: np.ndarray, count: int) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.bincount(lists, minlength=count))])


def _path_cells(paths: Sequence[str | None], width: int | None = None) -> tuple[np.ndarray, dict[int, str]]:
    """Paths as bytes of one width (of the longest, by default), and those that are longer, by row."""
    encoded = [(path or "").encode() for path in paths]
    width = width or min(_PATH_WIDTH, max(map(len, encoded), default=0)) or 1
    long = {row: path for row, path in enumerate(paths) if path and len(encoded[row]) > width}
    return np.array([b"" if row in long else cell for row, cell in enumerate(encoded)], dtype=f"S{width}"), long
