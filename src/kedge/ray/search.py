"""Search over several processes: each looks through its part of the index, the driver keeps the nearest of all."""

from __future__ import annotations

import time
from typing import Any

import lance
import numpy as np
import pyarrow as pa

from kedge.deprecation import renamed_keywords
from kedge.errors import ConfigError, GalleryError
from kedge.gallery import Gallery, Result
from kedge.gallery.anchors import Anchors
from kedge.gallery.schema import embeddings_of
from kedge.gallery.search import Columns
from kedge.ray.cluster import connect
from kedge.ray.lance_index import StoredCentroids, absolute_location, covered_fragments

__all__ = ["search_with_ray"]


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

    The gallery needs an index (`build_index`) that covers all its items. Only the anchors and the hits are held here,
    however large the gallery is.
    """
    matrix = gallery.check_vectors(queries)
    if k < 1:
        raise ConfigError(f"k must be at least 1, found {k}.")
    if probes < 1:
        raise ConfigError(f"probes must be at least 1, found {probes}.")
    dataset, name, anchors = _find_index(gallery, where)
    if not name:
        return [Result(Columns([], [], [], [], []), [], None, 0.0) for _ in matrix]
    probes = min(probes, len(anchors))
    options: dict[str, Any] = {
        "index_name": name,
        "columns": ["id", "path", "label", "embedding"],
        "filter": where,
        # Rows that are not indexed would be compared by another measure, and whatever their list.
        "fast_search": True,
        "scanner_options": {"prefilter": True},
    }
    nearest = {"column": "embedding", "k": k + (exclude_id is not None), "nprobes": probes, "metric": "l2"}
    with connect(address, workers) as cluster:
        from lance_ray import pool, vector_search

        count = workers or cluster.workers
        segments = sum(len(index.segments) for index in dataset.describe_indices() if index.name == name)
        # One pool for all queries: the workers would be started for each one otherwise.
        pool.init_global_pool(min(count, max(1, segments)))
        results = []
        try:
            for query, numbers in zip(matrix, anchors.nearest(matrix, probes), strict=True):
                started = time.perf_counter()
                rows = vector_search(dataset, nearest={**nearest, "q": query}, num_workers=count, **options)
                columns = _rank(rows, query, anchors, by_label=gallery.lists == "label", k=k, exclude_id=exclude_id)
                names = [anchors.names[number] for number in numbers.tolist()]
                [unknown] = gallery.is_unknown(anchors, query[None])
                results.append(Result(columns, names, unknown, time.perf_counter() - started))
        finally:
            pool.clear_global_pool(close=True)
    return results


def _find_index(gallery: Gallery, where: str | None) -> tuple[Any, str, Anchors]:
    """The table, the name of its index and the anchors of that; no name where there is nothing to search."""
    dataset = lance.dataset(absolute_location(gallery).table_uri)
    rows = {fragment.fragment_id: fragment.count_rows() for fragment in dataset.get_fragments()}
    indices = covered_fragments(dataset)
    for name, covered in indices.items():
        is_whole = all(number in covered for number, size in rows.items() if size)
        if is_whole and (anchors := StoredCentroids(gallery).read(name)):
            if where is not None:
                gallery.check_filter(where)
            return dataset, name, anchors
    if not any(rows.values()):
        return dataset, "", Anchors(np.empty((0, gallery.dim), np.float32), (), 0)
    what = "has items that its index does not know" if indices else "has no index that several processes can search"
    raise GalleryError(f"{gallery.location} {what}: run kedge.ray.build_index, or kedge index with --runner ray.")


def _rank(
    rows: pa.Table, query: np.ndarray, anchors: Anchors, *, by_label: bool, k: int, exclude_id: int | None
) -> Columns:
    """By distance, ties by id. Lance gives squared distances, which are computed anew here by differences."""
    if not len(rows):
        return Columns([], [], [], [], [])
    vectors, ids = embeddings_of(rows, anchors.vectors.shape[1]), np.asarray(rows.column("id"))
    squares = np.square(vectors - query).sum(axis=1)
    order = np.lexsort((ids, squares))
    order = order[ids[order] != exclude_id][:k] if exclude_id is not None else order[:k]
    hits = rows.take(order)
    labels, paths = hits.column("label").to_pylist(), hits.column("path").to_pylist()
    lists = anchors.assign(vectors[order], labels, by_label=by_label).tolist()
    names = [anchors.names[number] for number in lists]
    return Columns(ids[order].tolist(), paths, labels, np.sqrt(squares[order]).tolist(), names)
