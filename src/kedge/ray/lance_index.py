"""The index that several processes search: Lance's IVF with the anchors as centroids, items in the gallery's lists."""

from __future__ import annotations

import hashlib
import io
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import lance
import numpy as np
import pyarrow as pa

from kedge.deprecation import renamed_keywords
from kedge.errors import GalleryError
from kedge.gallery import Gallery, Result
from kedge.gallery.anchors import Anchors
from kedge.gallery.location import Location
from kedge.gallery.result import Columns
from kedge.gallery.schema import require_positive, vectors_of
from kedge.io import Folder
from kedge.ray.cluster import connect

__all__ = ["absolute_location", "build_index", "search_with_ray"]

_ONE_FILE = 2**31 - 1
"""Rows: Lance reads the lists from one file."""
_TOLERANCE = 1e-5
_FAR = 1e4
_PREFIX = "anchors_"
_FOLDER = "index"
"""The anchors of each index, beside the table and under its name."""


def absolute_location(gallery: Gallery) -> Location:
    """Where every worker finds the gallery, whatever folder it runs in."""
    location = gallery.location
    return location if location.url else Location(location.folder.absolute())


def _row_counts(dataset: Any) -> dict[int, int]:
    """The fragments that have rows: others cannot be indexed, and need not be."""
    counts = {fragment.fragment_id: fragment.count_rows() for fragment in dataset.get_fragments()}
    return {fragment: count for fragment, count in counts.items() if count}


def _covered_fragments(dataset: Any) -> dict[str, set[int]]:
    """The indices over anchors that a table has, and the fragments that each one covers."""
    return {
        index.name: {int(fragment) for segment in index.segments for fragment in segment.fragment_ids}
        for index in dataset.describe_indices()
        if index.name.startswith(_PREFIX)
    }


def _store(files: Folder, anchors: Anchors) -> str:
    """Keep the anchors of an index; the name for it."""
    stream = io.BytesIO()
    np.savez(
        stream,
        vectors=anchors.vectors,
        names=np.array([name or "" for name in anchors.names], dtype=np.str_),
        learned=anchors.learned,
        learned_first=anchors.learned_first,
    )
    name = _PREFIX + hashlib.sha256(stream.getvalue()).hexdigest()[:16]
    files.write(f"{_FOLDER}/{name}.npz", stream.getvalue())
    return name


def _stored(files: Folder, name: str) -> Anchors | None:
    """The anchors of an index; None if they are gone."""
    if (content := files.read(f"{_FOLDER}/{name}.npz")) is None:
        return None
    with np.load(io.BytesIO(content), allow_pickle=False) as stored:
        names = tuple(name or None for name in stored["names"].tolist())  # no label is empty
        learned_first = "learned_first" in stored and bool(stored["learned_first"])
        return Anchors(stored["vectors"], names, int(stored["learned"]), learned_first=learned_first)


# ---------------------------------------------------------------------- building


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

        uri, files = absolute_location(gallery).table_uri, Folder(str(gallery.location))
        lance_ray.compact_files(uri, num_workers=workers or cluster.cpus)
        table.refresh()
        anchors, dataset = gallery.anchors_for(table), lance.dataset(uri)
        covered = _covered_fragments(dataset)
        name = next((name for name in covered if _are_same(_stored(files, name), anchors)), None)
        name = name or _store(files, anchors)
        todo = {fragment: n for fragment, n in _row_counts(dataset).items() if fragment not in covered.get(name, ())}
        if todo:
            build = ray.remote(num_cpus=1)(_build_segment)
            common = (uri, dataset.version, name, ray.put(anchors), gallery.lists == "label")
            segments = ray.get([build.remote(*common, fragment) for fragment in todo])
            dataset.commit_existing_index_segments(name, "embedding", segments)
        for other in covered.keys() - {name}:
            lance.dataset(uri).drop_index(other)
        for file in set(files.names(_FOLDER)) - {f"{name}.npz"}:
            files.remove_file(f"{_FOLDER}/{file}")
        table.refresh()
        return sum(todo.values())


def _are_same(stored: Anchors | None, anchors: Anchors) -> bool:
    return (
        stored is not None
        and (stored.names, stored.learned) == (anchors.names, anchors.learned)
        and stored.learned_first == anchors.learned_first
        and np.allclose(stored.vectors, anchors.vectors, rtol=0, atol=_TOLERANCE * float(np.abs(anchors.vectors).max()))
    )


def _build_segment(uri: str, version: int, name: str, anchors: Anchors, by_label: bool, fragment: int) -> Any:
    """Index a fragment (a million rows, once they are joined), on a worker; what the driver has to commit."""
    dataset: Any = lance.dataset(uri, version=version)
    chosen = [dataset.get_fragment(fragment)]

    def assign() -> Iterator[pa.RecordBatch]:
        for batch in dataset.scanner(["label", "embedding"], with_row_id=True, fragments=chosen).to_batches():
            vectors, labels = vectors_of(batch), batch.column("label").to_pylist()
            partition = anchors.assign(vectors, labels, by_label=by_label).astype(np.uint32)
            yield pa.record_batch({"row_id": batch.column("_rowid"), "partition": pa.array(partition)})

    with tempfile.TemporaryDirectory(prefix="kedge-lists-") as folder:
        # Lance would assign each item to its nearest centroid: the lists are precomputed instead.
        schema = pa.schema([("row_id", pa.uint64()), ("partition", pa.uint32())])
        lists = f"{folder}/lists.lance"
        lance.write_dataset(assign(), lists, schema=schema, max_rows_per_file=_ONE_FILE)
        return dataset.create_index_uncommitted(
            "embedding",
            "IVF_FLAT",
            name=name,
            metric="l2",
            replace=True,
            num_partitions=len(anchors),
            ivf_centroids=_centroids(anchors),
            precomputed_partition_dataset=lists,
            fragment_ids=[fragment],
        )


