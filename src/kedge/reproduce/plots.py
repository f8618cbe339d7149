"""Figures of results: metrics over a number, the losses of a benchmark side by side, two-dimensional embeddings."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib import colormaps, patheffects, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from kedge.evaluation.plots import new_figure, shorten
from kedge.io import atomic_write
from kedge.reproduce.paper import display

__all__ = ["Points", "loss_styles", "plot_curves", "plot_embeddings", "plot_loss_benchmark", "write_figure"]

Points = tuple[npt.NDArray[np.floating], npt.NDArray[np.integer]]
"""Embeddings (n × 2) and labels (n)."""

_BINS = 75
_GREY = "#6b6b6b"
_HALO = [patheffects.withStroke(linewidth=2, foreground="white")]
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
_OTHER_STYLES = list(itertools.product(("#8c510a", "#8a8a8a", "#44aa99", "#aa4499", "#117733"), "h*d8H"))
_METRIC_STYLES = (("#222222", "o"), ("#e69f00", "s"), ("#56b4e9", "D"), ("#aa4499", "^"), ("#999933", "v"))


def loss_styles(losses: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each loss: those that Kedge ships look the same in every figure."""
    return _STYLES | dict(zip(sorted(set(losses) - _STYLES.keys()), itertools.cycle(_OTHER_STYLES), strict=False))


