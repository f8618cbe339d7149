"""The columns of a gallery's table: their types, labels in one spelling, and a CRC-32 checksum for each row."""

from __future__ import annotations

import json
import unicodedata
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from kedge.errors import ConfigError, GalleryError, first_line

__all__ = [
    "CHECKSUM",
    "COLUMNS",
    "VECTORS",
    "arrow_array",
    "arrow_batches",
    "check_columns",
    "check_label",
    "check_labels",
    "check_vectors",
    "column_types",
    "damaged_rows",
    "normalize_label",
    "own_columns",
    "require_positive",
    "require_valid",
    "row_checksums",
    "rows_with",
    "seal_json",
    "unseal_json",
    "vectors_of",
]

CHECKSUM = "checksum"
"""The column of the table with the checksum of each row, and the key of a JSON file with that of its other keys."""
COLUMNS = ("id", "path", "label", "hash", "embedding", "thumbnail", "features", CHECKSUM)
"""The columns of a table, of which it may lack some; the user's metadata comes after them.

Tables of the first release have no checksums; `features` are there since format 3, where embeddings differ from them.
"""
VECTORS = ("embedding", "features")
_SEAL = f', "{CHECKSUM}": '.encode()
_BATCH = 2048
"""Rows that Lance is given at once: in one piece, it encodes them more slowly."""
_MAX_ID = 1 << 40
_MAX_NORM = 1e18
"""Squares of larger lengths overflow single precision."""
_BIDIRECTIONAL = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Controls that make a text look like another one."""


def column_types(dim: int, features: int = 0) -> dict[str, pa.DataType]:
    """The Arrow type of each column of a new table, whose `features` have so many numbers (0: it has none)."""
    types = dict.fromkeys(COLUMNS, pa.string()) | {"id": pa.int64(), CHECKSUM: pa.int64(), "thumbnail": pa.binary()}
    types |= {"embedding": pa.list_(pa.float32(), dim), "features": pa.list_(pa.float32(), features)}
    return {name: kind for name, kind in types.items() if features or name != "features"}


def own_columns(schema: pa.Schema) -> tuple[str, ...]:
    """The columns of a table that are not the user's metadata: those up to its checksums, where it has any."""
    names: list[str] = schema.names
    first_release = COLUMNS[: COLUMNS.index("thumbnail") + 1]
    return tuple(names[: names.index(CHECKSUM) + 1]) if CHECKSUM in names else first_release


def arrow_batches(rows: Mapping[str, Any], schema: pa.Schema) -> pa.RecordBatchReader:
    """Rows given as columns of any kind, as batches of this schema; labels are checked, row checksums added."""
    if unknown := set(rows) - set(schema.names):
        raise ConfigError(f"There is no metadata column {min(unknown)!r}; add it first.")
    own, columns = own_columns(schema), {field.name: pa.nulls(len(rows["id"]), field.type) for field in schema}
    for name, values in rows.items():
        kind = schema.field(name).type
        if name in VECTORS and name in own and isinstance(values, np.ndarray):
            flat = pa.array(np.ascontiguousarray(values, np.float32).reshape(-1))
            values = pa.FixedSizeListArray.from_arrays(flat, kind.list_size)
        elif name == "label":
            values = check_labels(values.to_pylist() if isinstance(values, (pa.Array, pa.ChunkedArray)) else values)
        columns[name] = arrow_array(name, values, kind)
    batches: Iterable[pa.RecordBatch] = pa.table(columns, schema).to_batches(_BATCH)
    if CHECKSUM in own:
        batches = map(_with_checksums, batches)
    return pa.RecordBatchReader.from_batches(schema, batches)


def _with_checksums(rows: pa.RecordBatch) -> pa.RecordBatch:
    column = rows.schema.get_field_index(CHECKSUM)
    return rows.set_column(column, rows.schema.field(column), pa.array(row_checksums(rows)))


def arrow_array(name: str, values: Any, kind: pa.DataType | None = None) -> pa.Array | pa.ChunkedArray:
    """A column of any kind as an Arrow array, of the type that it has or of this one."""
    try:
        array = values if isinstance(values, (pa.Array, pa.ChunkedArray)) else pa.array(values)
        return array if kind is None else array.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise ConfigError(f"metadata {name!r} cannot be stored: {first_line(error)}.") from error