def _centroids(anchors: Anchors) -> np.ndarray:
    """What Lance routes by: the anchors, of which those that come behind the learned ones are moved far away."""
    centroids = np.array(anchors.vectors, np.float32)
    if anchors.learned_first and anchors.learned:
        centroids[anchors.learned :, 0] += _FAR * max(1.0, float(np.abs(centroids).max()))
    return centroids


# ---------------------------------------------------------------------- searching


@renamed_keywords(without="exclude_id")
def search_with_ray(
    gallery: Gallery,
    queries: np.ndarray,
    k: int = 20,
    probes: int = 1,
    where: str | None = None,
    *,
    exclude_id: int | None = None,
    address: str | None = None,
    workers: int | None = None,
) -> list[Result]:
    """The k nearest items of each vector, but for `exclude_id`: what `gallery.search_embeddings` finds.

    The gallery needs an index (`build_index`) that covers all its items. Each process looks through its part of it;
    only the anchors and the hits are held here, however large the gallery is. With a filter, each looks into the lists
    of the `probes` nearest anchors and on until k match; a result's `anchors` are then those of its hits.
    """
    matrix = gallery.check_vectors(queries)
    require_positive(k=k, probes=probes)
    dataset = lance.dataset(absolute_location(gallery).table_uri)
    if not _row_counts(dataset):
        return [Result(Columns([], [], [], [], []), [], None, 0.0) for _ in matrix]
    name, anchors = _find_index(gallery, dataset)
    if where is not None:
        gallery.check_filter(where)
    probes = min(probes, len(anchors))
    nearest: dict[str, Any] = {"column": "embedding", "k": k + (exclude_id is not None), "metric": "l2"}
    nearest |= {"nprobes": probes} if where is None else {"minimum_nprobes": probes, "maximum_nprobes": len(anchors)}
    segments = sum(len(index.segments) for index in dataset.describe_indices() if index.name == name)
    results = []
    with connect(address, workers) as cluster:
        from lance_ray import pool, vector_search

        count = workers or cluster.cpus
        # One pool for all queries: the workers would be started for each one otherwise.
        pool.init_global_pool(min(count, max(1, segments)))
        try:
            order = anchors.nearest(matrix, probes if where is None else len(anchors))
            for query, numbers in zip(matrix, order, strict=True):
                started = time.perf_counter()
                rows = vector_search(
                    dataset,
                    nearest={**nearest, "q": query},
                    num_workers=count,
                    index_name=name,
                    columns=["id", "path", "label", "embedding"],
                    filter=where,
                    # Rows that are not indexed would be compared by another measure, and whatever their list.
                    fast_search=True,
                    scanner_options={"prefilter": True},
                )
                columns = _rank(rows, query, anchors, by_label=gallery.lists == "label", k=k, exclude_id=exclude_id)
                names = [anchors.names[number] for number in numbers.tolist()]
                if where is not None:
                    names = [name for name in names if name in set(columns.anchors)]
                [unknown] = gallery.is_unknown(anchors, query[None])
                seconds, length = time.perf_counter() - started, float(np.linalg.norm(query))
                results.append(Result(columns, names, unknown, seconds, length=length))
        finally:
            pool.clear_global_pool(close=True)
    return results


def _find_index(gallery: Gallery, dataset: Any) -> tuple[str, Anchors]:
    """The name and the anchors of an index that covers all rows."""
    indices = _covered_fragments(dataset)
    for name, covered in indices.items():
        if _row_counts(dataset).keys() <= covered and (anchors := _stored(Folder(str(gallery.location)), name)):
            return name, anchors
    what = "has items that its index does not know" if indices else "has no index that several processes can search"
    raise GalleryError(f"{gallery.location} {what}: run kedge.ray.build_index, or kedge index with --runner ray.")


def _rank(
    rows: pa.Table, query: np.ndarray, anchors: Anchors, *, by_label: bool, k: int, exclude_id: int | None
) -> Columns:
    """By distance, ties by id. Lance gives squared distances, which are computed anew here by differences."""
    vectors, ids = vectors_of(rows), np.asarray(rows.column("id"))
    squares = np.square(vectors - query).sum(axis=1)
    order = np.lexsort((ids, squares))
    order = order[ids[order] != (-1 if exclude_id is None else exclude_id)][:k]
    hits = rows.take(order)
    labels, paths = hits.column("label").to_pylist(), hits.column("path").to_pylist()
    names = [anchors.names[number] for number in anchors.assign(vectors[order], labels, by_label=by_label).tolist()]
    return Columns(ids[order].tolist(), paths, labels, np.sqrt(squares[order]).tolist(), names)
