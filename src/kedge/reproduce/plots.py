"""Figures of results: metrics over a number, and the losses of a benchmark side by side."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from kedge.io import atomic_write
from kedge.reproduce.names import display

__all__ = ["GREY", "Curves", "loss_styles", "new_figure", "plot_curves", "plot_loss_benchmark", "write_figure"]

Curves = Mapping[str, Mapping[float, Sequence[float]]]
"""Loss → x → the values of its seeds."""

GREY = "#6b6b6b"
# Colours that common kinds of colour blindness can tell apart; markers say the same without colour.
_STYLES = {
    "cam": ("#d55e00", "o"),
    "cross_entropy": ("#0072b2", "s"),
    "contrastive": ("#009e73", "^"),
    "triplet": ("#cc79a7", "D"),
    "arcface": ("#56b4e9", "v"),
    "proxy_anchor": ("#e69f00", "P"),
    "cosface": ("#332288", "X"),
    "multi_similarity": ("#882255", "<"),
    "supcon": ("#999933", ">"),
    "center": ("#1a1a1a", "p"),
}
_OTHER_COLOURS = ("#8c510a", "#8a8a8a", "#44aa99", "#aa4499", "#117733", "#ddcc77", "#661100")
_OTHER_MARKERS = ("h", "*", "d", "8", "H")
_COLUMN_STYLES = (("#222222", "o"), ("#e69f00", "s"), ("#56b4e9", "D"), ("#aa4499", "^"), ("#999933", "v"))


def loss_styles(losses: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each loss: those that Kedge ships look the same in every figure."""
    styles, others = {}, 0
    for loss in sorted(losses):
        if loss in _STYLES:
            styles[loss] = _STYLES[loss]
        else:
            colour, marker = _OTHER_COLOURS[others % len(_OTHER_COLOURS)], _OTHER_MARKERS[others % len(_OTHER_MARKERS)]
            styles[loss] = (colour, marker)
            others += 1
    return styles


def new_figure(width: float, height: float, title: str = "") -> Figure:
    """An empty figure, in inches, whose parts make room for each other."""
    figure = Figure(figsize=(width, height), dpi=150, facecolor="white", layout="constrained")
    if title:
        figure.suptitle(title, fontsize=11, fontweight="bold")
    return figure


def plot_curves(
    panels: Mapping[tuple[str, str], Curves],
    *,
    x_label: str,
    y_label: str = "mAP",
    log2_x: bool = False,
    title: str = "",
) -> Figure:
    """A line per loss at the mean over its seeds, with a band of one standard deviation (of a sample) either side.

    `panels` are small multiples by (dataset, encoder); those without values say "not run". All share the y axis, those
    of a dataset the x axis.
    """
    rows = list(dict.fromkeys(dataset for dataset, _ in panels))
    columns = list(dict.fromkeys(encoder for _, encoder in panels))
    single = len(panels) == 1
    width, height = (6.4, 3.8) if single else (2.6 * len(columns) + 2, 2.1 * len(rows) + 1)
    figure = new_figure(width, height, title)
    grid = figure.subplots(len(rows), len(columns), sharex="row", sharey=True, squeeze=False)
    styles = loss_styles({loss for curves in panels.values() for loss in curves})
    for (row, column), axes in np.ndenumerate(grid):
        curves = panels.get((rows[row], columns[column]), {})
        _plain(axes, "y")
        if log2_x:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_locator(LogLocator(base=2, numticks=8 if single else 6))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter("{x:g}")
        else:
            axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        for loss, curve in curves.items():
            _draw_curve(axes, curve, *styles[loss], label=display(loss))
        if not curves:
            axes.text(0.5, 0.5, "not run", transform=axes.transAxes, ha="center", va="center", color=GREY)
        if not single and row == 0:
            axes.set_title(display(columns[column]), fontsize=9.5, fontweight="bold")
        if not single and column == 0:
            axes.set_ylabel(display(rows[row]), fontsize=9.5, fontweight="bold")
    figure.supxlabel(x_label, fontsize=9.5)
    figure.supylabel(y_label, fontsize=9.5)
    handles = {line.get_label(): line for axes in grid.flat for line in axes.lines}
    figure.legend(handles=list(handles.values()), loc="outside right upper", fontsize=9, frameon=False)
    return figure


def plot_loss_benchmark(
    losses: Mapping[str, Sequence[Sequence[float]]], metrics: Sequence[str], *, x_label: str = "", title: str = ""
) -> Figure:
    """A row per loss, the best in the first metric on top, and a dot per metric at the mean over seeds.

    `losses` has the values of the seeds for each metric (empty: not measured). A thin line reaches from the worst seed
    to the best.
    """
    order = sorted(losses, key=lambda loss: -statistics.fmean(losses[loss][0] or [-1]))
    figure = new_figure(8, 0.36 * len(order) + 1.3, title)
    axes = figure.subplots()
    _plain(axes, "x")
    step = 0.56 / max(len(metrics), 2)
    for place, (metric, (colour, marker)) in enumerate(zip(metrics, _COLUMN_STYLES, strict=False)):
        measured = [(row, losses[loss][place]) for row, loss in enumerate(order) if losses[loss][place]]
        # Accuracy and mAP of label lists nearly coincide: dots of a loss lie a little below one another.
        heights = [row + step * (place - (len(metrics) - 1) / 2) for row, _ in measured]
        axes.hlines(heights, [min(v) for _, v in measured], [max(v) for _, v in measured], color=colour, linewidth=1.1)
        means = [statistics.fmean(values) for _, values in measured]
        axes.plot(means, heights, linestyle="", marker=marker, color=colour, markersize=5.2, label=metric)
    axes.set_yticks(range(len(order)), [display(loss) for loss in order])
    axes.set_ylim(len(order) - 0.5, -0.5)
    axes.set_xlabel(x_label, fontsize=9.5)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    return figure


def write_figure(figure: Figure, folder: Path, name: str) -> list[Path]:
    """The figure as ``name.png`` (150 dots per inch) and ``name.svg``; the same figure gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    # The SVG embeds scatter plots as images: coarser ones keep it small.
    kinds: dict[str, tuple[int, dict[str, str | None]]] = {
        "png": (150, {"Software": None}),
        "svg": (110, {"Date": None, "Creator": "Kedge"}),
    }
    for kind, (dpi, metadata) in kinds.items():
        with rc_context({"svg.hashsalt": "kedge"}), atomic_write(folder / f"{name}.{kind}") as stream:
            figure.savefig(stream, format=kind, dpi=dpi, metadata=metadata)
    return [folder / f"{name}.{kind}" for kind in kinds]


def _plain(axes: Axes, grid: Literal["x", "y"]) -> None:
    """No frame, and a pale grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, length=3, color=GREY)
    axes.grid(axis=grid, color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)


def _draw_curve(axes: Axes, curve: Mapping[float, Sequence[float]], colour: str, marker: str, *, label: str) -> None:
    xs = sorted(x for x, values in curve.items() if values)
    means = np.array([statistics.fmean(curve[x]) for x in xs])
    stds = np.array([statistics.stdev(curve[x]) if len(curve[x]) > 1 else 0.0 for x in xs])
    axes.fill_between(xs, means - stds, means + stds, color=colour, alpha=0.18, linewidth=0)
    # A band needs two neighbours; a single point has a bar.
    if len(xs) == 1:
        axes.errorbar(xs, means, stds, color=colour, linewidth=1.2)
    axes.plot(xs, means, color=colour, marker=marker, markersize=4, linewidth=1.6, label=label)
