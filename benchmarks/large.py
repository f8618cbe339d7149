"""A gallery larger than memory needs to be, beside Lance and FAISS on disk, in one run.

    python benchmarks/large.py                5,000,000 × 128 with 1,000 anchors; writes benchmarks/results/large.json
    python benchmarks/large.py --quick        50,000 items; writes nothing

Build time, bytes on disk, memory of a process that searches (beside what the system keeps of files), and the time of
one query at 1, 4 and 16 probes with the share of the exact 100 nearest it finds: warm, and cold, that is with all files
taken out of memory and the system opened anew before the query. Each system is in a process of its own. Needs Linux,
the extra `bench`, two cores and 25 GB of disk.
"""

# ruff: noqa: D102, ARG002 - `System` says what the methods are
from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kedge.losses.anchors import start_anchors
from kedge.reproduce.machine import describe
from rivals import SEED, Around, Data, FaissLists, K, Lance, System, Worker, build, in_child, recall
from search import Ours, drop, files, say

RESULTS = Path(__file__).parent / "results" / "large.json"
COUNT, QUICK, DIM, ANCHORS = 5_000_000, 50_000, 128, 1_000
QUERIES, WARM, COLD = 500, 300, 15
PROBES = 1, 4, 16
LATENT, SPREAD = 16, 0.35
"""Of the items around their anchor."""
BLOCK = 100_000


class Gallery(Ours):
    """A gallery with anchor lists."""

    forget = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.name, self.probes = "kedge", 1

    def search(self, queries: np.ndarray, k: int = K) -> Any:
        return self.gallery.search_embeddings(queries, k=k, probes=self.probes)

    def try_harder(self, effort: int) -> bool:
        self.probes = effort
        return True

    def close(self) -> None:
        self.gallery = None


class LanceLists(Lance):
    """Lance's index on disk, around centroids of its own or around the anchors; no other column is fetched."""

    def __init__(self, *, anchors: bool) -> None:
        self.anchors, self.probes = anchors, 1
        self.name = "lance, our anchors" if anchors else "lance, k-means"

    def build(self, data: Data, place: Path) -> None:
        items, anchors = data.load("items"), np.array(data.load("anchors"))
        kind = self.arrow.list_(self.arrow.float32(), items.shape[1])
        schema = self.arrow.schema([("vector", kind)])

        def batches() -> Any:
            for start in range(0, len(items), BLOCK):
                flat = self.arrow.array(np.asarray(items[start : start + BLOCK]).reshape(-1))
                column = self.arrow.FixedSizeListArray.from_arrays(flat, items.shape[1])
                yield self.arrow.record_batch([column], schema=schema)

        # In one file, a row's id is its number.
        dataset = self.lance.write_dataset(batches(), str(place), schema=schema, max_rows_per_file=len(items))
        centres = {"ivf_centroids": anchors} if self.anchors else {}
        dataset.create_index("vector", "IVF_FLAT", metric="L2", num_partitions=len(anchors), **centres)

    def search(self, queries: np.ndarray, k: int = K) -> Any:
        asked = queries[0] if len(queries) == 1 else queries
        nearest = {"column": "vector", "q": asked, "k": k, "nprobes": self.probes}
        return self.dataset.to_table(columns=["_distance"], nearest=nearest, with_row_id=True)

    def try_harder(self, effort: int) -> bool:
        self.probes = effort
        return True

    def close(self) -> None:
        self.dataset = None


class FaissOnDisk(FaissLists):
    """FAISS's inverted lists around the anchors, mapped from disk."""

    def __init__(self) -> None:
        super().__init__(anchors=True)
        self.name, self.probes = "faiss on disk, our anchors", 1

    def build(self, data: Data, place: Path) -> None:
        index, items = self.made(data), data.load("items")
        for start in range(0, len(items), BLOCK):
            index.add(np.asarray(items[start : start + BLOCK]))
        self.faiss.write_index(index, str(place))

    def open(self, data: Data, place: Path) -> None:
        self.index = self.faiss.read_index(str(place), self.faiss.IO_FLAG_MMAP)

    def search(self, queries: np.ndarray, k: int = K) -> Any:
        return self.index.search(queries, k, params=self.faiss.SearchParametersIVF(nprobe=self.probes))

    def try_harder(self, effort: int) -> bool:
        self.probes = effort
        return True

    def close(self) -> None:
        self.index = None


SYSTEMS: tuple[Callable[[], Any], ...] = (
    Gallery,
    FaissOnDisk,
    lambda: LanceLists(anchors=True),
    lambda: LanceLists(anchors=False),
)


