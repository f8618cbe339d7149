"""Vectors as a FAISS index: a gallery's lists as its inverted lists, and indexes that others built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from kedge.errors import ConfigError, DataError
from kedge.interop.carried import HOME, VECTOR, Carried, Rows, gathered, matrix, reading, vector_column
from kedge.interop.parquet import read_parquet, write_parquet
from kedge.io import atomic_write

__all__ = ["beside", "read_faiss", "write_faiss"]

_BATCH = 8192
_UNIT = 1e-3


def beside(index: Path) -> Path:
    """The file of labels, paths and metadata that belongs to an index."""
    return index.with_name(f"{index.name}.parquet")


def write_faiss(final: Path, carried: Carried, rows: Rows, source: Path) -> None:
    """Write an `IndexIVFFlat` with the anchors as its centroids, ids and lists as they are, and the rest beside it.

    The index is built in memory: that is how FAISS searches it, too.
    """
    faiss = _library()
    from faiss.contrib import ivf_tools

    index_homes: Any = ivf_tools.add_preassigned
    quantizer = faiss.IndexFlatL2(carried.dim)
    quantizer.add(np.ascontiguousarray(carried.anchors))
    index = faiss.IndexIVFFlat(quantizer, carried.dim, len(carried.anchors), faiss.METRIC_L2)

    def added() -> Iterator[pa.RecordBatch]:
        for batch in gathered(rows.batches()):
            vectors = np.ascontiguousarray(matrix(batch.column(VECTOR), carried.dim, source, index.ntotal))
            homes = np.asarray(batch.column(HOME)).astype(np.int64)
            index_homes(index, vectors, homes, np.ascontiguousarray(batch.column("id"), np.int64))
            yield batch.drop_columns([VECTOR])

    others = pa.schema([field for field in rows.schema if field.name != VECTOR])
    # The index gets its name last.
    with atomic_write(final) as stream, atomic_write(beside(final)) as sidecar:
        write_parquet(sidecar, carried, Rows(others, rows.count, added), with_anchors=False)
        faiss.write_index(index, faiss.PyCallbackIOWriter(stream.write))


def read_faiss(source: Path) -> tuple[Rows, Carried | None, np.ndarray | None]:
    """The rows of an index, what the file beside one of ours says, and the centroids of an inverted file."""
    faiss = _library()
    with reading(source, "a FAISS index"):
        source.stat()
        index = faiss.read_index(str(source))
        ids, fetch, centres = _contents(faiss, index)
        if not beside(source).exists():
            return _foreign(faiss, source, index, ids, fetch), None, centres
        if centres is None:
            raise DataError(f"{source} and {beside(source).name} do not belong together: export the gallery again.")
        rows, carried = read_parquet(beside(source), centres)
    if carried is None:
        raise DataError(f"{beside(source)} says nothing of a gallery: put it elsewhere, or export the gallery again.")
    order = np.argsort(ids)
    sorted_ids = ids[order]

    def batches(_owner: Any = index) -> Iterator[pa.RecordBatch]:  # what is fetched from lives as long as it
        with reading(source, "a FAISS index"):
            for batch in rows.batches():
                wanted = np.asarray(batch.column("id"))
                spots = np.minimum(np.searchsorted(sorted_ids, wanted), len(sorted_ids) - 1)
                if len(ids) != rows.count or not np.array_equal(sorted_ids[spots], wanted):
                    raise DataError(
                        f"{source} and {beside(source).name} do not belong together: export the gallery again."
                    )
                yield batch.append_column(VECTOR, vector_column(fetch(order[spots])))

    schema = rows.schema.append(pa.field(VECTOR, pa.list_(pa.float32(), index.d)))
    return Rows(schema, rows.count, batches), carried, None


_Fetch = Callable[[np.ndarray], np.ndarray]


def _contents(faiss: Any, index: Any) -> tuple[np.ndarray, _Fetch, np.ndarray | None]:
    """The id of each vector, a way to the vectors by their places, and the centroids if there are any."""
    index = faiss.downcast_index(index)
    if isinstance(index, (faiss.IndexIDMap, faiss.IndexIDMap2)):
        ids, fetch, centres = _contents(faiss, index.index)
        return faiss.vector_to_array(index.id_map)[ids], fetch, centres
    if not isinstance(index, faiss.IndexIVF):
        inner = faiss.try_extract_index_ivf(index)
        if inner is not None:
            inner.make_direct_map()
        return np.arange(index.ntotal), lambda rows: index.reconstruct_batch(rows, _room(rows, index)), None
    lists = index.invlists
    sizes = np.array([lists.list_size(one) for one in range(index.nlist)], np.int64)
    parts = [faiss.rev_swig_ptr(lists.get_ids(one), size).copy() for one, size in enumerate(sizes.tolist()) if size]
    homes = np.repeat(np.arange(index.nlist), sizes)
    places = np.arange(len(homes)) - np.repeat(np.cumsum(sizes) - sizes, sizes)

    def fetch_listed(rows: np.ndarray) -> np.ndarray:
        found = _room(rows, index)
        for vector, home, place in zip(found, homes[rows].tolist(), places[rows].tolist(), strict=True):
            index.reconstruct_from_offset(home, place, faiss.swig_ptr(vector))
        return found

    centres = index.quantizer.reconstruct_n(0, index.nlist, _room(range(index.nlist), index))
    return np.concatenate([*parts, np.empty(0, np.int64)]), fetch_listed, centres


def _room(rows: Sized, index: Any) -> np.ndarray:
    """Where vectors go. FAISS would make tensors of its own once its `contrib.torch_utils` was imported by anyone."""
    return np.empty((len(rows), index.d), np.float32)


def _foreign(faiss: Any, source: Path, index: Any, ids: np.ndarray, fetch: _Fetch) -> Rows:
    """In order of their ids, so that those that count from 0 stay what they are."""
    if index.metric_type not in (faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT):
        raise DataError(f"{source} compares neither by Euclidean distance nor by cosine, as a gallery does.")
    order = np.argsort(ids, kind="stable")

    def batches(_owner: Any = index) -> Iterator[pa.RecordBatch]:
        with reading(source, "a FAISS index"):
            for start in range(0, len(order), _BATCH):
                rows = order[start : start + _BATCH]
                vectors = fetch(rows)
                lengths = np.linalg.norm(vectors, axis=1)
                if index.metric_type == faiss.METRIC_INNER_PRODUCT and np.abs(lengths - 1).max() > _UNIT:
                    raise DataError(
                        f"{source} compares by inner product, and its vectors are not of length 1: a gallery, which "
                        "compares by distance, would find others; import the vectors themselves, normalised."
                    )
                yield pa.RecordBatch.from_arrays([vector_column(vectors), pa.array(ids[rows])], [VECTOR, "id"])

    schema = pa.schema([(VECTOR, pa.list_(pa.float32(), index.d)), ("id", pa.int64())])
    return Rows(schema, len(order), batches)


def _library() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise ConfigError("FAISS files need faiss: pip install 'kedge[faiss]'.") from error
    return faiss
