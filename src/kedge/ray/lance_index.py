"""The index that several processes search: Lance's IVF with the anchors as centroids, items in the gallery's lists."""

from __future__ import annotations

import hashlib
import io
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import lance
import numpy as np
import pyarrow as pa

from kedge.gallery import Gallery
from kedge.gallery.anchors import Anchors
from kedge.gallery.location import Location
from kedge.gallery.schema import embeddings_of
from kedge.io import Folder
from kedge.ray.cluster import connect

__all__ = ["StoredCentroids", "absolute_location", "build_index", "covered_fragments"]

_MAX_ROWS = 1_000_000
"""Rows that a process indexes at a time, about."""
_ONE_FILE = 2**31 - 1
"""Rows: Lance reads the lists from one file."""
_TOLERANCE = 1e-5
_PREFIX = "anchors_"
_FOLDER = "index"


def absolute_location(gallery: Gallery) -> Location:
    """Where every worker finds the gallery, whatever folder it runs in."""
    location = gallery.location
    return location if location.url else Location(location.folder.absolute())


def covered_fragments(dataset: Any) -> dict[str, set[int]]:
    """The indices over anchors that a table has, and the fragments that each one covers."""
    return {
        index.name: {int(fragment) for segment in index.segments for fragment in segment.fragment_ids}
        for index in dataset.describe_indices()
        if index.name.startswith(_PREFIX)
    }


class StoredCentroids:
    """The anchors that an index was built with, stored beside the table under the name of that index."""

    def __init__(self, gallery: Gallery) -> None:
        self._files = Folder(str(gallery.location))

    def write(self, anchors: Anchors) -> str:
        """Store anchors; the name for their index."""
        stream = io.BytesIO()
        np.savez(
            stream,
            vectors=anchors.vectors,
            names=np.array([name or "" for name in anchors.names], dtype=np.str_),
            named=np.array([name is not None for name in anchors.names]),
            learned=anchors.learned,
        )
        name = _PREFIX + hashlib.sha256(stream.getvalue()).hexdigest()[:16]
        self._files.write(f"{_FOLDER}/{name}.npz", stream.getvalue())
        return name

    def read(self, name: str) -> Anchors | None:
        """The anchors of an index; None if they are gone."""
        content = self._files.read(f"{_FOLDER}/{name}.npz")
        if content is None:
            return None
        with np.load(io.BytesIO(content), allow_pickle=False) as stored:
            pairs = zip(stored["names"].tolist(), stored["named"].tolist(), strict=True)
            names = tuple(name if named else None for name, named in pairs)
            return Anchors(stored["vectors"], names, int(stored["learned"]))

    def remove_others(self, name: str) -> None:
        """Remove the anchors of every other index."""
        for file in self._files.names(_FOLDER):
            if file != f"{name}.npz":
                self._files.remove_file(f"{_FOLDER}/{file}")


def build_index(gallery: Gallery, *, address: str | None = None, workers: int | None = None) -> int:
    """Join the table's small files and index what is not indexed yet; how many rows that were.

    The gallery's anchors are the centroids of the index. Where they have moved, since labels that the model never saw
    have new items, everything is indexed anew.
    """
    with connect(address, workers) as cluster, gallery.writing() as table:
        if len(table) == 0:
            return 0
        import lance_ray
        import ray

        uri, count = absolute_location(gallery).table_uri, workers or cluster.workers
        lance_ray.compact_files(uri, num_workers=count)
        table.refresh()
        anchors, centroids = gallery.anchors_for(table), StoredCentroids(gallery)
        dataset = lance.dataset(uri)
        covered = covered_fragments(dataset)
        name = next((name for name in covered if _are_same(centroids.read(name), anchors)), None)
        name = name or centroids.write(anchors)
        # A fragment without rows cannot be indexed, and need not be.
        rows = {fragment.fragment_id: fragment.count_rows() for fragment in dataset.get_fragments()}
        todo = {number: size for number, size in rows.items() if size and number not in covered.get(name, ())}
        if todo:
            build = ray.remote(num_cpus=1)(_build_segment)
            common = (uri, dataset.version, name, ray.put(anchors), gallery.lists == "label")
            segments = ray.get([build.remote(*common, group) for group in _groups(todo, count)])
            dataset.commit_existing_index_segments(name, "embedding", segments)
        for other in covered:
            if other != name:
                lance.dataset(uri).drop_index(other)
        centroids.remove_others(name)
        table.refresh()
        return sum(todo.values())


def _groups(rows: dict[int, int], workers: int) -> Iterator[list[int]]:
    """Fragments that are indexed together: about the same number of rows for each worker."""
    limit = min(_MAX_ROWS, -(-sum(rows.values()) // workers))
    group: list[int] = []
    size = 0
    for fragment, count in rows.items():
        if group and size + count > limit:
            yield group
            group, size = [], 0
        group.append(fragment)
        size += count
    yield group


def _build_segment(
    uri: str, version: int, name: str, anchors: Anchors, by_label: bool, fragments: Sequence[int]
) -> Any:
    """Index some fragments, on a worker; what the driver has to commit."""
    dataset = lance.dataset(uri, version=version)
    with tempfile.TemporaryDirectory(prefix="kedge-lists-") as folder:
        # Lance would assign each item to its nearest centroid: the lists are precomputed instead.
        schema = pa.schema([("row_id", pa.uint64()), ("partition", pa.uint32())])
        lists, batches = f"{folder}/lists.lance", _assign(dataset, anchors, by_label, fragments)
        lance.write_dataset(batches, lists, schema=schema, max_rows_per_file=_ONE_FILE)
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


def _assign(dataset: Any, anchors: Anchors, by_label: bool, fragments: Sequence[int]) -> Iterator[pa.RecordBatch]:
    dim = anchors.vectors.shape[1]
    chosen = [dataset.get_fragment(number) for number in fragments]
    scanner = dataset.scanner(columns=["label", "embedding"], with_row_id=True, fragments=chosen)
    for batch in scanner.to_batches():
        lists = anchors.assign(embeddings_of(batch, dim), batch.column("label").to_pylist(), by_label=by_label)
        yield pa.record_batch({"row_id": batch.column("_rowid"), "partition": pa.array(lists.astype(np.uint32))})


def _are_same(stored: Anchors | None, anchors: Anchors) -> bool:
    return (
        stored is not None
        and (stored.names, stored.learned) == (anchors.names, anchors.learned)
        and np.allclose(stored.vectors, anchors.vectors, rtol=0, atol=_TOLERANCE * float(np.abs(anchors.vectors).max()))
    )
