"""The systems that `search.py` measures, each with its own raw call, and the processes that hold them.

A system is built in one process and opened in another, so that its memory is its own and all of them can be asked in
turn.
"""

# ruff: noqa: D102, ARG002 - `System` says what the methods are
from __future__ import annotations

import math
import multiprocessing
import os
import resource
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

K = 100
SEED = 0
DEGREE, BREADTH = 32, 100
"""Of the graphs: M and efConstruction."""
EFFORTS = (100, 128, 192, 256, 384, 512, 768, 1024)
"""efSearch is the first of these that finds as much as one probe of the anchors' lists holds."""
NOISE, BETWEEN = 0.05, 0.2
"""Of the vectors that are drawn: in all dimensions, and the share that lies between two anchors."""
WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
"""Bytes of a number."""


@dataclass(frozen=True)
class Data:
    """Arrays in a folder: items, labels, anchors, queries, the list of each (`homes`), the exact answer."""

    folder: Path

    def load(self, name: str) -> np.ndarray:
        # Copy on write: a mapped array that nobody warns about, and that nobody changes.
        array: np.ndarray = np.load(self.folder / f"{name}.npy", mmap_mode="c")
        return array

    def save(self, name: str, array: np.ndarray) -> None:
        np.save(self.folder / f"{name}.npy", array)


class Around:
    """Draws vectors around anchors, in a subspace; a share of them on the way to another anchor, up to half of it."""

    def __init__(self, anchors: np.ndarray, chance: np.random.Generator, *, latent: int, spread: float) -> None:
        self.anchors, self.chance = anchors, chance
        directions = chance.standard_normal((anchors.shape[1], latent))
        self.basis = np.linalg.qr(directions)[0].T.astype(np.float32) * spread

    def __call__(self, labels: np.ndarray) -> np.ndarray:
        rows, (count, dim), chance = len(labels), self.anchors.shape, self.chance
        way = np.where(chance.random(rows) < BETWEEN, chance.random(rows) / 2, 0).astype(np.float32)[:, None]
        others = self.anchors[chance.integers(count, size=rows)]
        vectors: np.ndarray = self.anchors[labels] * (1 - way) + others * way
        vectors += chance.standard_normal((rows, len(self.basis)), np.float32) @ self.basis
        vectors += chance.standard_normal((rows, dim), np.float32) * np.float32(NOISE)
        return vectors


class System:
    """An index under test. `build` leaves it on disk, `open` takes it from there."""

    name: str
    note = ""
    probes = 1
    """Lists that are searched, where there are lists."""

    def load(self) -> None:
        """Import what it needs, so that no import is measured."""

    def build(self, data: Data, place: Path) -> None:
        raise NotImplementedError

    def open(self, data: Data, place: Path) -> None:
        raise NotImplementedError

    def search(self, queries: np.ndarray, k: int = K) -> Any:
        """What is timed."""
        raise NotImplementedError

    def ids(self, found: Any) -> np.ndarray:
        """Queries x k rows of what `search` returned; -1 for none."""
        raise NotImplementedError

    def asked(self, queries: np.ndarray, row: int, way: Any) -> Callable[[], Any]:
        """The call that answers one query."""
        return lambda: self.search(queries[row : row + 1])

    def try_harder(self, effort: int) -> bool:
        """Set how far a graph is searched; False where there is nothing to set."""
        return False


class FaissFlat(System):
    """Every item, exactly."""

    name = "faiss flat"

    def load(self) -> None:
        import faiss

        self.faiss: Any = faiss

    def made(self, data: Data) -> Any:
        return self.faiss.IndexFlatL2(data.load("items").shape[1])

    def build(self, data: Data, place: Path) -> None:
        index = self.made(data)
        index.add(data.load("items"))
        self.faiss.write_index(index, str(place))

    def open(self, data: Data, place: Path) -> None:
        self.index = self.faiss.read_index(str(place))

    def search(self, queries: np.ndarray, k: int = K) -> Any:
        return self.index.search(queries, k)

    def ids(self, found: Any) -> np.ndarray:
        return np.asarray(found[1])


class FaissLists(FaissFlat):
    """As many inverted lists as there are anchors; around the anchors or around k-means centroids."""

    def __init__(self, *, anchors: bool) -> None:
        self.anchors = anchors
        self.name = "faiss ivf, our anchors" if anchors else "faiss ivf, k-means"

    def made(self, data: Data) -> Any:
        anchors, items = data.load("anchors"), data.load("items")
        quantizer = self.faiss.IndexFlatL2(anchors.shape[1])
        if self.anchors:
            quantizer.add(anchors)
        index = self.faiss.IndexIVFFlat(quantizer, anchors.shape[1], len(anchors))
        if not self.anchors:
            count = min(len(items), index.cp.max_points_per_centroid * len(anchors))
            index.train(items[np.sort(np.random.default_rng(SEED).choice(len(items), count, replace=False))])
        return index

    def search(self, queries: np.ndarray, k: int = K) -> Any:
        return self.index.search(queries, k, params=self.faiss.SearchParametersIVF(nprobe=self.probes))


