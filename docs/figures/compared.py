"""The figures of compare.md, from benchmarks/results alone.

python docs/figures/compared.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from style import COLOURS, Theme, draw

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
OURS = "gallery"


def read(name: str) -> Any:
    """What a benchmark wrote."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def search(theme: Theme) -> Figure:
    """Time of one query and what it finds, beside FAISS and others."""
    sizes = {int(size): found["systems"] for size, found in read("search")["sizes"].items()}
    figure = Figure((9.6, 4.3), layout="constrained")
    for axes, (size, systems) in zip(
        figure.subplots(1, len(sizes), squeeze=False)[0], sorted(sizes.items()), strict=True
    ):
        names = sorted(systems, key=lambda name: systems[name]["ms"], reverse=True)
        times = [systems[name]["ms"] for name in names]
        colours = [COLOURS[0] if name.startswith(OURS) else theme.faint for name in names]
        bars = axes.barh([name.replace(OURS, "Kedge,") for name in names], times, color=colours, height=0.7)
        notes = [f"{systems[name]['ms']:.3g} ms · {systems[name]['recall']:.1%}" for name in names]
        axes.bar_label(bars, notes, padding=4, fontsize=8, color=theme.ink)
        axes.set(xscale="log", xlim=(min(times) / 2, max(times) * 60), title=f"{size:,} items")
        axes.set_xlabel("one query, ms · share of the nearest found")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    return figure


def loss_step(theme: Theme) -> Figure:
    """One step of a loss alone, beside those of pytorch-metric-learning."""
    results = read("loss_step")["results"]
    counts = sorted({one["classes"] for one in results})
    shown = {
        "cross-entropy": theme.faint,
        "CAM": COLOURS[0],
        "CAM, 1024 sampled": COLOURS[8],
        "ArcFace": COLOURS[1],
        "ProxyAnchor": COLOURS[4],
    }
    figure = Figure((9.6, 3.0), layout="constrained")
    for axes, count in zip(figure.subplots(1, len(counts)), counts, strict=True):
        found = {one["loss"]: one["ms"] for one in results if one["classes"] == count and one["loss"] in shown}
        names = [name for name in reversed(shown) if name in found]
        bars = axes.barh(names, [found[name] for name in names], color=[shown[name] for name in names], height=0.7)
        times = [f"{found[name]:,.0f} ms" if found[name] >= 100 else f"{found[name]:.3g} ms" for name in names]
        axes.bar_label(bars, times, padding=3, fontsize=8, color=theme.ink)
        axes.set(xlim=(0, max(found.values()) * 1.3), xticks=[], title=f"{count:,} classes")
        axes.spines["bottom"].set_visible(False)
    return figure


def throughput(theme: Theme) -> Figure:
    """Whole training steps beside a plain loop with a loss of pytorch-metric-learning."""
    cases = read("train_throughput")["images_per_second"]
    kinds = {"kedge": COLOURS[0], "usual": theme.faint, "usual, ProxyAnchor": COLOURS[4]}
    labels = ("Kedge", "plain loop, CAM", "plain loop, ProxyAnchor")
    figure = Figure((9.6, 3.2), layout="constrained")
    axes = figure.subplots()
    for place, ((kind, colour), label) in enumerate(zip(kinds.items(), labels, strict=True)):
        speeds = [case[kind] / case["usual"] for case in cases.values()]
        spots = [spot + (place - 1) * 0.27 for spot in range(len(cases))]
        bars = axes.bar(spots, speeds, 0.25, color=colour, label=label)
        axes.bar_label(bars, [f"{speed:.1f}" for speed in speeds], padding=2, fontsize=8, color=theme.ink)
    names = [
        f"{case['encoder']}, {case['size']} px\nbatch {case['batch']}{', Trivial' * case['trivial']}"
        for case in cases.values()
    ]
    axes.set(
        xticks=range(len(cases)), xticklabels=names, ylabel="pictures per second,\nas a multiple of the plain loop"
    )
    axes.legend(ncols=3, loc="upper left", bbox_to_anchor=(0, 1.16), fontsize=8.5)
    return figure


if __name__ == "__main__":
    draw("compare-search", search)
    draw("compare-loss-step", loss_step)
    draw("compare-throughput", throughput)