def vectors_of(batch: pa.RecordBatch | pa.Table, name: str = "embedding") -> np.ndarray:
    """A column of vectors as a matrix; zeros where there is none."""
    column = batch.column(name)
    dim = column.type.list_size
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    matrices = [np.asarray(chunk.flatten()).reshape(-1, dim) for chunk in chunks]
    matrix = matrices[0] if len(matrices) == 1 else np.concatenate([np.empty((0, dim), np.float32), *matrices])
    if not column.null_count:
        return matrix
    filled = np.zeros((len(column), dim), np.float32)
    filled[np.asarray(column.is_valid())] = matrix
    return filled


def rows_with(batch: pa.RecordBatch, name: str) -> pa.RecordBatch:
    """The rows that have a vector in a column."""
    column = batch.column(name)
    return batch.filter(column.is_valid()) if column.null_count else batch


def check_vectors(vectors: Any, dim: int, name: str = "vectors") -> np.ndarray:
    """Vectors as a float32 matrix, one row each; raises where they are none."""
    matrix = np.ascontiguousarray(vectors, dtype=np.float32)
    if matrix.ndim != 2 or matrix.shape[1] != dim:
        shape = " × ".join(map(str, matrix.shape))
        raise ConfigError(f"{name} must be N × {dim}, as this gallery holds, found {shape}.")
    # One number tells that all are fine; only where it does not, each is checked.
    if not np.vdot(matrix, matrix) < _MAX_NORM**2:
        if not np.isfinite(matrix).all():
            row = int(np.flatnonzero(~np.isfinite(matrix).all(axis=1))[0])
            raise ConfigError(f"{name} must be finite, found NaN or infinity in row {row}.")
        if (largest := float(np.abs(matrix).max())) > _MAX_NORM / dim:
            raise ConfigError(f"{name} must be below {_MAX_NORM / dim:.1e}, found {largest:.1e}: scale them.")
    return matrix


def check_columns(
    count: int,
    labels: Sequence[str | None] | None,
    paths: Sequence[str | None] | None,
    metadata: Mapping[str, Sequence[Any]] | None,
    reserved: Collection[str] = COLUMNS,
) -> dict[str, list[Any]]:
    """Labels, paths and the user's columns, a value of each for every item; raises where they are none."""
    if taken := [name for name in metadata or {} if name in reserved]:
        raise ConfigError(f"metadata cannot be named {taken[0]!r}: the gallery has a column of that name.")
    for name, values in {"labels": labels, "paths": paths, **(metadata or {})}.items():
        if values is not None and len(values) != count:
            raise ConfigError(f"{name} must have {count} entries, one per item, found {len(values)}.")
    if any(path is not None and "\0" in path for path in paths or ()):
        raise ConfigError("paths must not contain a NUL character.")
    columns: dict[str, list[Any]] = {name: list(values) for name, values in (metadata or {}).items()}
    columns["label"] = [None] * count if labels is None else check_labels(labels)
    columns["path"] = [None] * count if paths is None else list(paths)
    return columns


def require_positive(**values: float) -> None:
    """Raise unless these arguments are at least 1."""
    for name, value in values.items():
        if not value >= 1:
            raise ConfigError(f"{name} must be at least 1, found {value}.")


# ---------------------------------------------------------------------- labels


def normalize_label(label: str) -> str:
    """The composed form (NFC) of a label: systems differ in how they spell the names of folders."""
    return label if label.isascii() else unicodedata.normalize("NFC", label)


def check_label(label: str) -> str:
    """A label in its composed form; raises where it is blank or holds bidirectional controls."""
    if not isinstance(label, str):
        raise ConfigError(f"labels must be strings or None, found {label!r}.")
    return _check_text(label)


