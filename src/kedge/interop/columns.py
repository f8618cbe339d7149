"""Which columns of a file that Kedge did not write are vectors, labels and paths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from kedge.errors import ConfigError, DataError, first_line
from kedge.gallery.schema import COLUMNS
from kedge.interop.rows import VECTOR, Rows

__all__ = ["choose_vectors", "gallery_columns"]

_USUAL_NAMES = {
    "vectors": (VECTOR, "embeddings", "vector", "vectors", "X", "x"),
    "labels": ("label", "labels", "y"),
    "paths": ("path", "paths"),
}
_PANDAS_INDEX = "__index_level_"


def gallery_columns(rows: Rows, *, vectors: str | None, labels: str | None, paths: str | None) -> Rows:
    """The same rows with the columns of a gallery: vectors, labels and paths, the others as metadata."""
    source, names = rows.source, rows.schema.names
    if not rows.count:
        raise DataError(f"{source} holds no vectors.")
    chosen = {
        VECTOR: choose_vectors(vectors, [field.name for field in rows.schema if _is_vector(field.type)], source),
        "label": _choose("labels", labels, names, source),
        "path": _choose("paths", paths, names, source),
    }
    origins = {name: origin for name, origin in chosen.items() if origin is not None}
    texts = set(origins) - {VECTOR}
    for field in rows.schema:
        if field.name in chosen.values() or field.name.startswith(_PANDAS_INDEX) or pa.types.is_null(field.type):
            continue
        name = f"source_{field.name}" if field.name in COLUMNS else field.name
        if name in origins:
            raise ConfigError(f"{source} has both a column and its source_ twin: rename one of them.")
        origins[name] = field.name

    def convert(name: str, column: pa.Array) -> pa.Array:
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        return _text(column, origins[name], source) if name in texts else column

    def read() -> Iterator[pa.RecordBatch]:
        for batch in rows.read():
            columns = [convert(name, batch.column(origin)) for name, origin in origins.items()]
            yield pa.RecordBatch.from_arrays(columns, names=list(origins))

    with_schema = next(iter(Rows(source, rows.schema, rows.count, read).batches()))
    return Rows(source, with_schema.schema, rows.count, read)


def choose_vectors(name: str | None, fitting: Sequence[str], source: Path) -> str:
    """The column or array called `name`; without, the one of `fitting` that is called as usual, or the only one."""
    chosen = _choose("vectors", name, fitting, source) or (fitting[0] if len(fitting) == 1 else None)
    if chosen is None:
        listed = f"{', '.join(fitting)}: say with vectors= which one to import" if fitting else "no column of vectors"
        raise ConfigError(f"{source} has {listed}.")
    return chosen


def _choose(argument: str, name: str | None, fitting: Sequence[str], source: Path) -> str | None:
    if name is None:
        return next((usual for usual in _USUAL_NAMES[argument] if usual in fitting), None)
    if name not in fitting:
        raise ConfigError(
            f"{argument}={name!r} is no column of {argument} in {source}: choose of {', '.join(fitting)}."
        )
    return name


def _is_vector(kind: pa.DataType) -> bool:
    listed = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(listed and (pa.types.is_floating(kind.value_type) or pa.types.is_integer(kind.value_type)))


def _text(column: pa.Array, name: str, source: Path) -> pa.Array:
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), None, column)  # as pandas writes what is missing
    try:
        return column.cast(pa.string())
    except pa.ArrowException as error:
        raise ConfigError(f"The column {name} of {source} cannot be read as text: {first_line(error)}.") from error
