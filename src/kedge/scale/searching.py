"""Search over several processes: each looks through its part of the index, the driver keeps the nearest of all."""

from __future__ import annotations

import time
from typing import Any

import lance
import numpy as np
import pyarrow as pa

from kedge.errors import ConfigError, GalleryError
from kedge.gallery import Gallery, Result
from kedge.gallery.anchors import Anchors
from kedge.gallery.record import embeddings_of
from kedge.gallery.search import Columns
from kedge.scale.cluster import connected
from kedge.scale.routes import Routes, indexed, record_at

__all__ = ["search_with_ray"]


def search_with_ray(
    gallery: Gallery,
    queries: np.ndarray,
    k: int = 20,
    probes: int = 1,
    where: str | None = None,
    *,
    without: int | None = None,
    address: str | None = None,
    workers: int | None = None,
) -> list[Result]:
    """The k nearest items of each vector, but for one that is left out: what `gallery.search_embeddings` finds.

    The gallery needs an index (`build_index`) that knows all its items. Only the anchors and the hits are held here,
    however large the gallery is.
    """
    matrix = gallery.checked(queries)
    if k < 1:
        raise ConfigError(f"k must be at least 1, found {k}.")
    if probes < 1:
        raise ConfigError(f"probes must be at least 1, found {probes}.")
    dataset, name, anchors = _index(gallery, where)
    if not name:
        return [Result(Columns([], [], [], [], []), [], None, 0.0) for _ in matrix]
    probes = min(probes, len(anchors))
    with connected(address, workers) as cluster:
        from lance_ray import pool, vector_search

        # One pool for all queries: the workers would be started for each one otherwise.
        pool.init_global_pool(min(workers or cluster.workers, _segments(dataset, name)))
        results = []
        try:
            for query, places in zip(matrix, anchors.nearest(matrix, probes), strict=True):
                started = time.perf_counter()
                found = vector_search(
                    dataset,
                    nearest={
                        "column": "embedding",
                        "q": query,
                        "k": k if without is None else k + 1,
                        "nprobes": probes,
                        "metric": "l2",
                    },
                    index_name=name,
                    columns=["id", "path", "label", "embedding"],
                    filter=where,
                    num_workers=workers or cluster.workers,
                    # What is not indexed would be compared by another measure, and whatever its list.
                    fast_search=True,
                    scanner_options={"prefilter": True},
                )
                columns = _ranked(found, query, anchors, by_label=gallery.lists == "label", k=k, without=without)
                names = [anchors.names[place] for place in places.tolist()]
                results.append(Result(columns, names, _unknown(gallery, anchors, query), time.perf_counter() - started))
        finally:
            pool.clear_global_pool(close=True)
    return results


def _index(gallery: Gallery, where: str | None) -> tuple[Any, str, Anchors]:
    """The record, its index and the anchors of that; no name where there is nothing to search."""
    dataset = lance.dataset(record_at(gallery))
    rows = {one.fragment_id: one.count_rows() for one in dataset.get_fragments()}
    found = indexed(dataset)
    for name, covered in found.items():
        if all(one in covered for one, size in rows.items() if size) and (anchors := Routes(gallery).read(name)):
            if where is not None:
                gallery.check_filter(where)
            return dataset, name, anchors
    if not any(rows.values()):
        return dataset, "", Anchors(np.empty((0, gallery.dim), np.float32), (), 0)
    what = "has items that its index does not know" if found else "has no index that several processes can search"
    raise GalleryError(f"{gallery.place} {what}: run kedge.scale.build_index, or kedge index with --runner ray.")


def _segments(dataset: Any, name: str) -> int:
    return max(1, sum(len(index.segments) for index in dataset.describe_indices() if index.name == name))


def _ranked(
    found: pa.Table, query: np.ndarray, anchors: Anchors, *, by_label: bool, k: int, without: int | None
) -> Columns:
    """By distance, ties by id. Lance gives squared distances, which are computed anew here by differences."""
    if not len(found):
        return Columns([], [], [], [], [])
    vectors, ids = embeddings_of(found, anchors.vectors.shape[1]), np.asarray(found.column("id"))
    squares = np.square(vectors - query).sum(axis=1)
    order = np.lexsort((ids, squares))
    order = order[ids[order] != without][:k] if without is not None else order[:k]
    labels = [found.column("label")[row].as_py() for row in order.tolist()]
    homes = anchors.assign(vectors[order], labels, by_label=by_label).tolist()
    return Columns(
        ids[order].tolist(),
        [found.column("path")[row].as_py() for row in order.tolist()],
        labels,
        np.sqrt(squares[order]).tolist(),
        [anchors.names[home] for home in homes],
    )


def _unknown(gallery: Gallery, anchors: Anchors, query: np.ndarray) -> bool | None:
    if gallery.calibration is None:
        return None
    return bool(np.sqrt(anchors.nearest_squares(query[None])[0]) > gallery.calibration.threshold)
