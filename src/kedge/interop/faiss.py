"""Vectors as a FAISS index: a gallery's lists as its inverted lists, and indexes that others built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from kedge.deps import require
from kedge.errors import DataError
from kedge.interop.manifest import LIST, VECTOR, Manifest, Rows, coalesce, to_matrix, vector_column, wrap_read_errors
from kedge.interop.parquet import read_parquet, write_parquet
from kedge.io import atomic_write

__all__ = ["read_faiss", "sidecar_path", "write_faiss"]

_BATCH = 8192
_UNIT_TOLERANCE = 1e-3
Reconstruct = Callable[[np.ndarray], np.ndarray]
"""From positions in an index to vectors."""


def sidecar_path(index: Path) -> Path:
    """The Parquet file with the labels, paths and metadata of an index."""
    return index.with_name(f"{index.name}.parquet")


def write_faiss(final: Path, manifest: Manifest, rows: Rows, source: Path) -> None:
    """Write an `IndexIVFFlat` with the anchors as its centroids, the same ids and lists, and the sidecar.

    The index is built in memory: that is how FAISS searches it, too.
    """
    faiss = _faiss()
    from faiss.contrib import ivf_tools

    add_preassigned: Any = ivf_tools.add_preassigned
    quantizer = faiss.IndexFlatL2(manifest.dim)
    quantizer.add(np.ascontiguousarray(manifest.anchors))
    index = faiss.IndexIVFFlat(quantizer, manifest.dim, len(manifest.anchors), faiss.METRIC_L2)

    def index_batches() -> Iterator[pa.RecordBatch]:
        """Adds each batch to the index, and yields what belongs into the sidecar."""
        for batch in coalesce(rows.batches()):
            vectors = np.ascontiguousarray(to_matrix(batch.column(VECTOR), manifest.dim, source, index.ntotal))
            lists = np.asarray(batch.column(LIST)).astype(np.int64)
            add_preassigned(index, vectors, lists, np.ascontiguousarray(batch.column("id"), np.int64))
            yield batch.drop_columns([VECTOR])

    schema = pa.schema([field for field in rows.schema if field.name != VECTOR])
    # The index gets its name last.
    with atomic_write(final) as stream, atomic_write(sidecar_path(final)) as sidecar:
        write_parquet(sidecar, manifest, Rows(schema, rows.count, index_batches), with_anchors=False)
        faiss.write_index(index, faiss.PyCallbackIOWriter(stream.write))


def read_faiss(source: Path) -> tuple[Rows, Manifest | None, np.ndarray | None]:
    """The rows of an index, the manifest in the sidecar of an export, and the centroids of an IVF index."""
    faiss, sidecar = _faiss(), sidecar_path(source)
    mismatch = DataError(f"{source} and {sidecar.name} do not belong together: export the gallery again.")
    with wrap_read_errors(source, "a FAISS index"):
        source.stat()
        index = faiss.read_index(str(source))
        ids, reconstruct, centroids = _contents(faiss, index)
        if not sidecar.exists():
            return _foreign_rows(faiss, source, index, ids, reconstruct), None, centroids
        if centroids is None:
            raise mismatch
        rows, manifest = read_parquet(sidecar, centroids)
    if manifest is None:
        raise DataError(f"{sidecar} says nothing of a gallery: put it elsewhere, or export the gallery again.")
    order = np.argsort(ids)
    sorted_ids = ids[order]

    def batches(_owner: Any = index) -> Iterator[pa.RecordBatch]:  # `reconstruct` needs the index to stay alive
        with wrap_read_errors(source, "a FAISS index"):
            for batch in rows.batches():
                batch_ids = np.asarray(batch.column("id"))
                places = np.minimum(np.searchsorted(sorted_ids, batch_ids), len(sorted_ids) - 1)
                if len(ids) != rows.count or not np.array_equal(sorted_ids[places], batch_ids):
                    raise mismatch
                yield batch.append_column(VECTOR, vector_column(reconstruct(order[places])))

    schema = rows.schema.append(pa.field(VECTOR, pa.list_(pa.float32(), index.d)))
    return Rows(schema, rows.count, batches), manifest, None


def _contents(faiss: Any, index: Any) -> tuple[np.ndarray, Reconstruct, np.ndarray | None]:
    """The id of each vector, a function that reconstructs vectors, and the centroids if there are any."""
    index = faiss.downcast_index(index)

    def empty(count: int) -> np.ndarray:
        # FAISS would return tensors once its `contrib.torch_utils` was imported by anyone.
        return np.empty((count, index.d), np.float32)

    if isinstance(index, (faiss.IndexIDMap, faiss.IndexIDMap2)):
        positions, reconstruct, centroids = _contents(faiss, index.index)
        return faiss.vector_to_array(index.id_map)[positions], reconstruct, centroids
    if not isinstance(index, faiss.IndexIVF):
        inner = faiss.try_extract_index_ivf(index)
        if inner is not None:
            inner.make_direct_map()
        return np.arange(index.ntotal), lambda rows: index.reconstruct_batch(rows, empty(len(rows))), None
    inverted = index.invlists
    sizes = np.array([inverted.list_size(number) for number in range(index.nlist)], np.int64)
    filled = np.flatnonzero(sizes).tolist()
    ids = [faiss.rev_swig_ptr(inverted.get_ids(number), int(sizes[number])).copy() for number in filled]
    lists = np.repeat(np.arange(index.nlist), sizes)
    offsets = np.arange(len(lists)) - np.repeat(np.cumsum(sizes) - sizes, sizes)

    def reconstruct_listed(rows: np.ndarray) -> np.ndarray:
        vectors = empty(len(rows))
        for vector, number, offset in zip(vectors, lists[rows].tolist(), offsets[rows].tolist(), strict=True):
            index.reconstruct_from_offset(number, offset, faiss.swig_ptr(vector))
        return vectors

    centroids = index.quantizer.reconstruct_n(0, index.nlist, empty(index.nlist))
    return np.concatenate([*ids, np.empty(0, np.int64)]), reconstruct_listed, centroids


def _foreign_rows(faiss: Any, source: Path, index: Any, ids: np.ndarray, reconstruct: Reconstruct) -> Rows:
    """In order of their ids, so that those that count from 0 stay what they are."""
    if index.metric_type not in (faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT):
        raise DataError(f"{source} compares neither by Euclidean distance nor by cosine, as a gallery does.")
    order = np.argsort(ids, kind="stable")

    def batches(_owner: Any = index) -> Iterator[pa.RecordBatch]:
        with wrap_read_errors(source, "a FAISS index"):
            for start in range(0, len(order), _BATCH):
                rows = order[start : start + _BATCH]
                vectors = reconstruct(rows)
                norms = np.linalg.norm(vectors, axis=1)
                if index.metric_type == faiss.METRIC_INNER_PRODUCT and np.abs(norms - 1).max() > _UNIT_TOLERANCE:
                    raise DataError(
                        f"{source} compares by inner product, and its vectors are not of length 1: a gallery, which "
                        "compares by distance, would find others; import the vectors themselves, normalised."
                    )
                yield pa.RecordBatch.from_arrays([vector_column(vectors), pa.array(ids[rows])], [VECTOR, "id"])

    schema = pa.schema([(VECTOR, pa.list_(pa.float32(), index.d)), ("id", pa.int64())])
    return Rows(schema, len(order), batches)


def _faiss() -> Any:
    return require("faiss", extra="faiss", purpose="Reading and writing FAISS files")
