"""Vectors as Parquet: a gallery's, a batch at a time, and those that others wrote."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kedge.errors import DataError
from kedge.interop.carried import VECTOR, Carried, Rows, gathered, reading

__all__ = ["read_parquet", "write_parquet"]

_ABOUT, _ANCHORS = b"kedge", b"kedge.anchors"
_BATCH = 8192
_LIMIT = 2**31 - 1
"""Bytes: what stands in a file's footer may be long where there are very many anchors."""


def write_parquet(stream: IO[bytes], carried: Carried, rows: Rows, *, with_anchors: bool = True) -> None:
    """Write rows, and in the file's footer what makes a gallery of them again."""
    plain = [field.name for field in rows.schema if field.name != VECTOR]
    # Numbers of vectors hardly ever repeat.
    options = {"compression": "zstd", "use_dictionary": plain, "write_page_checksum": True}
    with pq.ParquetWriter(stream, rows.schema, **options) as writer:
        for batch in gathered(rows.batches()):
            writer.write_batch(batch)
        about = {_ABOUT: carried.written()}
        if with_anchors:
            # As text: readers in other languages refuse a footer that is none.
            about[_ANCHORS] = base64.b64encode(np.ascontiguousarray(carried.anchors, "<f4").tobytes()).decode()
        writer.add_key_value_metadata(about)


def read_parquet(source: Path, anchors: np.ndarray | None = None) -> tuple[Rows, Carried | None]:
    """The rows of a file, or of all in a folder, and what a file of ours says; `anchors` where they are elsewhere."""
    with reading(source, "Parquet"):
        files = sorted(source.glob("*.parquet")) if source.is_dir() else [source]
        if not files:
            raise DataError(f"{source} holds no .parquet file.")
        opened = [_open(file) for file in files]
        schema = opened[0].schema_arrow.remove_metadata()
        for file, one in zip(files, opened, strict=True):
            if not one.schema_arrow.remove_metadata().equals(schema):
                raise DataError(f"{file} has other columns than {files[0].name}: import one after the other.")
        count = sum(one.metadata.num_rows for one in opened)
        said = opened[0].metadata.metadata or {}
        carried = None
        if _ABOUT in said and len(files) == 1:
            if anchors is None:
                anchors = np.frombuffer(base64.b64decode(said.get(_ANCHORS, b""), validate=True), "<f4")
            carried = Carried.read(said[_ABOUT], anchors, source)

    def batches() -> Iterator[pa.RecordBatch]:
        with reading(source, "Parquet"):
            for file in files:
                yield from _open(file).iter_batches(_BATCH)

    return Rows(schema, count, batches), carried


def _open(file: Path) -> pq.ParquetFile:
    limits = {"thrift_string_size_limit": _LIMIT, "thrift_container_size_limit": _LIMIT}
    return pq.ParquetFile(file, page_checksum_verification=True, **limits)