def plot_curves(
    curves: pd.DataFrame, *, x_label: str, y_label: str = "mAP", log2_x: bool = False, title: str = ""
) -> Figure:
    """A line per loss at the mean over its seeds, with a bar of one standard deviation (of a sample) either side.

    `curves` has the columns dataset, encoder, loss, x and value, and a row for each seed. Datasets and encoders are
    small multiples; those without values say "not run". All share the y axis, those of a dataset the x axis.
    """
    datasets, encoders = list(curves["dataset"].unique()), list(curves["encoder"].unique())
    figure = new_figure(3.2 * len(encoders) + 2.6, 2.4 * len(datasets) + 1.7, title)
    grid = figure.subplots(len(datasets), len(encoders), sharex="row", sharey=True, squeeze=False)
    styles = loss_styles(curves["loss"])
    for (row, column), axes in np.ndenumerate(grid):
        _plain(axes, "y")
        if log2_x:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_locator(LogLocator(base=2, numticks=6))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter("{x:g}")
        else:
            axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        panel = curves[(curves["dataset"] == datasets[row]) & (curves["encoder"] == encoders[column])]
        for loss, seeds in panel.groupby("loss", sort=False):
            colour, marker = styles[loss]
            stats = seeds.groupby("x")["value"].agg(["mean", "std"]).fillna({"std": 0})
            axes.errorbar(stats.index, stats["mean"], stats["std"], fmt="none", ecolor=colour, elinewidth=1.2)
            axes.plot(stats["mean"], color=colour, marker=marker, markersize=4, linewidth=1.6, label=display(loss))
        if panel.empty:
            axes.text(0.5, 0.5, "not run", transform=axes.transAxes, ha="center", va="center", color=_GREY)
        if row == 0 and grid.size > 1:  # the title names a single panel
            axes.set_title(display(encoders[column]), fontsize=9.5, fontweight="bold")
        if column == 0 and grid.size > 1:
            axes.set_ylabel(display(datasets[row]), fontsize=9.5, fontweight="bold")
    for axes in grid[-1]:  # not supxlabel, which the legend would cover
        axes.set_xlabel(x_label, fontsize=9.5)
    figure.supylabel(y_label, fontsize=9.5)
    handles = {line.get_label(): line for axes in grid.flat for line in axes.lines}
    figure.legend(handles=list(handles.values()), loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    return figure


def plot_loss_benchmark(scores: pd.DataFrame, *, x_label: str = "", title: str = "") -> Figure:
    """A row per loss, the best in the first metric on top, and a dot per metric at the mean over seeds.

    `scores` has a row for each seed, with its loss as index, and a column for each metric. A thin line reaches from the
    worst seed to the best.
    """
    losses = scores.groupby(level=0)
    means = losses.mean().sort_values(scores.columns[0], ascending=False)
    low, high = losses.min().loc[means.index], losses.max().loc[means.index]
    figure = new_figure(8, 0.36 * len(means) + 1.3, title)
    axes = figure.subplots()
    _plain(axes, "x")
    step = 0.56 / max(len(means.columns), 2)
    for place, (metric, (colour, marker)) in enumerate(zip(means, _METRIC_STYLES, strict=False)):
        # Accuracy and mAP of label lists nearly coincide: dots of a loss lie a little below one another.
        heights = np.arange(len(means)) + step * (place - (len(means.columns) - 1) / 2)
        run = means[metric].notna().to_numpy()
        axes.hlines(heights[run], low[metric][run], high[metric][run], color=colour, linewidth=1.1)
        style = {"linestyle": "", "marker": marker, "color": colour, "label": metric}
        axes.plot(means[metric][run], heights[run], markersize=5.2, **style)
    axes.set_yticks(range(len(means)), [display(loss) for loss in means.index])
    axes.set_ylim(len(means) - 0.5, -0.5)
    axes.set_xlabel(x_label, fontsize=9.5)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    return figure


def plot_embeddings(
    embeddings: Mapping[str, Mapping[str, Points]],
    anchors: Mapping[str, npt.NDArray[np.floating]],
    classes: Sequence[str],
    *,
    title: str = "",
) -> Figure:
    """A column per loss: for each split (the same for all losses) its embeddings by class, and their density.

    Anchors (classes × 2), where a loss has some, are crosses with the name of their class. All of a column has one
    scale, which the most distant half percent on each side does not stretch: how many points lie outside is said.
    """
    splits = list(next(iter(embeddings.values())))
    colours = np.array(colormaps["tab10" if len(classes) <= 10 else "tab20"].colors)  # type: ignore[attr-defined]
    figure = new_figure(3 * len(embeddings) + 1.6, 6 * len(splits), title)
    grid = figure.subplots(2 * len(splits), len(embeddings), sharex="col", sharey="col", squeeze=False)
    for column, (loss, parts) in enumerate(embeddings.items()):
        own = anchors.get(loss, np.empty((0, 2)))
        limits = _limits([points for points, _ in parts.values()], own)
        grid[0, column].set(title=display(loss), xlim=limits[0], ylim=limits[1])
        for (scatter, density), (split, (points, labels)) in zip(
            grid[:, column].reshape(-1, 2), parts.items(), strict=True
        ):
            _scatter(scatter, points, colours[labels % len(colours)], limits)
            scatter.plot(*own.T, linestyle="", marker="X", markersize=6.5, color="black", markeredgecolor="white")
            for name, place in zip(classes, own, strict=False):
                style: dict[str, Any] = {"ha": "center", "fontsize": 8, "fontweight": "bold", "path_effects": _HALO}
                scatter.annotate(shorten(name, 12), place, xytext=(0, 4.5), textcoords="offset points", **style)
            counts, _, _ = np.histogram2d(points[:, 0], points[:, 1], bins=_BINS, range=limits)
            shares = np.ma.masked_equal(counts.T / max(counts.max(), 1), 0)
            extent = (*limits[0], *limits[1])
            density.imshow(shares, "magma_r", PowerNorm(0.5, 0, 1), origin="lower", extent=extent, aspect="auto")
            if column == 0:
                scatter.set_ylabel(f"{split} images")
                density.set_ylabel("their distribution")
    handles = [
        Line2D([], [], linestyle="", marker="o", color=tuple(colours[place % len(colours)]), label=shorten(name))
        for place, name in enumerate(classes)
    ]
    if anchors:
        handles.append(Line2D([], [], linestyle="", marker="X", color="black", label="class anchor"))
    figure.legend(handles=handles, loc="outside right upper", fontsize=8, frameon=False)
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
    axes.tick_params(labelsize=8, length=3, color=_GREY)
    axes.grid(axis=grid, color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)


def _limits(splits: list[npt.NDArray[np.floating]], anchors: npt.NDArray[np.floating]) -> list[tuple[float, float]]:
    """A square that holds all but the most distant half percent on each side, and every anchor."""
    corners = [np.nanpercentile(points, [0.5, 99.5], axis=0) for points in splits]
    every = np.concatenate([*corners, anchors])
    low, high = every.min(0), every.max(0)
    half = 0.56 * float((high - low).max()) or 1.0
    return [(middle - half, middle + half) for middle in ((low + high) / 2).tolist()]


def _scatter(axes: Axes, points: npt.NDArray[np.floating], colours: npt.NDArray[np.floating], limits: Any) -> None:
    # In the order of classes the last one would hide the others.
    order = np.random.default_rng(0).permutation(len(points))
    fewer = min(1.0, 2_000 / max(len(points), 1))
    x, y = points[order].T
    size, alpha = 1.5 + 8 * fewer, 0.25 + 0.45 * fewer
    axes.scatter(x, y, c=colours[order], s=size, alpha=alpha, linewidths=0, rasterized=True)
    low, high = np.transpose(limits)
    if outside := int((~((points >= low) & (points <= high)).all(1)).sum()):
        text = axes.text(0.98, 0.02, f"{outside:,} outside", transform=axes.transAxes, ha="right", va="bottom")
        text.set(fontsize=7, color=_GREY, path_effects=_HALO)
