"""Search in a gallery beside its rivals, in one run: latency, throughput, build, opening, memory, recall, mAP.

    python benchmarks/search.py                 100,000 and 1,000,000 items; writes benchmarks/results/search.json
    python benchmarks/search.py --quick         10,000 items in a minute; writes nothing
    python benchmarks/search.py --run RUN       mAP on the embeddings of this CAM run, not of one trained here

512 dimensions, 100 anchors, k = 100, two cores. A single search in a gallery includes every hit with path and label, as
an object each; the hits of a batch become objects when somebody looks at them; a rival is its raw call. Each system is
in a process of its own; they are asked in turn, a few queries each, and every next query belongs to another list, so
that neither drift nor caches favour anyone. Then more probes, a filter and removed items. Needs Linux and the extra
`bench`; a million items need 20 GiB of memory, 30 GB of disk and a machine that does nothing else.
"""

# ruff: noqa: D102, ARG002 - `System` says what the methods are
from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from kedge.reproduce.machine import describe
from rivals import (
    BETWEEN,
    BREADTH,
    DEGREE,
    NOISE,
    SEED,
    WIDTHS,
    Around,
    Data,
    FaissFlat,
    FaissGraph,
    FaissLists,
    Hnswlib,
    Holder,
    K,
    Lance,
    Reader,
    System,
    Usearch,
    Worker,
    build,
    in_child,
    recall,
)

RESULTS = Path(__file__).parent / "results" / "search.json"
CORES, DIM, ANCHORS, BATCH = 2, 512, 100, 1000
SIZES, QUICK = (100_000, 1_000_000), 10_000
GRAPHS_UP_TO = 100_000
SINGLE, CHUNK, UNMEASURED, BATCHES = 200, 10, 2, 3
"""Single queries of each system, so many in a turn behind some that only wake it; turns of whole batches."""
PROBES, KEPT, REMOVED = (4, 16), 100, 10
"""Probes besides one; a filter keeps one item in so many; one in so many is removed."""
COLD = 20
"""So many lists are searched cold."""
SPREAD, LATENT = 1.0, 32
"""Of the items around their anchor."""
QUIET = 0.05
"""The share of the cores that other processes may use before times mean little: whoever uses two threads waits."""
OURS, FLAT, LISTS = "gallery float32", "faiss flat", "faiss ivf, our anchors"
STARTED = time.monotonic()


class Ours(System):
    """A gallery with anchor lists."""

    name = OURS
    where: str | None = None
    """A filter."""
    forget: float | None = None
    """Days for which the table's earlier versions are kept; None: for ever."""

    def __init__(self) -> None:
        self.gallery: Any = None

    def load(self) -> None:
        from kedge.gallery import Gallery

        self.type = Gallery

    def build(self, data: Data, place: Path) -> None:
        items, anchors = data.load("items"), np.array(data.load("anchors"))
        names = [f"class {row}" for row in range(len(anchors))]
        gallery = self.type.create(place, anchors=anchors, classes=names, lists="anchor")
        codes = data.load("labels").tolist()
        for start in range(0, len(items), 50_000):
            labels = [names[code] for code in codes[start : start + 50_000]]
            paths = [f"photos/{label}/{start + row}.jpg" for row, label in enumerate(labels)]
            gallery.add_embeddings(items[start : start + 50_000], labels=labels, paths=paths)
        gallery.optimize(forget=self.forget)

    def open(self, data: Data, place: Path) -> None:
        self.gallery = self.type.open(place)

    def search(self, queries: np.ndarray, k: int = K) -> Any:
        return self.gallery.search_embeddings(queries, k=k, probes=self.probes, where=self.where)

    def asked(self, queries: np.ndarray, row: int, way: Any) -> Callable[[], Any]:
        return lambda: self.search(queries[row : row + 1])[0].hits

    def remove(self, step: int) -> None:
        """Remove one item in so many."""
        self.gallery.remove(range(3, len(self.gallery), step))

    def ids(self, found: Any) -> np.ndarray:
        most = max(map(len, found))
        return np.array([[hit.id for hit in result] + [-1] * (most - len(result)) for result in found])


