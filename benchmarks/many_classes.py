"""Stage one among very many classes: through the index over the anchors, beside a look at all of them, in one run.

    python benchmarks/many_classes.py              1,000,000 × 128; writes benchmarks/results/many_classes.json
    python benchmarks/many_classes.py --quick      30,000 anchors; writes nothing

The anchors are those that training starts from: directions without any structure, which is the hardest case for an
index. A query lies at `noise` margins from its anchor, in a direction drawn at random; half the way to the next anchor
is where classes meet. FAISS's HNSW and IVF (64 of as many cells as ours) over the same anchors stand beside.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kedge.gallery.anchor_index import AnchorIndex
from kedge.gallery.anchors import Anchors
from kedge.losses.anchors import init_anchors
from kedge.reproduce.machine import describe

RESULTS = Path(__file__).parent / "results" / "many_classes.json"
COUNT, QUICK, DIM, MARGIN = 1_000_000, 30_000, 128, 2.0
QUERIES, FLAT = 1000, 100
NOISES = 0.25, 0.5, 1.0, 1.25
CELLS, DEGREE, BREADTH = 64, 16, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    import faiss

    points = init_anchors(QUICK if quick else COUNT, DIM, margin=MARGIN).numpy()
    names = ("",) * len(points)
    index, seconds = timed(lambda: AnchorIndex.build(points))
    print(f"index over {len(points):,} anchors built in {seconds:.0f} s", flush=True)
    ours, flat = Anchors(points, names, 0, index), Anchors(points, names, 0)
    cells, cell_seconds = timed(lambda: faiss_cells(faiss, points, len(index.centres)))
    graph, graph_seconds = timed(lambda: faiss_graph(faiss, points))
    ways: dict[str, Callable[[np.ndarray], Any]] = {
        "all anchors": lambda query: flat.nearest(query, 1)[0, 0],
        "kedge": lambda query: ours.nearest(query, 1)[0, 0],
        "faiss ivf": lambda query: cells.search(query, 1)[1][0, 0],
        "faiss hnsw": lambda query: graph.search(query, 1)[1][0, 0],
    }
    build = {"kedge": seconds, "faiss ivf": cell_seconds, "faiss hnsw": graph_seconds}
    found: dict[str, Any] = {}
    for noise in NOISES:
        queries = around(points, noise * MARGIN)
        exact = faiss.knn(queries, points, 1)[1][:, 0]
        found[str(noise)] = rows = {name: asked(way, queries, exact) for name, way in ways.items()}
        for row in rows.values():
            row["times_faster"] = round(rows["all anchors"]["ms"] / row["ms"], 1)
        print(noise, json.dumps(rows), flush=True)
    record = {"anchors": len(points), "dim": DIM, "margin": MARGIN, "build_s": build, "noise": found}
    record["table"] = table(found, build)
    if not quick:
        RESULTS.write_text(json.dumps(record | {"machine": describe()}, indent=1) + "\n")


def around(points: np.ndarray, length: float) -> np.ndarray:
    chance = np.random.default_rng(1)
    steps = chance.standard_normal((QUERIES, points.shape[1])).astype(np.float32)
    steps *= length / np.linalg.norm(steps, axis=1, keepdims=True)
    queries: np.ndarray = points[chance.integers(len(points), size=QUERIES)] + steps
    return queries


def asked(way: Callable[[np.ndarray], Any], queries: np.ndarray, exact: np.ndarray) -> dict[str, float]:
    """Median time of a query, and the share that was sent where looking at all sends it."""
    for query in queries[:5]:
        way(query[None])
    times, right = [], []
    started = time.perf_counter()
    for query, wanted in zip(queries, exact, strict=True):
        began = time.perf_counter()
        got = way(query[None])
        times.append(time.perf_counter() - began)
        right.append(int(got) == int(wanted))
        if len(times) >= FLAT and time.perf_counter() - started > 10:
            break
    return {"ms": round(1000 * statistics.median(times), 4), "agreement": round(sum(right) / len(right), 4)}


def faiss_cells(faiss: Any, points: np.ndarray, cells: int) -> Any:
    index = faiss.IndexIVFFlat(faiss.IndexFlatL2(points.shape[1]), points.shape[1], cells)
    index.train(points[np.random.default_rng(0).permutation(len(points))[: 40 * cells]])
    index.add(points)
    index.nprobe = CELLS
    return index


def faiss_graph(faiss: Any, points: np.ndarray) -> Any:
    index = faiss.IndexHNSWFlat(points.shape[1], DEGREE)
    index.hnsw.efConstruction = BREADTH
    index.add(points)
    index.hnsw.efSearch = BREADTH
    return index


def timed(make: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    made = make()
    return made, round(time.perf_counter() - started, 1)


def table(found: dict[str, Any], build: dict[str, float]) -> dict[str, Any]:
    """What the documentation shows."""
    columns = ["way", "build s", *(f"{noise} margins: ms, times faster, agreement" for noise in found)]
    names = next(iter(found.values()))
    rows = [
        [
            name,
            build.get(name, ""),
            *(
                f"{one[name]['ms']:.3g}, {one[name]['times_faster']:g} ×, {one[name]['agreement']:.3f}"
                for one in found.values()
            ),
        ]
        for name in names
    ]
    return {"columns": columns, "rows": rows}


if __name__ == "__main__":
    main()
