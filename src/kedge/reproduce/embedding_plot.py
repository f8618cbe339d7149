"""Scatter and density plots of two-dimensional embeddings, with the anchors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps, patheffects
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kedge.evaluation.plots import shorten
from kedge.reproduce.names import display
from kedge.reproduce.plots import GREY, new_figure

__all__ = ["Points", "Split", "plot_embeddings"]

Split = Literal["train", "test"]
Points = tuple[npt.NDArray[np.floating], npt.NDArray[np.integer]]
"""Embeddings (n × 2) and labels (n)."""
Limits = tuple[tuple[float, float], tuple[float, float]]

_TITLES: dict[Split, str] = {"train": "training images", "test": "test images"}
_BINS = 150
_HALO = [patheffects.withStroke(linewidth=2, foreground="white")]


def plot_embeddings(
    embeddings: Mapping[str, Mapping[Split, Points]],
    anchors: Mapping[str, npt.NDArray[np.floating] | None],
    classes: Sequence[str],
    *,
    title: str = "",
) -> Figure:
    """A column per loss: training embeddings by class, their density in the plane, and both again for test.

    Anchors (classes × 2), where a loss has some, are crosses with the name of their class. All of a column has one
    scale, which the most distant half percent on each side does not stretch: how many points lie outside is said.
    """
    splits = [split for split in _TITLES if any(split in parts for parts in embeddings.values())]
    colours = np.array(colormaps["tab10" if len(classes) <= 10 else "tab20"].colors)  # type: ignore[attr-defined]
    density_colours, norm = colormaps["magma_r"].with_extremes(under="white"), PowerNorm(0.5, 0.004, 1)
    figure = new_figure(3 * len(embeddings) + 1.6, 6 * len(splits) + 0.6, title)
    grid = figure.subplots(2 * len(splits), len(embeddings), sharex="col", sharey="col", squeeze=False)
    for column, (loss, parts) in enumerate(embeddings.items()):
        limits = _limits(parts, anchors.get(loss))
        grid[0, column].set_title(display(loss), fontsize=11, fontweight="bold")
        for number, split in enumerate(splits):
            scatter, density = grid[2 * number, column], grid[2 * number + 1, column]
            if column == 0:
                scatter.set_ylabel(_TITLES[split])
                density.set_ylabel("their distribution")
            for axes in (scatter, density):
                axes.set(xlim=limits[0], ylim=limits[1])
            if split not in parts:
                for axes in (scatter, density):
                    axes.text(0.5, 0.5, "not run", transform=axes.transAxes, ha="center", va="center", color=GREY)
                continue
            points, labels = parts[split]
            _scatter(scatter, points, colours[labels % len(colours)])
            _write_outside(scatter, points, limits)
            if (own := anchors.get(loss)) is not None:
                _mark_anchors(scatter, own, classes)
            extent = (*limits[0], *limits[1])
            image = density.imshow(_density(points, limits).T, origin="lower", extent=extent, aspect="auto")
            image.set(norm=norm, cmap=density_colours)
    bar = figure.colorbar(ScalarMappable(norm, density_colours), ax=grid[-1, :], orientation="horizontal", aspect=40)
    bar.set_label("density (share of the densest spot of its panel)", fontsize=8)
    handles = [
        Line2D([], [], linestyle="", marker="o", color=tuple(colours[place % len(colours)]), label=shorten(name))
        for place, name in enumerate(classes)
    ]
    if any(anchors.get(loss) is not None for loss in embeddings):
        handles.append(Line2D([], [], linestyle="", marker="X", color="black", label="class anchor"))
    figure.legend(handles=handles, loc="outside right upper", fontsize=8, frameon=False)
    return figure


def _limits(parts: Mapping[Split, Points], anchors: npt.NDArray[np.floating] | None) -> Limits:
    """A square that holds all but the most distant half percent on each side, and every anchor."""
    corners = [np.percentile(_finite(points), [0.5, 99.5], axis=0) for points, _ in parts.values() if len(points)]
    if anchors is not None and len(anchors):
        corners.append(np.asarray(anchors, float))
    every = np.concatenate(corners) if corners else np.zeros((1, 2))
    low, high = every.min(0), every.max(0)
    centre, half = (low + high) / 2, 0.56 * float((high - low).max()) or 1.0
    (left, bottom), (right, top) = (centre - half).tolist(), (centre + half).tolist()
    return (left, right), (bottom, top)


def _finite(points: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    finite: npt.NDArray[np.floating] = np.asarray(points, float)[np.isfinite(points).all(1)]
    return finite


def _scatter(axes: Axes, points: npt.NDArray[np.floating], colours: npt.NDArray[np.floating]) -> None:
    # In the order of classes the last one would hide the others.
    order = np.random.default_rng(0).permutation(len(points))
    fewer = min(1.0, 2_000 / max(len(points), 1))
    x, y = points[order].T
    size, alpha = 1.5 + 8 * fewer, 0.25 + 0.45 * fewer
    axes.scatter(x, y, c=colours[order], s=size, alpha=alpha, linewidths=0, rasterized=True)


def _density(points: npt.NDArray[np.floating], limits: Limits) -> npt.NDArray[np.floating]:
    """The smoothed density over a square, as a share of its highest value."""
    x, y = _finite(points).T
    counts: npt.NDArray[np.floating] = np.histogram2d(x, y, bins=_BINS, range=limits)[0]
    kernel = np.exp(-0.5 * np.arange(-4, 5) ** 2 / 1.2**2)
    for axis in (0, 1):
        counts = np.apply_along_axis(np.convolve, axis, counts, kernel / kernel.sum(), mode="same")
    return counts / (counts.max() or 1.0)


def _mark_anchors(axes: Axes, anchors: npt.NDArray[np.floating], classes: Sequence[str]) -> None:
    axes.plot(*anchors.T, linestyle="", marker="X", markersize=6.5, color="black", markeredgecolor="white")
    for (x, y), name in zip(anchors, classes, strict=True):
        axes.annotate(
            shorten(name, 12),
            (x, y),
            xytext=(0, 4.5),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            fontweight="bold",
            path_effects=_HALO,
        )


def _write_outside(axes: Axes, points: npt.NDArray[np.floating], limits: Limits) -> None:
    low, high = np.transpose(limits)
    outside = int((~((points >= low) & (points <= high)).all(1)).sum())
    if outside:
        text = axes.text(0.98, 0.02, f"{outside:,} outside", transform=axes.transAxes, ha="right", va="bottom")
        text.set(fontsize=7, color=GREY, path_effects=_HALO)
