"""The index that several processes search: Lance's IVF over the anchors, each item in the list the gallery gives it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import lance
import numpy as np
import pyarrow as pa

from kedge.gallery import Gallery
from kedge.gallery.anchors import Anchors
from kedge.gallery.record import embeddings_of
from kedge.scale.cluster import connected
from kedge.scale.routes import Routes, indexed, record_at

__all__ = ["build_index"]

_ROWS = 1_000_000
"""A process indexes at most about so many rows at a time."""
_ONE_FILE = 2**31 - 1
"""Rows: Lance reads the lists from one file."""
_SAME = 1e-5


def build_index(gallery: Gallery, *, address: str | None = None, workers: int | None = None) -> int:
    """Join the record's small files and index what is not indexed yet; how many rows that were.

    The gallery's anchors are the centroids of the index. Where they have moved, since labels that the model never saw
    have new items, everything is indexed anew.
    """
    with connected(address, workers) as cluster, gallery.writing() as record:
        if len(record) == 0:
            return 0
        import lance_ray
        import ray

        uri, count = record_at(gallery), workers or cluster.workers
        lance_ray.compact_files(uri, num_workers=count)
        record.refresh()
        anchors, routes = gallery.settled(record), Routes(gallery)
        dataset = lance.dataset(uri)
        covered = indexed(dataset)
        name = next((one for one in covered if _same(routes.read(one), anchors)), None) or routes.keep(anchors)
        # A fragment without rows cannot be indexed, and need not be.
        rows = {one.fragment_id: one.count_rows() for one in dataset.get_fragments()}
        todo = {one: size for one, size in rows.items() if size and one not in covered.get(name, ())}
        if todo:
            build = ray.remote(num_cpus=1)(_segment)
            shared = ray.put(anchors)
            groups = list(_groups(todo, count))
            asked = (uri, dataset.version, name, shared, gallery.lists == "label")
            segments = ray.get([build.remote(*asked, group) for group in groups])
            dataset.commit_existing_index_segments(name, "embedding", segments)
        for other in covered:
            if other != name:
                lance.dataset(uri).drop_index(other)
        routes.forget_all_but(name)
        record.refresh()
        return sum(todo.values())


def _groups(rows: dict[int, int], workers: int) -> Iterator[list[int]]:
    """Fragments that are indexed together: about the same number of rows for each worker."""
    most = min(_ROWS, -(-sum(rows.values()) // workers))
    group: list[int] = []
    size = 0
    for one, count in rows.items():
        if group and size + count > most:
            yield group
            group, size = [], 0
        group.append(one)
        size += count
    yield group


def _segment(uri: str, version: int, name: str, anchors: Anchors, by_label: bool, fragments: Sequence[int]) -> Any:
    """Index some fragments, on a worker; what the driver has to commit."""
    dataset = lance.dataset(uri, version=version)
    with tempfile.TemporaryDirectory(prefix="kedge-lists-") as folder:
        # Lance would put each item to its nearest centroid: it is told the list of every one instead.
        schema = pa.schema([("row_id", pa.uint64()), ("partition", pa.uint32())])
        lists = f"{folder}/lists.lance"
        lance.write_dataset(
            _lists(dataset, anchors, by_label, fragments), lists, schema=schema, max_rows_per_file=_ONE_FILE
        )
        return dataset.create_index_uncommitted(
            "embedding",
            "IVF_FLAT",
            name=name,
            metric="l2",
            replace=True,
            num_partitions=len(anchors),
            ivf_centroids=np.ascontiguousarray(anchors.vectors, np.float32),
            precomputed_partition_dataset=lists,
            fragment_ids=list(fragments),
        )


def _lists(dataset: Any, anchors: Anchors, by_label: bool, fragments: Sequence[int]) -> Iterator[pa.RecordBatch]:
    dim = anchors.vectors.shape[1]
    scanner = dataset.scanner(
        columns=["label", "embedding"],
        with_row_id=True,
        fragments=[dataset.get_fragment(one) for one in fragments],
    )
    for batch in scanner.to_batches():
        homes = anchors.assign(embeddings_of(batch, dim), batch.column("label").to_pylist(), by_label=by_label)
        yield pa.record_batch({"row_id": batch.column("_rowid"), "partition": pa.array(homes.astype(np.uint32))})


def _same(kept: Anchors | None, anchors: Anchors) -> bool:
    return (
        kept is not None
        and (kept.names, kept.learned) == (anchors.names, anchors.learned)
        and np.allclose(kept.vectors, anchors.vectors, rtol=0, atol=_SAME * float(np.abs(anchors.vectors).max()))
    )