@lru_cache(maxsize=1 << 16)  # items are many, labels few
def _check_text(label: str) -> str:
    if not any(letter.isprintable() and not letter.isspace() for letter in label):
        raise ConfigError(f"labels must not be blank, found {label!r}; use None for an item without a label.")
    if not label.isascii() and not _BIDIRECTIONAL.isdisjoint(label):
        raise ConfigError(f"labels must not contain bidirectional control characters, found {label!a}; rename it.")
    return normalize_label(label)


def check_labels(labels: Iterable[str | None]) -> list[str | None]:
    """The same of many, some of which may be None."""
    return [None if label is None else check_label(label) for label in labels]


# ---------------------------------------------------------------------- checksums of rows


def row_checksums(rows: pa.RecordBatch | pa.Table) -> np.ndarray:
    """The checksum of each row, over all columns that have a value.

    A column that was added later is empty for the rows before it, and so changes nothing for them.
    """
    checksums, own = [0] * len(rows), own_columns(rows.schema)
    for name in sorted(set(rows.schema.names) - {CHECKSUM}):
        column, key = rows.column(name), zlib.crc32(name.encode())
        if pa.types.is_temporal(column.type):  # as a number: how Python shows it depends on what is installed
            column = column.cast(pa.int32() if column.type.bit_width == 32 else pa.int64())
        if column.null_count == len(rows):
            continue
        if name in own and name in VECTORS:
            matrix = np.ascontiguousarray(vectors_of(rows, name), "<f4")
            content, width = matrix.data.cast("B"), matrix.strides[0]
            cells: Iterable[Any] = (content[start : start + width] for start in range(0, len(content), width))
        elif pa.types.is_string(column.type) or pa.types.is_integer(column.type):
            cells = column.cast(pa.string()).cast(pa.binary()).fill_null(b"").to_pylist()
        else:
            cells = map(_encode_cell, column.to_pylist())
        updated = map(zlib.crc32, cells, [old ^ key for old in checksums])
        if column.null_count:
            values = zip(checksums, updated, column.is_null().to_pylist(), strict=True)
            checksums = [old if missing else new for old, new, missing in values]
        else:
            checksums = list(updated)
    return np.array(checksums, dtype=np.int64)


def _encode_cell(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, (str, int, float)):
        return str(value).encode("utf-8", "surrogatepass")
    return json.dumps(value, sort_keys=True, default=str).encode()


def damaged_rows(rows: pa.RecordBatch | pa.Table) -> np.ndarray:
    """Mask of the rows that differ from their checksum or hold invalid numbers."""
    ids = np.asarray(rows.column("id"))
    damaged: np.ndarray = ~np.isfinite(vectors_of(rows)).all(axis=1) | (ids < 0) | (ids >= _MAX_ID)
    if CHECKSUM in rows.schema.names:
        damaged |= np.asarray(rows.column(CHECKSUM)) != row_checksums(rows)
    return damaged


def require_valid(ids: np.ndarray, embeddings: np.ndarray | None = None) -> None:
    """Raise where an id is out of range or a vector not finite: it would be nearest to nothing, or to everything."""
    if len(ids) and not 0 <= ids.min() <= ids.max() < _MAX_ID:
        raise GalleryError("The table is damaged: it has invalid ids; run kedge info --check.")
    if embeddings is not None and not (finite := np.isfinite(embeddings).all(axis=1)).all():
        raise GalleryError(
            f"The vector of item {ids[~finite][0]} is damaged: it is not finite; run kedge info --check."
        )


# ---------------------------------------------------------------------- checksums of JSON files


def seal_json(values: Mapping[str, Any], indent: int | None = None) -> bytes:
    """A JSON object whose last key is the checksum of the bytes before it."""
    body = json.dumps(values, indent=indent)[:-1].rstrip().encode()
    return body + _SEAL + b"%d}\n" % zlib.crc32(body)


def unseal_json(content: bytes, *, optional: bool = False) -> dict[str, Any]:
    """The object that was sealed; a ValueError where it is another one, or has no checksum that is not `optional`."""
    values = dict(json.loads(content))
    checksum = values.pop(CHECKSUM, None)
    if (checksum is not None or not optional) and checksum != zlib.crc32(content.rpartition(_SEAL)[0]):
        raise ValueError("The checksum differs.")
    return values
