"""Vectors as NumPy arrays: `.npz` exports, and anyone's `.npz` and `.npy` files. Nothing is pickled."""

from __future__ import annotations

import io
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa

from kedge.errors import DataError
from kedge.interop.rows import LIST, VECTOR, Manifest, Rows, choose_column

__all__ = ["read_arrays", "write_npz"]

_NAMES = {"id": "ids", VECTOR: "vectors", "label": "labels", "path": "paths", LIST: "lists"}
"""The array names of a gallery's columns; metadata columns are called metadata.NAME."""
_MISSING, _ARROW = ".missing", ".arrow"
_MANIFEST, _ANCHORS, _SCHEMA = "kedge", "anchors", "kedge.schema"


def write_npz(stream: IO[bytes], manifest: Manifest, rows: Rows) -> None:
    """Write one array per column."""
    vectors = np.empty((rows.count, manifest.dim), "<f4")
    rest: list[pa.RecordBatch] = []
    done = 0
    for batch, part in rows.matrices(manifest.dim):
        vectors[done : done + len(part)] = part
        rest.append(batch.drop_columns([VECTOR]))
        done += len(part)
    schema = pa.schema([field for field in rows.schema if field.name != VECTOR])
    table = pa.Table.from_batches(rest, schema).combine_chunks()
    arrays: dict[str, Any] = {"vectors": vectors, _ANCHORS: manifest.anchors, _MANIFEST: np.array(manifest.to_json())}
    arrays[_SCHEMA] = np.frombuffer(schema.serialize(), np.uint8)
    for name in table.column_names:
        arrays |= _to_arrays(_key(name), table.column(name))
    np.savez(stream, **arrays)


def read_arrays(source: Path, vectors: str | None = None) -> tuple[Rows, Manifest | None]:
    """The rows of a file, and the manifest of an export; `vectors` names the matrix in a file of others."""
    if source.suffix == ".npy":
        return _rows(source, VECTOR, {VECTOR: np.load(source, mmap_mode="r", allow_pickle=False)}), None
    with np.load(source, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    if _MANIFEST in arrays:
        manifest = Manifest.from_json(str(arrays[_MANIFEST]), arrays[_ANCHORS], source)
        columns: dict[str, Any] = {VECTOR: arrays["vectors"]}
        for field in pa.ipc.read_schema(pa.BufferReader(arrays[_SCHEMA].tobytes())):
            columns[field.name] = _to_column(arrays, _key(field.name), field)
        return _rows(source, VECTOR, columns), manifest
    kinds = "f" if vectors is None else "fiu"
    matrices = [name for name, values in arrays.items() if values.ndim == 2 and values.dtype.kind in kinds]
    key = choose_column("vectors", vectors, matrices, source) or VECTOR
    length = arrays[key].shape[:1]
    columns = {name: array for name, array in arrays.items() if array.shape == length and array.dtype.kind in "biufU"}
    return _rows(source, key, {**columns, key: arrays[key]}), None


def _key(column: str) -> str:
    return _NAMES.get(column, f"metadata.{column}")


def _to_arrays(key: str, column: pa.ChunkedArray) -> dict[str, np.ndarray]:
    """A column as an array and a mask of what is missing; as Arrow's own bytes where NumPy has no such type."""
    missing = np.asarray(column.is_null())
    mask = {f"{key}{_MISSING}": missing} if missing.any() else {}
    kind = column.type
    if pa.types.is_string(kind):
        texts = column.fill_null("").to_pylist()
        values = np.array(texts, dtype=np.str_)
        if values.tolist() == texts:  # NumPy drops NULs at the end
            return {key: values, **mask}
    elif pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return {key: column.fill_null(False if pa.types.is_boolean(kind) else 0).to_numpy(), **mask}
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, pa.schema([("column", kind)])) as writer:
        writer.write_table(pa.table({"column": column}))
    return {f"{key}{_ARROW}": np.frombuffer(sink.getvalue(), np.uint8)}


def _to_column(arrays: dict[str, np.ndarray], key: str, field: pa.Field) -> pa.Array | pa.ChunkedArray:
    if f"{key}{_ARROW}" in arrays:
        with pa.ipc.open_stream(arrays[f"{key}{_ARROW}"].tobytes()) as reader:
            return reader.read_all().column("column")
    return pa.array(arrays[key], field.type, mask=arrays.get(f"{key}{_MISSING}"))


def _rows(source: Path, key: str, columns: dict[str, Any]) -> Rows:
    """Columns of one length; the matrix called `key` as one of vectors, which takes no more memory."""
    matrix = columns[key]
    if matrix.ndim != 2 or matrix.shape[1] == 0 or matrix.dtype.kind not in "fiu":
        raise DataError(f"The array {key} of {source} is not a matrix of numbers: its shape is {matrix.shape}.")
    for name, values in columns.items():
        if len(values) != len(matrix):
            raise DataError(f"The array {name} of {source} has {len(values)} entries for {len(matrix)} vectors.")
    columns[key] = pa.FixedSizeListArray.from_arrays(pa.array(matrix.reshape(-1)), matrix.shape[1])
    return Rows.of_table(source, pa.table(columns))
