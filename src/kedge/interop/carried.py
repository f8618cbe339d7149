"""What travels with vectors: the rows, and what makes a gallery of them again."""

from __future__ import annotations

import json
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa

from kedge.errors import DataError, KedgeError
from kedge.gallery.manifest import ListKind

__all__ = ["HOME", "VECTOR", "Carried", "Rows", "first_line", "gathered", "matrix", "reading", "vector_column"]

FORMAT = 1
KIND = "kedge-vectors"
VECTOR = "embedding"
HOME = "kedge_list"
"""The column that says in which anchor's list an item sits."""
_GATHERED = 64 << 20
_BROKEN = (
    OSError,
    ValueError,
    KeyError,
    EOFError,
    RuntimeError,
    MemoryError,
    struct.error,
    zlib.error,
    zipfile.BadZipFile,
    pa.ArrowException,
)


@dataclass(frozen=True)
class Carried:
    """What a gallery is beside its rows, in one state."""

    dim: int
    lists: ListKind
    classes: tuple[str, ...]
    model: str | None
    """The fingerprint of the model that embeds its pictures."""
    precision: str
    """Of the lists, in files of earlier releases; now always float32."""
    thumbnails: int
    calibration: dict[str, Any] | None
    next_id: int
    learned: int
    """So many of the anchors were learned; the others follow the items."""
    names: tuple[str | None, ...]
    """The label of each anchor."""
    anchors: np.ndarray

    def written(self) -> str:
        """All but the anchors, as JSON."""
        values = {name: value for name, value in vars(self).items() if name != "anchors"}
        return json.dumps({"kind": KIND, "format": FORMAT, **values}, ensure_ascii=False)

    @classmethod
    def read(cls, text: str | bytes, anchors: np.ndarray, source: Path) -> Carried:
        """The same from JSON and anchors; what does not fit is refused."""
        try:
            said = json.loads(text)
            if said.pop("kind") != KIND:
                raise ValueError("kind")
            if (written := int(said.pop("format"))) > FORMAT:
                raise DataError(f"{source} has format {written}, this Kedge reads up to {FORMAT}: upgrade Kedge.")
            said |= {"classes": tuple(said["classes"]), "names": tuple(said["names"])}
            found = cls(**said, anchors=np.ascontiguousarray(anchors, np.float32).reshape(-1, int(said["dim"])))
            fits = (
                found.lists in get_args(ListKind)
                and 0 <= found.learned <= len(found.names) == len(found.anchors)
                and (not found.learned or found.names[: found.learned] == found.classes)
                and np.isfinite(found.anchors).all()
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{source} is damaged: it does not say what a gallery's vectors must.") from error
        if not fits:
            raise DataError(f"{source} is damaged: its anchors do not fit the names of its classes.")
        return found


@dataclass(frozen=True)
class Rows:
    """Rows that can be read from the beginning, some at a time."""

    schema: pa.Schema
    count: int
    batches: Callable[[], Iterator[pa.RecordBatch]]


def gathered(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in fewer and larger batches, of some dozen MiB each."""
    waiting: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        waiting.append(batch)
        size += batch.nbytes
        if size >= _GATHERED:
            yield _joined(waiting)
            waiting, size = [], 0
    if waiting:
        yield _joined(waiting)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    table = pa.Table.from_batches(batches).combine_chunks()
    return next(iter(table.to_batches()), batches[0])


def vector_column(vectors: np.ndarray) -> pa.Array:
    """A matrix as a column of vectors."""
    flat = pa.array(np.ascontiguousarray(vectors, np.float32).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])


def matrix(column: pa.Array, dim: int, source: Path, first: int) -> np.ndarray:
    """A column of vectors as a matrix; `first` is the number of its first row, for whom something is wrong with."""

    def refuse(wrong: np.ndarray, what: str) -> None:
        if wrong.any():
            raise DataError(f"The vector in row {first + int(np.argmax(wrong))} of {source} {what}.")

    refuse(np.asarray(column.is_null()), "is missing")
    if not pa.types.is_fixed_size_list(column.type):
        lengths = np.asarray(column.value_lengths())
        refuse(lengths != dim, f"has not the {dim} numbers of the others")
    flat = column.flatten()
    found = np.asarray(flat.cast(pa.float32(), safe=False).fill_null(np.nan)).reshape(-1, dim)
    refuse(~np.isfinite(found).all(axis=1), "holds NaN, infinity or nothing where a number should be")
    return found


@contextmanager
def reading(source: Path, kind: str) -> Iterator[None]:
    """What cannot be read as `kind` is one sentence."""
    try:
        yield
    except KedgeError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"There is no file {source}: check the path.") from error
    except _BROKEN as error:
        raise DataError(f"{source} cannot be read as {kind}: {first_line(error)}.") from error


def first_line(error: Exception) -> str:
    """What an error of a library says, without its details."""
    return (str(error).splitlines() or [""])[0].rstrip(".") or type(error).__name__
