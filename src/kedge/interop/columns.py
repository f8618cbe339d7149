"""Which columns of somebody else's rows are vectors, labels and paths."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from kedge.errors import ConfigError, DataError
from kedge.gallery.schema import COLUMNS
from kedge.interop.carried import VECTOR, Rows, first_line, matrix, vector_column

__all__ = ["chosen", "dim_of"]

_USUAL = {
    VECTOR: (VECTOR, "embeddings", "vector", "vectors", "X", "x"),
    "label": ("label", "labels", "y"),
    "path": ("path", "paths"),
}
_ARGUMENTS = {VECTOR: "vectors", "label": "labels", "path": "paths"}
_INDEX = "__index_level_"
"""How pandas calls the numbers of its rows."""


def chosen(rows: Rows, source: Path, *, vectors: str | None, labels: str | None, paths: str | None) -> Rows:
    """The same rows with the columns of a gallery: vectors, labels and paths, the others as metadata."""
    if not rows.count:
        raise DataError(f"{source} holds no vectors.")
    parts = {VECTOR: _vectors(rows.schema, source, vectors)}
    for part, wanted in (("label", labels), ("path", paths)):
        if (name := _named(rows.schema, source, part, wanted, rows.schema.names)) is not None:
            parts[part] = name
    dim = _width(rows, parts[VECTOR], source)
    others = [
        field.name
        for field in rows.schema
        if field.name not in parts.values() and not field.name.startswith(_INDEX) and not pa.types.is_null(field.type)
    ]
    sources = {**parts, **{f"source_{name}" if name in COLUMNS else name: name for name in others}}
    if len(sources) < len(parts) + len(others):
        raise ConfigError(f"{source} has both a column and its source_ twin: rename one of them.")

    def kept(name: str, column: pa.Array, first: int) -> pa.Array:
        if name == VECTOR:
            return vector_column(matrix(column, dim, source, first))
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        return _text(column, sources[name], source) if name in parts else column

    def batches() -> Iterator[pa.RecordBatch]:
        first = 0
        for batch in rows.batches():
            columns = [kept(name, batch.column(one), first) for name, one in sources.items()]
            yield pa.RecordBatch.from_arrays(columns, names=list(sources))
            first += len(batch)

    return Rows(next(batches()).schema, rows.count, batches)


def dim_of(rows: Rows) -> int:
    """How many numbers a vector has."""
    return int(rows.schema.field(VECTOR).type.list_size)


def _vectors(schema: pa.Schema, source: Path, wanted: str | None) -> str:
    fitting = [field.name for field in schema if _is_vector(field.type)]
    name = _named(schema, source, VECTOR, wanted, fitting) or (fitting[0] if len(fitting) == 1 else None)
    if name is None:
        found = f"{', '.join(fitting)}: say with vectors= which one to import" if fitting else "no column of vectors"
        raise ConfigError(f"{source} has {found}.")
    if name not in fitting:
        raise ConfigError(f"vectors={name!r} must be a column of lists of numbers, found {schema.field(name).type}.")
    return name


def _named(schema: pa.Schema, source: Path, part: str, wanted: str | None, fitting: list[str]) -> str | None:
    if wanted is None:
        return next((name for name in _USUAL[part] if name in fitting), None)
    if wanted not in schema.names:
        raise ConfigError(f"{_ARGUMENTS[part]}={wanted!r} is no column of {source}: it has {', '.join(schema.names)}.")
    return wanted


def _is_vector(kind: pa.DataType) -> bool:
    listed = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(listed and (pa.types.is_floating(kind.value_type) or pa.types.is_integer(kind.value_type)))


def _width(rows: Rows, name: str, source: Path) -> int:
    kind = rows.schema.field(name).type
    if pa.types.is_fixed_size_list(kind):
        width = kind.list_size
    else:
        width = next(batch.column(name).value_lengths()[0].as_py() for batch in rows.batches() if len(batch))
    if not width:
        raise DataError(f"The vector in row 0 of {source} is missing.")
    return int(width)


def _text(column: pa.Array, name: str, source: Path) -> pa.Array:
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), None, column)  # as pandas writes what is missing
    try:
        return column.cast(pa.string())
    except pa.ArrowException as error:
        raise ConfigError(f"The column {name} of {source} cannot be read as text: {first_line(error)}.") from error
