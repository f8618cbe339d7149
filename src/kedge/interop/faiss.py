"""Vectors as a FAISS index: a gallery's lists as its inverted lists, and indexes that others built."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from kedge.deps import require
from kedge.errors import DataError
from kedge.interop.parquet import read_parquet, write_parquet
from kedge.interop.rows import LIST, VECTOR, Manifest, Rows
from kedge.io import atomic_write

__all__ = ["read_faiss", "sidecar_path", "write_faiss"]

_UNIT_TOLERANCE = 1e-3


def sidecar_path(index: Path) -> Path:
    """The Parquet file with the labels, paths and metadata of an index."""
    return index.with_name(f"{index.name}.parquet")


def write_faiss(final: Path, manifest: Manifest, rows: Rows) -> None:
    """Write an `IndexIVFFlat` with the anchors as its centroids, the same ids and lists, and the sidecar.

    The index is built in memory: that is how FAISS searches it, too.
    """
    faiss = _faiss()
    from faiss.contrib import ivf_tools

    add_preassigned: Any = ivf_tools.add_preassigned
    quantizer = faiss.IndexFlatL2(manifest.dim)
    quantizer.add(np.ascontiguousarray(manifest.anchors))
    index = faiss.IndexIVFFlat(quantizer, manifest.dim, len(manifest.anchors), faiss.METRIC_L2)

    def add_and_read() -> Iterator[pa.RecordBatch]:
        """Adds each batch to the index, and yields what belongs into the sidecar."""
        for batch, vectors in rows.matrices(manifest.dim):
            ids, lists = (np.ascontiguousarray(batch.column(name), np.int64) for name in ("id", LIST))
            add_preassigned(index, np.ascontiguousarray(vectors), lists, ids)
            yield batch.drop_columns([VECTOR])

    schema = pa.schema([field for field in rows.schema if field.name != VECTOR])
    # The index gets its name last.
    with atomic_write(final) as stream, atomic_write(sidecar_path(final)) as sidecar:
        write_parquet(sidecar, manifest, Rows(rows.source, schema, rows.count, add_and_read), with_anchors=False)
        faiss.write_index(index, faiss.PyCallbackIOWriter(stream.write))


def read_faiss(source: Path) -> tuple[Rows, Manifest | None, np.ndarray | None]:
    """The rows of an index, the manifest in the sidecar of an export, and the centroids of an IVF index of others."""
    faiss, sidecar = _faiss(), sidecar_path(source)
    source.stat()
    owner = faiss.read_index(str(source))
    index: Any = faiss.downcast_index(owner)
    mapped = isinstance(index, (faiss.IndexIDMap, faiss.IndexIDMap2))
    inner = faiss.downcast_index(index.index) if mapped else index
    keys = _keys(faiss, inner)
    ids = faiss.vector_to_array(index.id_map)[keys] if mapped else keys
    order = np.argsort(ids)
    ids, keys = ids[order], keys[order]
    if (ids[1:] == ids[:-1]).any():
        raise DataError(f"{source} has several vectors with one id; give each its own id.")
    centroids = None
    if isinstance(inner, faiss.IndexIVF):
        centroids = inner.quantizer.reconstruct_n(0, inner.nlist, np.empty((inner.nlist, inner.d), np.float32))
    mismatch = DataError(f"{source} and {sidecar.name} do not belong together; export the gallery again.")
    if sidecar.exists():
        rows, manifest = read_parquet(sidecar, centroids)
        if manifest is None or centroids is None:
            raise mismatch
        centroids = None
    else:
        # In order of their ids, so that those that count from 0 stay what they are.
        rows, manifest = Rows.of_table(source, pa.table({"id": ids})), None
        if index.metric_type not in (faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT):
            raise DataError(
                f"{source} compares neither by Euclidean distance nor by cosine, as a gallery does; import an .npy "
                "file of its vectors."
            )

    def read(_owner: Any = owner) -> Iterator[pa.RecordBatch]:  # `inner` would go with it
        for batch in rows.read():
            places = np.minimum(np.searchsorted(ids, np.asarray(batch.column("id"))), len(ids) - 1)
            if len(ids) != rows.count or not np.array_equal(ids[places], np.asarray(batch.column("id"))):
                raise mismatch
            # Into an array of ours: FAISS returns tensors once anyone imported its `contrib.torch_utils`.
            vectors = inner.reconstruct_batch(keys[places], np.empty((len(places), index.d), np.float32))
            is_product = manifest is None and index.metric_type == faiss.METRIC_INNER_PRODUCT
            if is_product and np.abs(np.linalg.norm(vectors, axis=1) - 1).max() > _UNIT_TOLERANCE:
                raise DataError(
                    f"{source} compares by inner product, and its vectors are not of length 1: a gallery, which "
                    "compares by distance, would find others; import the vectors themselves, normalised."
                )
            column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), index.d)
            yield batch.append_column(VECTOR, column)

    schema = rows.schema.append(pa.field(VECTOR, pa.list_(pa.float32(), index.d)))
    return Rows(source, schema, rows.count, read), manifest, centroids


def _keys(faiss: Any, index: Any) -> np.ndarray:
    """What `index.reconstruct_batch` knows its vectors by."""
    ivf = faiss.try_extract_index_ivf(index)
    if ivf is None:
        return np.arange(index.ntotal)
    lists = range(ivf.nlist)
    ids = [faiss.rev_swig_ptr(ivf.invlists.get_ids(each), ivf.invlists.list_size(each)).copy() for each in lists]
    ivf.set_direct_map_type(faiss.DirectMap.Hashtable)
    return np.concatenate(ids)


def _faiss() -> Any:
    return require("faiss", extra="faiss", purpose="Reading and writing FAISS files")
