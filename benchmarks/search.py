"""Search in a gallery beside its rivals, in one run: latency, throughput, memory, recall.

    python benchmarks/search.py [--items 100000] [--quick]

512 dimensions, 100 anchors, k = 100; a single query and a batch of 1,000. Ratios are against raw FAISS with one
probe over the same anchors. Needs the extra `bench` (FAISS).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kedge.gallery import Gallery
from machine import describe

RESULTS = Path(__file__).parent / "results"
DIM, ANCHORS, K = 512, 100, 100
SINGLE, BATCH = 200, 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--quick", action="store_true", help="10,000 items; writes nothing")
    arguments = parser.parse_args()
    count = 10_000 if arguments.quick else arguments.items
    chance = np.random.default_rng(0)
    anchors = (chance.normal(size=(ANCHORS, DIM)) * 0.3).astype(np.float32)
    labels = chance.integers(0, ANCHORS, count)
    items = anchors[labels] + chance.normal(size=(count, DIM)).astype(np.float32) * 0.25
    queries = anchors[chance.integers(0, ANCHORS, BATCH)] + chance.normal(size=(BATCH, DIM)).astype(np.float32) * 0.25
    exact, rows = rivals(items, anchors, queries)
    with tempfile.TemporaryDirectory() as scratch:
        rows["gallery"] = ours(Path(scratch, "gallery"), items, anchors, labels, queries)
    base = rows["faiss ivf, anchors, 1 probe"]["ms"]
    for name, row in rows.items():
        row["recall"] = recall(row.pop("found"), exact)
        row["times_faiss_ivf"] = round(row["ms"] / base, 2)
        print(
            f"{name:30} {row['ms']:8.3f} ms ({row['times_faiss_ivf']:6.2f} x)  {row['qps']:9.0f} queries/s  "
            f"recall {row['recall']:.3f}  build {row['build_s']:.1f} s"
        )
    if not arguments.quick:
        record = {"items": count, "dim": DIM, "anchors": ANCHORS, "k": K, "rows": rows, "machine": describe()}
        (RESULTS / f"search_{count}.json").write_text(json.dumps(record, indent=1) + "\n")


def ours(path: Path, items: np.ndarray, anchors: np.ndarray, labels: np.ndarray, queries: np.ndarray) -> dict[str, Any]:
    """A gallery, hits with path and label included."""
    names = [f"class {row}" for row in range(ANCHORS)]
    started = time.perf_counter()
    gallery = Gallery.create(path, anchors=anchors, classes=names, lists="anchor")
    for start in range(0, len(items), 50_000):
        some = labels[start : start + 50_000]
        paths = [f"photos/{names[one]}/{start + row}.jpg" for row, one in enumerate(some)]
        gallery.add_embeddings(items[start : start + 50_000], labels=[names[one] for one in some], paths=paths)
    gallery.optimize()
    build = time.perf_counter() - started
    started = time.perf_counter()
    gallery = Gallery.open(path)
    gallery.search_embeddings(queries[:1], k=K)
    opened = time.perf_counter() - started

    def search(some: np.ndarray) -> np.ndarray:
        found = gallery.search_embeddings(some, k=K)
        return np.array([[hit.id for hit in result] + [-1] * (K - len(result)) for result in found])

    def timed(some: np.ndarray) -> None:
        gallery.search_embeddings(some, k=K)

    return measure(timed, search, queries, build) | {"open_s": round(opened, 3)}


def rivals(items: np.ndarray, anchors: np.ndarray, queries: np.ndarray) -> tuple[np.ndarray, dict[str, dict[str, Any]]]:
    """What others do with the same vectors, and the exact answer."""
    import faiss

    rows: dict[str, dict[str, Any]] = {}
    started = time.perf_counter()
    flat = faiss.IndexFlatL2(DIM)
    flat.add(items)
    built = time.perf_counter() - started
    exact = flat.search(queries, K)[1]
    rows["faiss flat"] = measure(
        lambda some: flat.search(some, K), lambda some: flat.search(some, K)[1], queries, built
    )

    started = time.perf_counter()
    quantizer = faiss.IndexFlatL2(DIM)
    quantizer.add(anchors)
    ivf = faiss.IndexIVFFlat(quantizer, DIM, ANCHORS)
    ivf.add(items)
    built = time.perf_counter() - started
    rows["faiss ivf, anchors, 1 probe"] = measure(
        lambda some: ivf.search(some, K), lambda some: ivf.search(some, K)[1], queries, built
    )
    return exact, rows


def measure(
    timed: Callable[[np.ndarray], Any], search: Callable[[np.ndarray], np.ndarray], queries: np.ndarray, build: float
) -> dict[str, Any]:
    """The median of single queries, and a whole batch."""
    for query in queries[:20]:
        timed(query[None])
    times = []
    for query in queries[:SINGLE]:
        started = time.perf_counter()
        timed(query[None])
        times.append(time.perf_counter() - started)
    started = time.perf_counter()
    timed(queries)
    batch = time.perf_counter() - started
    return {
        "ms": round(statistics.median(times) * 1000, 4),
        "qps": round(len(queries) / batch),
        "build_s": round(build, 2),
        "found": search(queries),
    }


def recall(found: np.ndarray, exact: np.ndarray) -> float:
    """The share of the exact answer that was found."""
    hits = [len(set(a.tolist()) & set(b.tolist())) for a, b in zip(found, exact, strict=True)]
    return round(float(np.mean(hits)) / exact.shape[1], 4)


if __name__ == "__main__":
    main()
