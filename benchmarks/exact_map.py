"""Exact mAP of a large gallery: time and working memory, and a plain sort of all distances beside it.

python benchmarks/exact_map.py            10,000 queries, 1,000,000 items, 64 dimensions, 1,000 classes
python benchmarks/exact_map.py --quick    a small size; writes nothing
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kedge.metrics import rank_relevant
from kedge.reproduce.machine import describe

RESULTS = Path(__file__).parent / "results" / "exact_map.json"
SEED = 0
Data = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """Clustered data of one size."""

    queries: int
    gallery: int
    classes: int
    dim: int = 64
    spread: float = 1.2
    """Standard deviation around a class centre; the centres have 1, so that classes overlap."""

    def draw(self) -> Data:
        """Queries, their labels, gallery, its labels."""
        source = torch.Generator().manual_seed(SEED)
        centres = torch.randn(self.classes, self.dim, generator=source)
        labels = [torch.randint(self.classes, (rows,), generator=source) for rows in (self.queries, self.gallery)]
        vectors = [
            torch.randn(len(rows), self.dim, generator=source).mul_(self.spread).add_(centres[rows]) for rows in labels
        ]
        return vectors[0], labels[0], vectors[1], labels[1]


def streamed(data: Data) -> Tensor:
    return rank_relevant(*data, ks=()).average_precision


def plain_sort(data: Data) -> Tensor:
    """The whole distance matrix, every row sorted: by the same rounded distances, ties by gallery order."""
    queries, query_labels, gallery, gallery_labels = data
    mean = gallery.double().mean(0)
    near, far = queries.double() - mean, gallery.double() - mean
    squared = near.square().sum(1, keepdim=True) - 2 * near @ far.T + far.square().sum(1)
    order = squared.clamp_(min=0).float().sort(dim=1, stable=True).indices
    right = (gallery_labels[order] == query_labels[:, None]).double()
    precision = right.cumsum(1) / torch.arange(1, len(gallery) + 1)
    return (precision * right).sum(1) / right.sum(1).clamp(min=1)


WAYS: dict[str, Callable[[Data], Tensor]] = {"streamed": streamed, "plain_sort": plain_sort}


class PeakMemory:
    """The most resident memory above the start, sampled from the kernel's count for this process."""

    def __enter__(self) -> PeakMemory:
        self.start = self.most = self._resident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def mib(self) -> float:
        """In MiB."""
        return (self.most - self.start) / 2**20

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self.most = max(self.most, self._resident())

    @staticmethod
    def _resident() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


def measure(way: str, case: Case) -> tuple[dict[str, float], np.ndarray]:
    """In a process of its own, so that nothing freed earlier hides what this way needs."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure, (way, case))


def _measure(way: str, case: Case) -> tuple[dict[str, float], np.ndarray]:
    data = case.draw()
    WAYS[way]((data[0][:4], data[1][:4], data[2][:1000], data[3][:1000]))
    with PeakMemory() as memory:
        start = time.perf_counter()
        average_precision = WAYS[way](data)
        seconds = time.perf_counter() - start
    scores = {
        "seconds": round(seconds, 3),
        "working_mib": round(memory.mib, 1),
        "mAP": float(average_precision.mean()),
    }
    return scores, average_precision.numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small size; writes no results")
    quick = parser.parse_args().quick
    large = Case(500, 200_000, 200) if quick else Case(10_000, 1_000_000, 1_000)
    small = Case(200, 10_000, 100) if quick else Case(1_000, 20_000, 100)

    streamed_small, ours = measure("streamed", small)
    sorted_small, theirs = measure("plain_sort", small)
    equal = bool(np.allclose(ours, theirs, rtol=0, atol=1e-12))
    faster = sorted_small["seconds"] / streamed_small["seconds"]
    lighter = sorted_small["working_mib"] / max(streamed_small["working_mib"], 0.1)
    print(f"{small.queries:,} x {small.gallery:,}: streamed {streamed_small}, plain sort {sorted_small}")
    print(f"streamed is {faster:.1f} times as fast in 1/{lighter:.1f} of the memory; equal values: {equal}")

    streamed_large, _ = measure("streamed", large)
    matrix = 4 * large.queries * large.gallery / 2**20
    heavier = matrix / streamed_large["working_mib"]
    print(f"{large.queries:,} x {large.gallery:,}: streamed {streamed_large}")
    print(f"its distance matrix alone, in float32, would take {heavier:.1f} times that memory")

    if not equal:
        raise SystemExit("The two ways disagree.")
    if not quick:
        result = {
            "seed": SEED,
            "small": {
                "case": asdict(small),
                "streamed": streamed_small,
                "plain_sort": sorted_small,
                "equal": equal,
                "times_as_fast": round(faster, 2),
                "memory_ratio": round(lighter, 2),
            },
            "large": {
                "case": asdict(large),
                "streamed": streamed_large,
                "distance_matrix_mib": round(matrix),
            },
            "machine": describe(),
        }
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