def draw(data: Data, count: int) -> None:
    """Clustered items and queries, and the exact answer."""
    import faiss

    chance = np.random.default_rng(SEED)
    anchors = start_anchors(ANCHORS, DIM).numpy()
    around = Around(anchors, chance, latent=LATENT, spread=SPREAD)
    labels = chance.integers(ANCHORS, size=count)
    queries = around(chance.permutation(ANCHORS)[:QUERIES])
    items = np.lib.format.open_memmap(data.folder / "items.npy", "w+", np.float32, (count, DIM))
    nearest = faiss.ResultHeap(len(queries), K)
    for start in range(0, count, BLOCK):
        some = around(labels[start : start + BLOCK])
        items[start : start + BLOCK] = some
        distances, rows = faiss.knn(queries, some, K)
        nearest.add_result(distances, rows + start)
    items.flush()
    nearest.finalize()
    for name, array in {"labels": labels, "anchors": anchors, "queries": queries, "exact": nearest.I}.items():
        data.save(name, array)


def measure(system: Any, data: Data, place: Path) -> dict[str, Any]:
    """Warm times and recall in one process, after the cold ones in another."""
    cold = in_child(coldly, system, data, place)
    worker = Worker(system, data, place)
    worker.ask("ready")
    row: dict[str, Any] = dict(worker.ask("open", WARM))
    row["probes"] = {}
    for probes in PROBES:
        worker.ask("set_effort", probes)
        found = worker.ask("found", K)
        worker.rest()
        times, faults = worker.ask("single", [*range(20), *range(WARM)], 20, None)
        row["probes"][probes] = {
            "recall": round(recall(found, np.asarray(data.load("exact"))), 4),
            "warm_ms": round(1000 * statistics.median(times), 3),
            "cold_ms": cold[probes],
            "pages_from_disk": faults,
        }
    row["memory_mib"] = round(max(row["memory_mib"], worker.ask("own_memory")), 1)
    worker.close()
    return row


def coldly(system: Any, data: Data, place: Path) -> dict[int, float]:
    """Milliseconds of one query with no file in memory, opening not counted."""
    system.load()
    queries = np.array(data.load("queries"))
    found = {}
    for probes in PROBES:
        system.try_harder(probes)
        times = []
        for turn in range(COLD + 1):
            # Nothing that is still mapped can be dropped.
            system.close()
            gc.collect()
            drop(place)
            system.open(data, place)
            if isinstance(system, Gallery):
                len(system.gallery)  # what is opened at the first search
            started = time.perf_counter()
            system.search(queries[turn][None])
            times.append(time.perf_counter() - started)
        found[probes] = round(1000 * statistics.median(times[1:]), 3)  # the first one also loaded code
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--scratch", type=Path, help="where to put the data; a new folder in the temporary one")
    given = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    count = QUICK if given.quick else COUNT
    rows = {}
    with tempfile.TemporaryDirectory(dir=given.scratch) as scratch:
        data = Data(Path(scratch))
        in_child(draw, data, count)
        say(f"{count:,} items drawn")
        for make in SYSTEMS:
            system: System = make()
            place = data.folder / "index"
            row = {"build_s": round(in_child(build, system, data, place), 1)}
            row["disk_gib"] = round(sum(file.stat().st_size for file in files(place)) / 2**30, 2)
            rows[system.name] = row | measure(system, data, place)
            say(f"{system.name}: {json.dumps(rows[system.name])}")
            shutil.rmtree(place) if place.is_dir() else place.unlink()
    ours = rows["kedge"]["probes"]
    for row in rows.values():
        for probes, found in row["probes"].items():
            found["warm_times_kedge"] = round(found["warm_ms"] / ours[probes]["warm_ms"], 2)
            found["cold_times_kedge"] = round(found["cold_ms"] / ours[probes]["cold_ms"], 2)
    record = {"items": count, "dim": DIM, "anchors": ANCHORS, "k": K, "systems": rows, "table": table(rows)}
    print(json.dumps(record["table"], indent=1))
    if not given.quick:
        RESULTS.write_text(json.dumps(record | {"machine": describe()}, indent=1) + "\n")


def table(rows: dict[str, Any]) -> dict[str, Any]:
    """What the documentation shows."""
    shown = []
    for name, row in rows.items():
        per = [row["probes"][probes] for probes in PROBES]
        cells = (" / ".join(f"{one[key]:.3g}" for one in per) for key in ("warm_ms", "cold_ms"))
        found = " / ".join(f"{one['recall']:.3f}" for one in per)
        shown.append([name, row["build_s"], row["disk_gib"], round(row["memory_mib"]), *cells, found])
    sides = ["system", "build s", "GiB on disk", "own memory MiB", "warm ms", "cold ms", "recall@100"]
    return {"columns": sides, "rows": shown}


if __name__ == "__main__":
    main()