class FaissGraph(FaissFlat):
    """HNSW."""

    name = "faiss hnsw"

    def made(self, data: Data) -> Any:
        index = self.faiss.IndexHNSWFlat(data.load("items").shape[1], DEGREE)
        index.hnsw.efConstruction = BREADTH
        return index

    def try_harder(self, effort: int) -> bool:
        self.index.hnsw.efSearch = effort
        return True


class Hnswlib(System):
    """HNSW by its first authors."""

    name = "hnswlib"

    def load(self) -> None:
        import hnswlib

        self.hnswlib: Any = hnswlib

    def build(self, data: Data, place: Path) -> None:
        items = data.load("items")
        index = self.hnswlib.Index("l2", items.shape[1])
        index.init_index(len(items), M=DEGREE, ef_construction=BREADTH, random_seed=SEED)
        index.add_items(items)
        index.save_index(str(place))

    def open(self, data: Data, place: Path) -> None:
        self.index = self.hnswlib.Index("l2", data.load("items").shape[1])
        self.index.load_index(str(place))
        self.index.set_ef(K)

    def search(self, queries: np.ndarray, k: int = K) -> Any:
        return self.index.knn_query(queries, k)

    def ids(self, found: Any) -> np.ndarray:
        return np.asarray(found[0]).astype(np.int64)

    def try_harder(self, effort: int) -> bool:
        self.index.set_ef(effort)
        return True


class Usearch(System):
    """HNSW by Unum."""

    name = "usearch"

    def load(self) -> None:
        from usearch.index import Index

        self.type: Any = Index

    def build(self, data: Data, place: Path) -> None:
        items = data.load("items")
        shape = {"ndim": items.shape[1], "connectivity": DEGREE, "expansion_add": BREADTH}
        index = self.type(metric="l2sq", dtype="f32", **shape)
        index.add(np.arange(len(items)), items)
        index.save(str(place))

    def open(self, data: Data, place: Path) -> None:
        self.index = self.type.restore(str(place))

    def search(self, queries: np.ndarray, k: int = K) -> Any:
        return self.index.search(queries, k)

    def ids(self, found: Any) -> np.ndarray:
        keys = np.atleast_2d(found.keys).astype(np.int64)
        return np.where(np.arange(keys.shape[1]) < np.atleast_1d(found.counts)[:, None], keys, -1)

    def try_harder(self, effort: int) -> bool:
        self.index.expansion_search = effort
        return True


class Lance(System):
    """Lance's own index over the anchors, one probe; row ids and distances only, no other column is fetched."""

    name = "lance ivf, our anchors"

    def load(self) -> None:
        import lance
        import pyarrow

        self.lance: Any = lance
        self.arrow: Any = pyarrow

    def build(self, data: Data, place: Path) -> None:
        items, anchors = data.load("items"), data.load("anchors")
        column = self.arrow.FixedSizeListArray.from_arrays(self.arrow.array(items.reshape(-1)), items.shape[1])
        # In one file, a row's id is its number.
        table = self.arrow.table({"vector": column})
        dataset = self.lance.write_dataset(table, str(place), max_rows_per_file=len(items))
        lists = {"num_partitions": len(anchors), "ivf_centroids": np.array(anchors)}
        dataset.create_index("vector", "IVF_FLAT", metric="L2", **lists)

    def open(self, data: Data, place: Path) -> None:
        self.dataset = self.lance.dataset(str(place))

    def search(self, queries: np.ndarray, k: int = K) -> Any:
        asked = queries[0] if len(queries) == 1 else queries
        nearest = {"column": "vector", "q": asked, "k": k, "nprobes": 1}
        return self.dataset.to_table(columns=["_distance"], nearest=nearest, with_row_id=True)

    def ids(self, found: Any) -> np.ndarray:
        rows = np.asarray(found.column("_rowid")).astype(np.int64)
        if "query_index" not in found.column_names:
            return rows[None]
        queries = np.asarray(found.column("query_index"))
        places = np.arange(len(rows)) - np.searchsorted(queries, queries)
        ids = np.full((int(queries[-1]) + 1, int(places.max()) + 1), -1)
        ids[queries, places] = rows
        return ids


