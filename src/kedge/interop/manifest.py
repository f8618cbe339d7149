"""The manifest of exported vectors: what makes the same gallery of them again; and rows in batches."""

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

__all__ = [
    "LIST",
    "VECTOR",
    "Manifest",
    "Rows",
    "coalesce",
    "first_line",
    "to_matrix",
    "vector_column",
    "wrap_read_errors",
]

FORMAT = 1
KIND = "kedge-vectors"
VECTOR = "embedding"
LIST = "kedge_list"
"""The column that says in which anchor's list an item sits."""
_BATCH_BYTES = 64 << 20
_READ_ERRORS = (
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
class Manifest:
    """Everything but the rows of one version of a gallery."""

    dim: int
    lists: ListKind
    classes: tuple[str, ...]
    model: str | None
    """The fingerprint of the model that embeds its images."""
    precision: str
    """Of the lists, in files of earlier releases; now always float32."""
    thumbnails: int
    calibration: dict[str, Any] | None
    next_id: int
    learned: int
    """How many of the anchors were learned; the others follow the items."""
    names: tuple[str | None, ...]
    """The label of each anchor."""
    anchors: np.ndarray

    def to_json(self) -> str:
        """All but the anchors, as JSON."""
        values = {name: value for name, value in vars(self).items() if name != "anchors"}
        return json.dumps({"kind": KIND, "format": FORMAT, **values}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes, anchors: np.ndarray, source: Path) -> Manifest:
        """What :meth:`to_json` wrote, and the anchors; DataError where they do not fit."""
        try:
            content = json.loads(text)
            if content.pop("kind") != KIND:
                raise ValueError("kind")
            if (version := int(content.pop("format"))) > FORMAT:
                raise DataError(f"{source} has format {version}, this Kedge reads up to {FORMAT}: upgrade Kedge.")
            content |= {"classes": tuple(content["classes"]), "names": tuple(content["names"])}
            matrix = np.ascontiguousarray(anchors, np.float32).reshape(-1, int(content["dim"]))
            manifest = cls(**content, anchors=matrix)
            fits = (
                manifest.lists in get_args(ListKind)
                and 0 <= manifest.learned <= len(manifest.names) == len(manifest.anchors)
                and (not manifest.learned or manifest.names[: manifest.learned] == manifest.classes)
                and np.isfinite(manifest.anchors).all()
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{source} is damaged: it does not say what a gallery's vectors must.") from error
        if not fits:
            raise DataError(f"{source} is damaged: its anchors do not fit the names of its classes.")
        return manifest


@dataclass(frozen=True)
class Rows:
    """Rows that can be iterated over several times, in batches."""

    schema: pa.Schema
    count: int
    batches: Callable[[], Iterator[pa.RecordBatch]]


def coalesce(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in fewer and larger batches, of some dozen MiB each."""
    pending: list[pa.RecordBatch] = []
    for batch in batches:
        pending.append(batch)
        if sum(part.nbytes for part in pending) >= _BATCH_BYTES:
            yield from pa.Table.from_batches(pending).combine_chunks().to_batches()
            pending = []
    if pending:
        yield from pa.Table.from_batches(pending).combine_chunks().to_batches()


def vector_column(vectors: np.ndarray) -> pa.Array:
    """A matrix as an Arrow column."""
    flat = pa.array(np.ascontiguousarray(vectors, np.float32).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])


def to_matrix(column: pa.Array, dim: int, source: Path, first: int) -> np.ndarray:
    """An Arrow column of vectors as a matrix; `first` is the number of its first row, for errors."""

    def refuse(wrong: np.ndarray, what: str) -> None:
        if wrong.any():
            raise DataError(f"The vector in row {first + int(np.argmax(wrong))} of {source} {what}.")

    refuse(np.asarray(column.is_null()), "is missing")
    if not pa.types.is_fixed_size_list(column.type):
        refuse(np.asarray(column.value_lengths()) != dim, f"has not the {dim} numbers of the others")
    flat = column.flatten()
    matrix = np.asarray(flat.cast(pa.float32(), safe=False).fill_null(np.nan)).reshape(-1, dim)
    refuse(~np.isfinite(matrix).all(axis=1), "holds NaN, infinity or nothing where a number should be")
    return matrix


@contextmanager
def wrap_read_errors(source: Path, kind: str) -> Iterator[None]:
    """Errors of the libraries that read files, as one sentence."""
    try:
        yield
    except KedgeError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"There is no file {source}: check the path.") from error
    except _READ_ERRORS as error:
        raise DataError(f"{source} cannot be read as {kind}: {first_line(error)}.") from error


def first_line(error: Exception) -> str:
    """What an error of a library says, without its details."""
    return (str(error).splitlines() or [""])[0].rstrip(".") or type(error).__name__