def lineup(*, graphs: bool) -> list[System]:
    rivals = [FaissFlat(), FaissLists(anchors=False), FaissLists(anchors=True), Lance()]
    return [Ours(), *rivals, *([FaissGraph(), Hnswlib(), Usearch()] if graphs else [])]


# ---------------------------------------------------------------------- vectors


def draw(data: Data, count: int) -> None:
    """Clustered items and queries; consecutive queries belong to different lists."""
    chance = np.random.default_rng(SEED)
    anchors = (chance.standard_normal((ANCHORS, DIM)) * 0.3).astype(np.float32)
    around = Around(anchors, chance, latent=LATENT, spread=SPREAD)
    labels = chance.integers(ANCHORS, size=count)
    items = np.lib.format.open_memmap(data.folder / "items.npy", "w+", np.float32, (count, DIM))
    for start in range(0, count, 50_000):
        items[start : start + 50_000] = around(labels[start : start + 50_000])
    items.flush()
    data.save("labels", labels)
    data.save("anchors", anchors)
    data.save("queries", around(np.arange(BATCH) % ANCHORS))
    complete(data)


def complete(data: Data) -> None:
    """Add the list of every item and query, and the exact answer."""
    from kedge.metrics import nearest

    anchors = np.array(data.load("anchors"))
    for name, target in {"items": "homes", "queries": "query_homes"}.items():
        blocks = np.array_split(data.load(name), max(1, len(data.load(name)) // 8192))
        scores = ((anchors**2).sum(1) - 2 * block @ anchors.T for block in blocks)
        data.save(target, np.concatenate([score.argmin(1) for score in scores]))
    data.save("exact", nearest(np.array(data.load("queries")), data.load("items"), K).numpy())


def in_own_list(data: Data) -> float:
    """The share of the exact answer that one probe can find."""
    return float((data.load("homes")[data.load("exact")] == data.load("query_homes")[:, None]).mean())


# ---------------------------------------------------------------------- time and memory


def compare(scratch: Path, count: int) -> dict[str, Any]:
    """All systems at one size."""
    data = Data(scratch / "data")
    data.folder.mkdir()
    say(f"{count:,} items: drawing them and searching them exactly")
    in_child(draw, data, count)
    wanted = in_own_list(data)
    systems = lineup(graphs=count <= GRAPHS_UP_TO)
    rows: dict[str, dict[str, Any]] = {}
    for system in systems:
        work = prepare if isinstance(system, Ours) else plainly_built
        rows[system.name] = in_child(work, system, data, scratch / system.name)
        say(f"  {system.name}: built in {rows[system.name]['build_s']} s")
    workers: dict[str, Worker] = {}
    try:
        for system in (*systems, Reader()):
            workers[system.name] = Worker(system, data, scratch / system.name)
        for worker in workers.values():
            worker.ask("ready")
        for name, worker in workers.items():
            place = scratch / name
            read(place / "lists" if (place / "lists").exists() else place)
            opened = worker.ask("open", SINGLE)
            if name in rows:
                rows[name] |= opened
                rows[name]["note"] = worker.ask("tune", wanted)
            if place.is_file():
                drop(place)  # a copy is in the worker's memory
            worker.rest()
        drop(data.folder)
        before, started = by_others(workers), time.monotonic()
        reads = take_turns(workers, rows)
        others = (by_others(workers) - before) / (time.monotonic() - started) / CORES
        for name in rows:
            found = workers[name].ask("found", K)
            rows[name]["recall"] = round(recall(found, data.load("exact")), 4)
        variations = vary(workers)
    finally:
        for worker in workers.values():
            worker.close()
    for system in systems:
        row = rows[system.name]
        row["times_as_fast_as_flat"] = round(rows[FLAT]["ms"] / row["ms"], 2)
        row["times_as_fast_as_ivf_anchors"] = round(rows[LISTS]["ms"] / row["ms"], 2)
        if isinstance(system, Ours):
            row["times_read"] = round(row["ms"] / min(reads.values()), 2)
    return {
        "in_own_list": round(wanted, 4),
        "busy_with_others": round(others, 3),
        "systems": rows,
        "read_ms": reads,
        "variations": variations,
    }


def vary(workers: dict[str, Worker]) -> dict[str, Any]:
    """More probes beside FAISS; a filter and removed items beside the same gallery without."""
    found: dict[str, Any] = {}
    for probes in PROBES:
        for name in (OURS, LISTS):
            workers[name].ask("set", "probes", probes)
        found[f"{probes} probes"] = duel(workers, OURS, LISTS)
    workers[OURS].ask("set", "probes", 1)
    found["as it is"] = duel(workers, OURS)
    workers[OURS].ask("set", "where", f"id % {KEPT} = 7")
    found[f"a filter that keeps {1 / KEPT:.0%}"] = duel(workers, OURS)
    workers[OURS].ask("set", "where", None)
    workers[OURS].ask("call", "remove", REMOVED)
    found[f"{1 / REMOVED:.0%} removed"] = duel(workers, OURS)
    return found


def duel(workers: dict[str, Worker], *names: str) -> dict[str, Any]:
    """Single queries and batches of some systems, in turn."""
    times: dict[str, list[float]] = {name: [] for name in names}
    batches: dict[str, list[float]] = {name: [] for name in names}
    for first in range(0, SINGLE, CHUNK):
        for name in names:
            asked = [row % SINGLE for row in range(first - UNMEASURED, first + CHUNK)]
            times[name] += workers[name].ask("single", asked, UNMEASURED, None)[0]
            workers[name].rest()
    for _ in range(BATCHES):
        for name in names:
            batches[name].append(workers[name].ask("batch"))
            workers[name].rest()
    return {
        name: {
            "ms": round(1000 * statistics.median(times[name]), 4),
            "qps": round(BATCH / statistics.median(batches[name])),
        }
        for name in names
    }


def by_others(workers: dict[str, Worker]) -> float:
    """Seconds that our cores have worked for other processes and, on a virtual machine, other machines."""
    lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    spent = [list(map(int, line[1:9])) for line in lines if line[0] in cores]
    # Without the fourth and fifth, which are idle.
    total = sum(sum(some[:3] + some[5:]) for some in spent) / os.sysconf("SC_CLK_TCK")
    return total - time.process_time() - sum(worker.seconds() for worker in workers.values())


def take_turns(workers: dict[str, Worker], rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Ask everyone a few queries in turn until all have had all; then batches. Returns what reading a list takes."""
    ways = (1, CORES)
    turns: list[tuple[str, Any]] = [(name, None) for name in rows]
    turns += [(Reader.name, (WIDTHS["float32"], threads)) for threads in ways]
    times: list[list[float]] = [[] for _ in turns]
    faults = [0] * len(turns)
    for first in range(0, SINGLE, CHUNK):
        for place, (name, way) in enumerate(turns):
            # Everyone is somewhere else in the circle of queries, so that no list is hot from the one before.
            start = first + place * CHUNK
            asked = [row % SINGLE for row in range(start - UNMEASURED, start + CHUNK)]
            taken, faulted = workers[name].ask("single", asked, UNMEASURED, way)
            workers[name].rest()
            times[place] += taken
            faults[place] += faulted
    say(f"  {SINGLE} single queries each are done")
    batches: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(BATCHES):
        for name in rows:
            batches[name].append(workers[name].ask("batch"))
            workers[name].rest()
    say(f"  {BATCHES} batches of {BATCH:,} each are done")
    milliseconds = [1000 * statistics.median(some) for some in times]
    for place, row in enumerate(rows.values()):
        row["ms"] = round(milliseconds[place], 4)
        row["ms_quartiles"] = [round(1000 * edge, 4) for edge in statistics.quantiles(times[place])[::2]]
        row["major_faults"] = faults[place]
    for name, some in batches.items():
        rows[name]["qps"] = round(BATCH / statistics.median(some))
    names = [f"{threads} thread{'s' * (threads > 1)}" for threads in ways]
    return {name: round(value, 4) for name, value in zip(names, milliseconds[len(rows) :], strict=True)}


def plainly_built(system: System, data: Data, place: Path) -> dict[str, Any]:
    return {"build_s": round(build(system, data, place), 2)}


def prepare(system: Ours, data: Data, place: Path) -> dict[str, Any]:
    """Build a gallery, and search it while its files are not in memory: each time it is opened and asked once."""
    row: dict[str, Any] = {"build_s": round(build(system, data, place), 2)}
    queries = np.array(data.load("queries"))
    opened, times, taken = [], [], []
    lists = COLD if len(data.load("items")) > QUICK else COLD // 4
    for turn in range(lists + 1):
        # Nothing that is still mapped can be dropped.
        system.gallery = None
        gc.collect()
        drop(place)
        started = time.perf_counter()
        system.open(data, place)
        len(system.gallery)
        opened.append(time.perf_counter() - started)
        before = from_disk()
        started = time.perf_counter()
        system.search(queries[turn * ANCHORS // (lists + 1)][None])
        times.append(time.perf_counter() - started)
        taken.append(from_disk() - before)
    # The first one also loaded code.
    row["cold_ms"] = round(1000 * statistics.median(times[1:]), 3)
    row["cold_open_s"] = round(statistics.median(opened[1:]), 4)
    row["cold_mib_from_disk"] = round(statistics.median(taken[1:]) / 2**20, 2)
    return row


def drop(place: Path) -> None:
    """Take files out of memory, as far as nobody has them mapped."""
    for file in files(place):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(place: Path) -> None:
    """Bring files into memory."""
    for file in files(place):
        with file.open("rb", buffering=0) as stream:
            while stream.read(1 << 24):
                pass


def files(place: Path) -> list[Path]:
    return [file for file in (place, *place.rglob("*")) if file.is_file()]


def from_disk() -> int:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


# ---------------------------------------------------------------------- quality


def judge(scratch: Path, run: Path | None, epochs: int | None) -> dict[str, Any]:
    """mAP of all systems on a trained model: training pictures are searched with test pictures."""
    data = Data(scratch)
    protocol = embed(data, run, epochs, scratch / "run")
    labels, right = data.load("labels"), data.load("query_labels")
    relevant = (labels == right[:, None]).sum(1)
    rows: dict[str, dict[str, Any]] = {}
    for system in lineup(graphs=True):
        build(system, data, scratch / system.name)
        holder = Holder(system, data, scratch / system.name)
        holder.open(0)
        row: dict[str, Any] = {"note": holder.tune(in_own_list(data))}
        found = holder.found(K)
        row[f"mAP@{K}"] = mean_precision(found, labels, right, np.minimum(relevant, K))
        row["recall"] = round(recall(found, data.load("exact")), 4)
        if isinstance(system, Ours):
            row["mAP"] = mean_precision(holder.found(len(labels)), labels, right, relevant)
        rows[system.name] = row
    return {"protocol": protocol, "systems": rows}


def embed(data: Data, run: Path | None, epochs: int | None, folder: Path) -> dict[str, Any]:
    """Save the embeddings; returns what the protocol finds, without any index."""
    import kedge
    from kedge.config.compose import dataset_of
    from kedge.evaluation import evaluate_embeddings, route
    from kedge.metrics import rank_relevant
    from kedge.model import Model, embed_split

    overrides = ["experiment=demo", "loss=cam", f"seed={SEED}", *([f"recipe.epochs={epochs}"] if epochs else [])]
    model = Model.load(run) if run else kedge.train(overrides=overrides, folder=folder)
    if model.loss != "cam" or model.anchors is None:
        raise SystemExit(f"{run} was trained with the loss {model.loss}: give a run with loss=cam.")
    dataset = dataset_of(run or folder)
    train, test = (embed_split(model.embed_pixels, some).cpu() for some in (dataset.train, dataset.test))
    model.to("cpu")
    asked, listed = route(model, test), route(model, train)
    pairs = (test, dataset.test.labels, train, dataset.train.labels)
    report = evaluate_embeddings(*pairs, query_routes=asked, gallery_routes=listed)
    last = rank_relevant(*pairs, query_lists=asked, gallery_lists=listed, rest="last").mean()
    for name, array in {"items": train, "queries": test, "anchors": model.anchors}.items():
        data.save(name, array.detach().numpy())
    data.save("labels", dataset.train.labels)
    data.save("query_labels", dataset.test.labels)
    complete(data)
    return {
        "overrides": None if run else overrides,
        "model": model.encoder.name,
        "model_fingerprint": model.fingerprint,
        "dataset": dataset.name,
        "dataset_fingerprint": dataset.fingerprint(),
        "dim": model.dim,
        "anchors": len(model.anchors),
        "items": len(train),
        "queries": len(test),
        "brute_force_mAP": report.brute_force["mAP"],
        "anchor_lists_mAP": report.anchor_lists["mAP"],
        "anchor_lists_rest_last_mAP": last["mAP"],
    }


def mean_precision(found: np.ndarray, labels: np.ndarray, right: np.ndarray, possible: np.ndarray) -> float:
    """mAP: precision at every relevant hit, divided by the relevant items that could have been found."""
    hits = (labels[found] == right[:, None]) & (found >= 0)
    precision = hits.cumsum(1) / np.arange(1, found.shape[1] + 1)
    return float(((precision * hits).sum(1) / np.maximum(possible, 1))[possible > 0].mean())


# ---------------------------------------------------------------------- report


def targets(sizes: dict[int, dict[str, Any]], quality: dict[str, Any]) -> list[dict[str, Any]]:
    """What was promised, and what this run found."""
    name = OURS
    small, large = SIZES
    as_fast = ("at least as fast as FAISS IVF with our anchors", "times_as_fast_as_ivf_anchors", 1.0)
    promises = [
        (small, "at least 100 times as fast as FAISS flat", "times_as_fast_as_flat", 100.0),
        *((count, *as_fast) for count in SIZES),
        (large, "at most twice the time to read the list's bytes once", "times_read", 2.0),
    ]
    rows = []
    for count, text, key, bound in promises:
        size = sizes.get(count, {"systems": {}})
        found = size["systems"].get(name, {}).get(key)
        if found is None:
            verdict = "not measured"
        elif size["busy_with_others"] > QUIET:
            verdict = "machine busy"
        else:
            verdict = "met" if (found <= bound if key == "times_read" else found >= bound) else "NOT MET"
        rows.append({"target": f"{count:,} items: {text}", "found": found, "verdict": verdict})
    brute, listed = quality["protocol"]["brute_force_mAP"], quality["systems"].get(name, {}).get("mAP")
    verdict = "not measured" if listed is None else "met" if listed >= brute else "NOT MET"
    text = f"mAP of anchor lists at least that of exact brute force, {brute:.4f}"
    return [*rows, {"target": text, "found": listed, "verdict": verdict}]


def show(sizes: dict[int, dict[str, Any]], quality: dict[str, Any], met: list[dict[str, Any]]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 150)
    for count, found in sizes.items():
        title = f"{count:,} items; one probe can find {found['in_own_list']:.4f} of the exact answer"
        heads = (
            "",
            "ms",
            "x flat",
            "x ivf",
            "cold ms",
            "queries/s",
            "build s",
            "open s",
            "MiB",
            "mapped",
            f"recall@{K}",
        )
        table = Table(
            *heads, f"mAP@{K}", title=title, caption="x: times as fast as FAISS flat, FAISS IVF with our anchors"
        )
        for column in table.columns[1:]:
            column.justify = "right"
        for name, row in found["systems"].items():
            speeds = [f"{row[key]:.2f}" for key in ("times_as_fast_as_flat", "times_as_fast_as_ivf_anchors")]
            chilled = f"{row['cold_ms']:.2f}" if "cold_ms" in row else ""
            sizes_ = [f"{row[key]:,.0f}" for key in ("memory_mib", "mapped_mib")]
            table.add_row(
                f"{name} ({row['note']})" if row["note"] else name,
                f"{row['ms']:.3f}",
                *speeds,
                chilled,
                f"{row['qps']:,}",
                f"{row['build_s']:.1f}",
                f"{row['open_s']:.3f}",
                *sizes_,
                f"{row['recall']:.4f}",
                f"{quality['systems'][name][f'mAP@{K}']:.4f}",
            )
        console.print(table)
        for name, both in found["variations"].items():
            parts = (f"{system} {row['ms']:.3f} ms, {row['qps']:,} queries/s" for system, row in both.items())
            console.print(f"{name}: {'; '.join(parts)}", highlight=False, soft_wrap=True)
        if found["busy_with_others"] > QUIET:
            share = f"{found['busy_with_others']:.0%}"
            console.print(f"Others used {share} of the cores meanwhile: do not trust these times.", style="red")
        if slow := [name for name, row in found["systems"].items() if row["major_faults"]]:
            console.print(f"Too little memory: {', '.join(slow)} had to read pages from disk.", style="red")
        for name, row in found["systems"].items():
            if "times_read" in row:
                reads = ", ".join(f"{value:.3f} ms ({way})" for way, value in found["read_ms"].items())
                console.print(
                    f"{name}: {row['times_read']} x the time to read its list once, {reads}",
                    highlight=False,
                    soft_wrap=True,
                )
    protocol = quality["protocol"]
    console.print(
        f"mAP, {protocol['model']} on {protocol['dataset']}: brute force {protocol['brute_force_mAP']:.4f}, "
        f"anchor lists {protocol['anchor_lists_mAP']:.4f}, rest last {protocol['anchor_lists_rest_last_mAP']:.4f}; "
        + ", ".join(f"{name} {row['mAP']:.4f}" for name, row in quality["systems"].items() if "mAP" in row),
        highlight=False,
        soft_wrap=True,
    )
    for row in met:
        value = "" if row["found"] is None else f": {row['found']:.4g}"
        console.print(f"{row['verdict']:12} {row['target']}{value}", highlight=False)


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:6.1f} s] {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, nargs="+", default=SIZES, help="sizes to measure")
    parser.add_argument("--run", type=Path, help="a finished run of a CAM model; by default one is trained")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK:,} items, one epoch; writes nothing")
    parser.add_argument("--scratch", type=Path, help="where indexes go meanwhile: a disk, or cold means nothing")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    load = os.getloadavg()[0]
    counts = (QUICK,) if arguments.quick else arguments.items
    sizes: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as temporary:
        trained = Path(temporary, "trained")
        trained.mkdir()
        say("mAP: embedding with the CAM model" if arguments.run else "mAP: training a CAM model on the sample")
        quality = in_child(judge, trained, arguments.run, 1 if arguments.quick else None)
        for count in counts:
            scratch = Path(temporary, str(count))
            scratch.mkdir()
            sizes[count] = compare(scratch, count)
            shutil.rmtree(scratch)
    met = targets(sizes, quality)
    show(sizes, quality, met)
    if not arguments.quick:
        own = {str(getattr(arguments, name)): name.upper() for name in ("run", "scratch", "out")}
        words = ["python benchmarks/search.py", *(own.get(word, word) for word in sys.argv[1:])]
        record = {
            "command": " ".join(words),
            "seed": SEED,
            "dim": DIM,
            "anchors": ANCHORS,
            "k": K,
            "batch": BATCH,
            "single_queries": SINGLE,
            "cores_used": CORES,
            "load_at_start": round(load, 2),
            "data": {"spread": SPREAD, "latent": LATENT, "noise": NOISE, "between": BETWEEN},
            "graphs": {"M": DEGREE, "efConstruction": BREADTH},
            "targets": met,
            "sizes": sizes,
            "quality": quality,
            "versions": {name: version(name) for name in ("faiss-cpu", "pylance", "hnswlib", "usearch")},
            "machine": describe(),
        }
        arguments.out.parent.mkdir(exist_ok=True)
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