class Reader(System):
    """Reads the bytes of a query's list once and nothing else: what no search of the list can beat.

    A way is the bytes of a number and the threads. The rows are in memory, ordered by list; torch's sum was the
    fastest of what numpy and torch have.
    """

    name = "reader"

    def load(self) -> None:
        import torch

        self.torch = torch

    def open(self, data: Data, place: Path) -> None:
        homes = data.load("homes")
        self.bounds = np.concatenate([[0], np.cumsum(np.bincount(homes, minlength=len(data.load("anchors"))))])
        self.rows = self.torch.from_numpy(np.asarray(data.load("items")[np.argsort(homes, kind="stable")]))
        self.homes = data.load("query_homes").tolist()

    def asked(self, queries: np.ndarray, row: int, way: Any) -> Callable[[], Any]:
        width, threads = way or (WIDTHS["float32"], 1)
        self.torch.set_num_threads(threads)
        start, end = self.bounds[self.homes[row]], self.bounds[self.homes[row] + 1]
        part = self.rows[start : start + (end - start) * width // WIDTHS["float32"]]
        return lambda: part.sum(1)


# ---------------------------------------------------------------------- processes


def in_child(work: Callable[..., Any], *arguments: Any) -> Any:
    """Call it in a fresh process, whose memory is gone afterwards."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def build(system: System, data: Data, place: Path) -> float:
    """Seconds until it is on disk."""
    system.load()
    started = time.perf_counter()
    system.build(data, place)
    return time.perf_counter() - started


class Worker:
    """A process that holds one open system, and this end of the line to it."""

    def __init__(self, system: System, data: Data, place: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, system, data, place), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, what: str, *arguments: Any) -> Any:
        """The answer of a method of `Holder`."""
        self._line.send((what, arguments))
        fine, answer = self._line.recv()
        if not fine:
            raise RuntimeError(answer)
        return answer

    def rest(self) -> None:
        """Wait until its threads sleep: those of OpenBLAS spin for a tenth of a second behind the last product."""
        tasks = list(Path(f"/proc/{self._process.pid}/task").glob("*/schedstat"))
        deadline = time.monotonic() + 1
        ran = -math.inf
        while time.monotonic() < deadline:
            before, ran = ran, sum(_nanoseconds(task) for task in tasks)
            if ran - before < 500_000:
                return
            time.sleep(0.005)

    def seconds(self) -> float:
        """Of processor time it has had."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self._process.terminate()
        self._process.join()
        self._line.close()


def _serve(line: Connection, system: System, data: Data, place: Path) -> None:
    holder = Holder(system, data, place)
    while True:
        try:
            what, arguments = line.recv()
        except EOFError:
            return
        try:
            line.send((True, getattr(holder, what)(*arguments)))
        except Exception:
            line.send((False, traceback.format_exc()))


class Holder:
    """The far end: opens the system and measures it."""

    def __init__(self, system: System, data: Data, place: Path) -> None:
        self.system, self.data, self.place = system, data, place
        self.queries = np.array(data.load("queries"))
        system.load()

    def ready(self) -> None:
        """Answered once everything is imported."""

    def open(self, warm: int) -> dict[str, float]:
        """Seconds to the first answer; after `warm` queries more, MiB of memory added and of its files mapped."""
        before = _own_memory()
        started = time.perf_counter()
        self.system.open(self.data, self.place)
        self.system.asked(self.queries, 0, None)()
        seconds = time.perf_counter() - started
        for row in range(warm):
            self.system.asked(self.queries, row, None)()
        own, mapped = _own_memory() - before, _mapped_memory(self.place)
        return {"open_s": round(seconds, 4), "memory_mib": round(own, 1), "mapped_mib": round(mapped, 1)}

    def tune(self, wanted: float) -> str:
        """Search a graph just as far as it takes to find a share `wanted` of the exact answer."""
        for effort in EFFORTS:
            if not self.system.try_harder(effort):
                return self.system.note
            self.system.note = f"efSearch {effort}"
            if recall(self.found(K), self.data.load("exact")) >= wanted:
                break
        return self.system.note

    def set_effort(self, effort: int) -> None:
        """How far to search from now on."""
        self.system.try_harder(effort)

    def set(self, name: str, value: Any) -> None:
        """Set an attribute of the system."""
        setattr(self.system, name, value)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the system."""
        return getattr(self.system, name)(*arguments)

    def own_memory(self) -> float:
        """MiB of the process that are no file."""
        return _own_memory()

    def single(self, rows: Sequence[int], unmeasured: int, way: Any) -> tuple[list[float], int]:
        """Seconds of each query but the first few, and the pages that had to come from disk."""
        calls = [self.system.asked(self.queries, row, way) for row in rows]
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        times = []
        for call in calls:
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        return times[unmeasured:], resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults

    def batch(self) -> float:
        """Seconds of all queries at once."""
        started = time.perf_counter()
        self.system.search(self.queries)
        return time.perf_counter() - started

    def found(self, k: int) -> np.ndarray:
        return self.system.ids(self.system.search(self.queries, k))


def recall(found: np.ndarray, exact: np.ndarray) -> float:
    """The share of the exact answer that was found."""
    pairs = zip(found.tolist(), exact.tolist(), strict=True)
    return sum(len({*some} & {*all_}) for some, all_ in pairs) / exact.size


def _nanoseconds(task: Path) -> int:
    try:
        return int(task.read_text().split()[0])
    except OSError:  # a thread that is gone
        return 0


def _own_memory() -> float:
    """MiB of this process that are no file."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) / 1024


def _mapped_memory(place: Path) -> float:
    """MiB of files below `place` that this process has mapped and in memory."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split()[0].endswith(":"):
            counts = str(place) in line
        elif counts and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total / 1024
