"""The columns of a gallery's table: their types, labels in one spelling, and which rows can be valid."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from kedge.errors import ConfigError, GalleryError
from kedge.gallery.checksums import CHECKSUM, row_checksums

__all__ = [
    "COLUMNS",
    "arrow_columns",
    "check_label",
    "check_labels",
    "column_types",
    "damaged_rows",
    "embeddings_of",
    "first_line",
    "normalize_label",
    "require_valid",
]

COLUMNS = ("id", "path", "label", "hash", "embedding", "thumbnail", CHECKSUM)
"""The columns of every table; the user's metadata comes after them. The first releases wrote no checksums."""
_MAX_ID = 1 << 40
_BIDIRECTIONAL = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Controls that make a text look like another one."""


def column_types(dim: int) -> dict[str, pa.DataType]:
    """The Arrow type of each of `COLUMNS`."""
    text, number = pa.string(), pa.int64()
    types = (number, text, text, text, pa.list_(pa.float32(), dim), pa.binary(), number)
    return dict(zip(COLUMNS, types, strict=True))


def arrow_columns(rows: Mapping[str, Any], dim: int) -> pa.Table:
    """Rows given as columns of any kind, as an Arrow table; labels are checked."""
    types, columns = column_types(dim), {}
    for name, values in rows.items():
        if name == "embedding":
            flat = pa.array(np.ascontiguousarray(values, np.float32).reshape(-1))
            columns[name] = pa.FixedSizeListArray.from_arrays(flat, dim)
            continue
        if name == "label":
            is_arrow = isinstance(values, (pa.Array, pa.ChunkedArray))
            values = check_labels(values.to_pylist() if is_arrow else values)
        try:
            columns[name] = pa.array(values, types.get(name))
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ConfigError(f"metadata {name!r} cannot be stored: {first_line(error)}") from error
    return pa.table(columns)


def embeddings_of(batch: pa.RecordBatch | pa.Table, dim: int) -> np.ndarray:
    """The embedding column as a matrix."""
    column = batch.column("embedding")
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # an empty table has no chunk
        return np.empty((0, dim), np.float32)
    return np.asarray(column.flatten()).reshape(-1, dim)


# ---------------------------------------------------------------------- labels


def normalize_label(label: str) -> str:
    """The composed form (NFC) of a label: systems differ in how they spell the names of folders."""
    return label if label.isascii() else unicodedata.normalize("NFC", label)


def check_label(label: str) -> str:
    """A label in its composed form; raises where it is blank or holds bidirectional controls."""
    if not isinstance(label, str):
        raise ConfigError(f"labels must be texts or None, found {label!r}.")
    if not any(letter.isprintable() and not letter.isspace() for letter in label):
        raise ConfigError(f"labels must not be blank, found {label!r}: give None for an item without a label.")
    if not label.isascii() and not _BIDIRECTIONAL.isdisjoint(label):
        raise ConfigError(f"labels must not hold bidirectional control characters, found {label!a}: rename it.")
    return normalize_label(label)


def check_labels(labels: Iterable[str | None]) -> list[str | None]:
    """The same of many, some of which may be None."""
    return [None if label is None else check_label(label) for label in labels]


# ---------------------------------------------------------------------- valid rows


def require_valid(ids: np.ndarray, embeddings: np.ndarray | None = None) -> None:
    """Raise where an id is out of range or a vector not finite: it would be nearest to nothing, or to everything."""
    if len(ids) and not 0 <= ids.min() <= ids.max() < _MAX_ID:
        raise GalleryError("The table is damaged, it holds ids that no item can have: kedge info --check names them.")
    finite = np.ones(0, bool) if embeddings is None else np.isfinite(embeddings).all(axis=1)
    if not finite.all():
        raise GalleryError(
            f"The vector of item {ids[~finite][0]} is damaged, it is not finite: kedge info --check says what to do."
        )


def damaged_rows(rows: pa.RecordBatch | pa.Table, dim: int) -> np.ndarray:
    """Mask of the rows that differ from their checksum or hold invalid numbers."""
    damaged: np.ndarray = ~np.isfinite(embeddings_of(rows, dim)).all(axis=1)
    ids = np.asarray(rows.column("id"))
    damaged |= (ids < 0) | (ids >= _MAX_ID)
    if CHECKSUM in rows.schema.names:
        written = rows.column(CHECKSUM).to_numpy(zero_copy_only=False) if len(rows) else np.empty(0)
        # The first releases leave the cells empty.
        damaged |= ~np.isnan(written.astype(np.float64)) & (written != row_checksums(rows, dim))
    return damaged


def first_line(error: BaseException) -> str:
    """What an error of a library says, without its details."""
    return (str(error).splitlines() or [type(error).__name__])[0]
