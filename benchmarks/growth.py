"""How cost grows: a search over gallery size and over classes, a training step over classes; with fitted exponents.

    python benchmarks/growth.py               writes benchmarks/results/growth.json and docs/figures/growth_*.png, .svg
    python benchmarks/growth.py --draw        only draws what the last run found
    python benchmarks/growth.py --quick       small sizes; writes nothing

128 dimensions, two cores. An exponent is the slope of a straight line through the logarithms, over the last decade or
two: 0 does not grow, 1 grows as fast. The training step is that of the anchors alone (forward, backward, update of all
rows; batches of 512 embeddings), since an encoder's cost does not depend on the number of classes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kedge.reproduce.machine import describe

HERE = Path(__file__).parent
RESULTS, FIGURES = HERE / "results" / "growth.json", HERE.parent / "docs" / "figures"
DIM, BATCH, K = 128, 512, 100
SIZES = (10_000, 30_000, 100_000, 300_000, 1_000_000, 5_000_000)
CLASSES = (10, 100, 1_000, 10_000, 100_000, 1_000_000)
ITEMS = 1_000_000
"""In the gallery whose classes grow in number."""
BY_SIZE = 1_000
"""Classes of the gallery that grows."""
SAMPLE = 1_024
EXACT_UP_TO, DENSE_UP_TO = 10_000, 1_000_000
QUERIES, STEPS, PATIENCE = 200, 5, 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--draw", action="store_true")
    given = parser.parse_args()
    if not given.draw:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
        record = grown(quick=given.quick)
        if given.quick:
            return
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    draw(json.loads(RESULTS.read_text()))


def grown(*, quick: bool) -> dict[str, Any]:
    sizes, classes = (SIZES[:3], CLASSES[:4]) if quick else (SIZES, CLASSES)
    curves: dict[str, dict[str, dict[int, float]]] = {"size": {}, "classes": {}, "step": {}}
    for size in sizes:
        keep(curves["size"], size, searched(size, BY_SIZE))
    for count in classes:
        keep(curves["classes"], count, searched(min(ITEMS, 100 * sizes[-1] // 10), count))
    for count in classes:
        keep(curves["step"], count, stepped(count))
    fitted = {name: {way: exponent(points) for way, points in curve.items()} for name, curve in curves.items()}
    print(json.dumps(fitted), flush=True)
    return {"ms": curves, "exponents": fitted, "table": table(curves, fitted), "machine": describe()}


def keep(curve: dict[str, dict[int, float]], at: int, found: dict[str, float]) -> None:
    print(at, json.dumps(found), flush=True)
    for way, value in found.items():
        curve.setdefault(way, {})[at] = value


def searched(size: int, classes: int) -> dict[str, float]:
    """Milliseconds of one query in a gallery on disk."""
    from kedge import Gallery
    from kedge.losses.anchors import init_anchors

    chance = np.random.default_rng(0)
    anchors = init_anchors(classes, DIM).numpy()

    def around(labels: np.ndarray) -> np.ndarray:
        noise = chance.standard_normal((len(labels), DIM), np.float32) * np.float32(1 / math.sqrt(DIM))
        found: np.ndarray = anchors[labels] + noise
        return found

    folder = Path(tempfile.mkdtemp())
    try:
        gallery = Gallery.create(folder / "gallery", anchors=anchors, lists="label")
        for start in range(0, size, 100_000):
            labels = chance.integers(classes, size=min(100_000, size - start))
            gallery.add_embeddings(around(labels), labels=list(map(str, labels.tolist())))
        gallery.optimize()
        queries = around(chance.integers(classes, size=QUERIES))
        return {
            "two-stage": median(lambda row: gallery.search_embeddings(queries[row : row + 1], k=K)),
            "brute force": median(
                lambda row: gallery.search_embeddings(queries[row : row + 1], k=K, method="brute_force")
            ),
        }
    finally:
        shutil.rmtree(folder)


def stepped(classes: int) -> dict[str, float]:
    """Milliseconds of a training step of the anchors."""
    import torch

    from kedge.losses import CAMLoss, CrossEntropyLoss

    torch.manual_seed(0)
    makers: dict[str, Callable[[], Any]] = {
        f"CAM, {SAMPLE:,} sampled": lambda: CAMLoss(classes, DIM, repel_sample=SAMPLE if classes > SAMPLE else None)
    }
    if classes <= EXACT_UP_TO:
        makers["CAM, all pairs"] = lambda: CAMLoss(classes, DIM)
    if classes <= DENSE_UP_TO:
        makers["cross-entropy"] = lambda: CrossEntropyLoss(classes, DIM)
    embeddings, labels = torch.randn(BATCH, DIM, requires_grad=True), torch.randint(classes, (BATCH,))
    found = {}
    for name, make in makers.items():
        loss = make()
        optimizer = torch.optim.SGD(loss.parameters(), 0.01, 0.9)

        def step(_: int, loss: Any = loss, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad(set_to_none=True)
            loss(embeddings, labels).backward()
            optimizer.step()

        found[name] = median(step, STEPS)
    return found


def median(act: Callable[[int], Any], most: int = QUERIES) -> float:
    """Milliseconds; the first ones are not counted."""
    for row in range(3):
        act(row)
    times: list[float] = []
    ends = time.perf_counter() + PATIENCE
    while len(times) < most and (len(times) < 3 or time.perf_counter() < ends):
        started = time.perf_counter()
        act(len(times))
        times.append(time.perf_counter() - started)
    return round(1000 * statistics.median(times), 4)


def exponent(points: dict[int, float]) -> float:
    """Over the last two decades."""
    most = max(map(int, points))
    last = {int(at): ms for at, ms in points.items() if int(at) * 100 >= most}
    slope = np.polyfit(np.log(list(last)), np.log(list(last.values())), 1)[0]
    return round(float(slope), 2)


def table(curves: dict[str, Any], fitted: dict[str, Any]) -> dict[str, Any]:
    """What the documentation shows."""
    names = {"size": "a search, over pictures", "classes": "a search, over classes", "step": "a step, over classes"}
    rows = [
        [
            names[name],
            way,
            f"{min(points):,} … {max(points):,}",
            f"{shown(points[min(points)])} … {shown(points[max(points)])}",
            fitted[name][way],
        ]
        for name, curve in curves.items()
        for way, points in curve.items()
    ]
    return {"columns": ["what", "way", "from … to", "ms", "fitted exponent"], "rows": rows}


def shown(milliseconds: float) -> str:
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"


def draw(record: dict[str, Any]) -> None:
    """One figure each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    about = {
        "size": ("pictures in the gallery", f"One query, {BY_SIZE:,} classes"),
        "classes": ("classes", f"One query, {ITEMS:,} pictures"),
        "step": ("classes", f"One training step of the anchors, batch {BATCH}"),
    }
    colours = ["#0b6e99", "#c2571a", "#6b7280"]
    FIGURES.mkdir(parents=True, exist_ok=True)
    for name, (across, title) in about.items():
        figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
        for colour, (way, points) in zip(colours, record["ms"][name].items(), strict=False):
            x, y = [int(at) for at in points], list(points.values())
            label = f"{way} (exponent {record['exponents'][name][way]:g})"
            axes.plot(x, y, "o-", color=colour, markersize=4.5, linewidth=1.6, label=label)
        axes.set(xscale="log", yscale="log", xlabel=across, ylabel="milliseconds")
        axes.set_title(title, loc="left", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.legend(frameon=False, fontsize=9)
        for suffix in ("png", "svg"):
            figure.savefig(FIGURES / f"growth_{name}.{suffix}", dpi=150)
        plt.close(figure)


if __name__ == "__main__":
    main()
