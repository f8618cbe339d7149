"""The columns of a gallery's table: their types, labels in one spelling, and a CRC-32 checksum for each row."""

from __future__ import annotations

import json
import unicodedata
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from kedge.errors import ConfigError, GalleryError

__all__ = [
    "CHECKSUM",
    "COLUMNS",
    "arrow_columns",
    "check_count",
    "check_label",
    "check_labels",
    "check_metadata",
    "check_vectors",
    "column_types",
    "damaged_rows",
    "embeddings_of",
    "first_line",
    "json_checksum",
    "normalize_label",
    "require_valid",
    "row_checksums",
    "seal_text",
    "unseal_text",
]

CHECKSUM = "checksum"
"""The column of the table with the checksum of each row, and the key of a JSON file with that of its other keys."""
COLUMNS = ("id", "path", "label", "hash", "embedding", "thumbnail", CHECKSUM)
"""The columns of every table; the user's metadata comes after them. The first release wrote no checksums."""
_MAX_ID = 1 << 40
_MAX_NORM = 1e18
"""Squares of larger lengths overflow single precision."""
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
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    matrices = [np.asarray(chunk.flatten()).reshape(-1, dim) for chunk in chunks]
    return matrices[0] if len(matrices) == 1 else np.concatenate([np.empty((0, dim), np.float32), *matrices])


def check_vectors(vectors: Any, dim: int) -> np.ndarray:
    """Vectors as a float32 matrix, one row each; raises where they are none."""
    matrix = np.ascontiguousarray(vectors, dtype=np.float32)
    if matrix.ndim != 2 or matrix.shape[1] != dim:
        shape = " × ".join(map(str, matrix.shape))
        raise ConfigError(f"vectors must be N × {dim}, as this gallery holds, found {shape}.")
    # One number tells that all are fine; only where it does not, each is checked.
    if not np.vdot(matrix, matrix) < _MAX_NORM**2:
        if not np.isfinite(matrix).all():
            row = int(np.flatnonzero(~np.isfinite(matrix).all(axis=1))[0])
            raise ConfigError(f"vectors must be finite, found NaN or infinity in row {row}.")
        if (largest := float(np.abs(matrix).max())) > _MAX_NORM / dim:
            raise ConfigError(f"vectors must be below {_MAX_NORM / dim:.1e}, found {largest:.1e}: scale them.")
    return matrix


def check_metadata(metadata: Mapping[str, Sequence[Any]] | None, count: int) -> dict[str, list[Any]]:
    """The user's columns; raises where they have the name of another column, or not a value for each item."""
    columns = {name: list(values) for name, values in (metadata or {}).items()}
    for name, values in columns.items():
        if name in COLUMNS:
            raise ConfigError(f"metadata cannot be named {name!r}: the gallery has a column of that name.")
        check_count(name, values, count)
    return columns


def check_count(name: str, values: Sequence[Any] | None, count: int) -> None:
    """Raise unless there are as many values as items, or none at all."""
    if values is not None and len(values) != count:
        raise ConfigError(f"{name} must have {count} entries, one per item, found {len(values)}.")


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


# ---------------------------------------------------------------------- checksums of rows


def row_checksums(rows: pa.RecordBatch | pa.Table, dim: int) -> np.ndarray:
    """The checksum of each row, over all columns that have a value.

    A column that was added later is empty for the rows before it, and so changes nothing for them.
    """
    checksums = [0] * len(rows)
    for name in sorted(set(rows.schema.names) - {CHECKSUM}):
        column, key = rows.column(name), zlib.crc32(name.encode())
        if pa.types.is_temporal(column.type):  # as a number: how Python shows it depends on what is installed
            column = column.cast(pa.int32() if column.type.bit_width == 32 else pa.int64())
        cells: Iterable[bytes | None]
        if name == "embedding":
            cells = (row.tobytes() for row in embeddings_of(rows, dim).astype("<f4", copy=False))
        elif column.null_count == len(rows):
            continue
        else:
            cells = map(_encode_cell, column.to_pylist())
        for row, cell in enumerate(cells):
            if cell is not None:
                checksums[row] = zlib.crc32(cell, checksums[row] ^ key)
    return np.array(checksums, dtype=np.int64)


def _encode_cell(value: Any) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, (str, int, float)):
        return str(value).encode("utf-8", "surrogatepass")
    return json.dumps(value, sort_keys=True, default=str).encode()


def damaged_rows(rows: pa.RecordBatch | pa.Table, dim: int) -> np.ndarray:
    """Mask of the rows that differ from their checksum or hold invalid numbers."""
    ids = np.asarray(rows.column("id"))
    damaged: np.ndarray = ~np.isfinite(embeddings_of(rows, dim)).all(axis=1) | (ids < 0) | (ids >= _MAX_ID)
    if CHECKSUM in rows.schema.names and len(rows):
        written = rows.column(CHECKSUM).to_numpy(zero_copy_only=False)
        # The first release leaves the cells empty.
        damaged |= ~np.isnan(written.astype(np.float64)) & (written != row_checksums(rows, dim))
    return damaged


def require_valid(ids: np.ndarray, embeddings: np.ndarray | None = None) -> None:
    """Raise where an id is out of range or a vector not finite: it would be nearest to nothing, or to everything."""
    if len(ids) and not 0 <= ids.min() <= ids.max() < _MAX_ID:
        raise GalleryError("The table is damaged, it holds ids that no item can have: kedge info --check names them.")
    if embeddings is not None and not (finite := np.isfinite(embeddings).all(axis=1)).all():
        raise GalleryError(
            f"The vector of item {ids[~finite][0]} is damaged, it is not finite: kedge info --check says what to do."
        )


# ---------------------------------------------------------------------- checksums of JSON files


def json_checksum(values: Mapping[str, Any]) -> int:
    """The checksum of a JSON object without its own entry, whatever the order and spacing of the file."""
    rest = {name: value for name, value in values.items() if name != CHECKSUM}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def seal_text(text: str) -> bytes:
    """A text behind a line with its checksum."""
    content = text.encode()
    return f"{zlib.crc32(content):08x}\n".encode() + content


def unseal_text(content: bytes) -> bytes:
    """The text behind the checksum; a ValueError where they do not agree."""
    checksum, _, text = content.partition(b"\n")
    if checksum != f"{zlib.crc32(text):08x}".encode():
        raise ValueError("The checksum differs.")
    return text


def first_line(error: BaseException) -> str:
    """What an error of a library says, without its details."""
    return (str(error).splitlines() or [type(error).__name__])[0]
