"""Vectors as Parquet files: Kedge's, written batch by batch, and anyone's."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kedge.errors import DataError
from kedge.interop.rows import BATCH, Manifest, Rows

__all__ = ["read_parquet", "write_parquet"]

_MANIFEST, _ANCHORS = b"kedge", b"kedge.anchors"
_LIMIT = 2**31 - 1
"""Bytes of a file's footer, which is long where there are very many anchors."""


def write_parquet(stream: IO[bytes], manifest: Manifest, rows: Rows, *, with_anchors: bool = True) -> None:
    """Write rows, and the manifest into the file's footer."""
    plain = [field.name for field in rows.schema if not pa.types.is_fixed_size_list(field.type)]
    # Numbers of vectors hardly ever repeat.
    options = {"compression": "zstd", "use_dictionary": plain, "write_page_checksum": True}
    with pq.ParquetWriter(stream, rows.schema, **options) as writer:
        for batch in rows.batches():
            writer.write_batch(batch)
        footer = {_MANIFEST: manifest.to_json()}
        if with_anchors:
            # As text: readers in other languages refuse a footer that is none.
            footer[_ANCHORS] = base64.b64encode(np.ascontiguousarray(manifest.anchors, "<f4").tobytes()).decode()
        writer.add_key_value_metadata(footer)


def read_parquet(source: Path, anchors: np.ndarray | None = None) -> tuple[Rows, Manifest | None]:
    """The rows of a file, or of all in a folder, and the manifest of an export; `anchors` where they are elsewhere."""
    files = sorted(source.glob("*.parquet")) if source.is_dir() else [source]
    if not files:
        raise DataError(f"{source} holds no .parquet file.")
    opened = [_open(file) for file in files]
    schema = opened[0].schema_arrow.remove_metadata()
    for file, parquet in zip(files, opened, strict=True):
        if not parquet.schema_arrow.remove_metadata().equals(schema):
            raise DataError(f"{file} has other columns than {files[0].name}: import one after the other.")
    footer = opened[0].metadata.metadata or {}
    manifest = None
    if _MANIFEST in footer and len(files) == 1:
        if anchors is None:
            anchors = np.frombuffer(base64.b64decode(footer.get(_ANCHORS, b""), validate=True), "<f4")
        manifest = Manifest.from_json(footer[_MANIFEST], anchors, source)

    def read() -> Iterator[pa.RecordBatch]:
        for file in files:
            yield from _open(file).iter_batches(BATCH)

    return Rows(source, schema, sum(parquet.metadata.num_rows for parquet in opened), read), manifest


def _open(file: Path) -> pq.ParquetFile:
    limits = {"thrift_string_size_limit": _LIMIT, "thrift_container_size_limit": _LIMIT}
    return pq.ParquetFile(file, page_checksum_verification=True, **limits)
