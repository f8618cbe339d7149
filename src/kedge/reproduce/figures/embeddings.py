"""Embeddings in two dimensions: where the pictures of each class lie, how densely, and their anchors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps, patheffects
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from kedge.errors import ConfigError
from kedge.evaluation.figures import shorten
from kedge.reproduce.figures.axes import say_not_run
from kedge.reproduce.figures.layout import (
    GREY,
    INK,
    LABEL,
    TICK,
    TITLE,
    Legend,
    box,
    new_figure,
    put_title,
    text_inches,
)
from kedge.reproduce.figures.styles import shown_name

__all__ = ["CLASS_COLOURS", "Cloud", "Split", "embeddings_2d"]

Split = Literal["train", "test"]
Points = npt.NDArray[np.floating]
Cloud = tuple[Points, npt.NDArray[np.integer]]
Limits = tuple[tuple[float, float], tuple[float, float]]

HEADS: dict[Split, str] = {"train": "training images", "test": "test images"}
# Ten that people know apart, then each time the colour that is farthest from all before it.
CLASS_COLOURS = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"),
    *("#3c0078", "#003c00", "#690000", "#960078", "#2d2dd2", "#c3c3ff", "#3c690f", "#00f069", "#1e4b69", "#5a96ff"),
    *("#d21ea5", "#ffb4a5", "#780fc3", "#5a5aff", "#a58700", "#a5d2b4", "#c39687", "#ff3c78", "#694b87", "#c369ff"),
    *("#4bc378", "#a5002d"),
)
DENSITY_CELLS = 150
SIDE = 2.75
"""Inches of a panel."""


def embeddings_2d(
    clouds: Mapping[str, Mapping[Split, Cloud]],
    anchors: Mapping[str, Points | None],
    classes: Sequence[str],
    *,
    title: str = "",
    labels: Mapping[str, str] | None = None,
) -> Figure:
    """A column per loss: training embeddings by class, their density in the plane, and both again for test.

    ``clouds`` maps a loss to the points (n x 2) and labels (n) of "train" and "test". Anchors (classes x 2), where
    a loss has some, are crosses with the name of their class. All of a column has one scale, which the most distant
    half percent on each side does not stretch: how many points lie outside is said.
    """
    _check(clouds, anchors, len(classes))
    parts = [split for split in HEADS if any(split in splits for splits in clouds.values())]
    if not parts:
        raise ConfigError("clouds holds no embeddings; give those of the training or the test images.")
    gap_x, gap_y, air = 0.5, 0.12, 0.24
    left, right, top = 0.85, 0.15, 0.76 if title else 0.42
    width = left + len(clouds) * (SIDE + gap_x) - gap_x + right
    handles = [
        Line2D([], [], linestyle="", marker="o", markersize=6, color=_class_colour(place), label=shorten(name))
        for place, name in enumerate(classes)
    ]
    if any(anchors.get(loss) is not None for loss in clouds):
        handles.append(_anchor_handle())
    legend = Legend(handles, width - 0.2, TICK)
    bottom = 0.42 + 0.11 + 0.14 + legend.inches + 0.36
    block = 2 * SIDE + gap_y
    figure = new_figure(width, bottom + len(parts) * (block + air) - air + top)
    norm, colours = PowerNorm(0.5, 0, 1), _density_colours()
    rows: list[tuple[Split, bool, float]] = []
    for place, split in enumerate(reversed(parts)):
        lower = bottom + place * (block + air)
        rows = [(split, False, lower + SIDE + gap_y), (split, True, lower), *rows]
    for along, (loss, splits) in enumerate(clouds.items()):
        own = anchors.get(loss)
        limits = _limits(splits, own)
        shared: Axes | None = None
        for split, as_density, height in rows:
            frame = box(figure, left + along * (SIDE + gap_x), height, SIDE, SIDE)
            axes = figure.add_axes(frame, sharex=shared, sharey=shared)
            _frame(axes, limits, labelled=height == bottom)
            if shared is None:
                axes.set_title(shown_name(loss, labels), fontsize=TITLE, fontweight="bold", pad=7)
            shared = shared or axes
            if along == 0:
                axes.set_ylabel("their distribution" if as_density else HEADS[split], fontsize=LABEL, labelpad=5)
            points, owners = splits.get(split, (np.empty((0, 2)), np.empty(0, int)))
            if len(points) == 0:
                say_not_run(axes)
            elif as_density:
                axes.imshow(
                    _density(points, limits).T,
                    origin="lower",
                    extent=(*limits[0], *limits[1]),
                    norm=norm,
                    cmap=colours,
                    interpolation="none",
                    aspect="equal",
                )
            else:
                _scatter(axes, points, owners)
                _say_outside(axes, points, limits)
                if own is not None:
                    _mark_anchors(axes, own, classes, limits)
    wide = min(SIDE, width - 0.6)
    bar = figure.add_axes(box(figure, (width - wide) / 2, 0.42, wide, 0.11))
    figure.colorbar(ScalarMappable(norm, colours), cax=bar, orientation="horizontal")
    bar.tick_params(labelsize=TICK - 1, length=2.5)
    bar.set_xlabel("density (share of the densest spot of its panel)", fontsize=TICK, labelpad=2)
    if title:
        put_title(figure, title)
    legend.put(figure, figure.get_figheight() - bottom + 0.36)
    return figure


def _check(clouds: Mapping[str, Mapping[Split, Cloud]], anchors: Mapping[str, Points | None], classes: int) -> None:
    if not clouds:
        raise ConfigError("clouds is empty; give the embeddings of at least one loss.")
    for loss, splits in clouds.items():
        for split, (points, owners) in splits.items():
            name = f"clouds[{loss!r}][{split!r}]"
            if np.shape(points) != (len(owners), 2):
                raise ConfigError(
                    f"{name} has points of shape {np.shape(points)} and {len(owners)} labels; "
                    "give one point (x, y) per label."
                )
            if len(owners) and not 0 <= np.min(owners) <= np.max(owners) < classes:
                raise ConfigError(
                    f"{name} has labels from {np.min(owners)} to {np.max(owners)}; "
                    f"those of {classes} classes run from 0 to {classes - 1}."
                )
        own = anchors.get(loss)
        if own is not None and np.shape(own) != (classes, 2):
            raise ConfigError(f"anchors[{loss!r}] has shape {np.shape(own)}; give one point for each class.")


def _class_colour(place: int) -> str:
    return CLASS_COLOURS[place % len(CLASS_COLOURS)]


def _anchor_handle() -> Line2D:
    return Line2D(
        [], [], linestyle="", marker="X", markersize=7, color=INK, markeredgecolor="white", label="class anchor"
    )


def _density_colours() -> ListedColormap:
    """From nothing to black; the lowest steps fade in, so that single points do not draw a border."""
    steps = colormaps["magma_r"](np.linspace(0, 1, 256))
    steps[:40, 3] = np.linspace(0, 1, 40)
    return ListedColormap(steps)


def _limits(splits: Mapping[Split, Cloud], anchors: Points | None) -> Limits:
    """A square that holds all but the most distant half percent on each side, and every anchor."""
    corners: list[Points] = []
    for points, _ in splits.values():
        finite = np.asarray(points, float)[np.isfinite(points).all(1)]
        if len(finite):
            corners.append(np.percentile(finite, [0.5, 99.5], axis=0))
    if anchors is not None and len(anchors):
        corners.append(np.asarray(anchors, float))
    every = np.concatenate(corners) if corners else np.zeros((1, 2))
    low, high = every.min(0), every.max(0)
    middle, half = (low + high) / 2, 0.56 * float((high - low).max()) or 1.0
    (left, bottom), (right, top) = (middle - half).tolist(), (middle + half).tolist()
    return (left, right), (bottom, top)


def _frame(axes: Axes, limits: Limits, *, labelled: bool) -> None:
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.tick_params(labelsize=TICK - 1, labelbottom=labelled, length=2.5, color=GREY)
    axes.set(xlim=limits[0], ylim=limits[1])
    axes.set_aspect("equal", adjustable="box")
    for spine in axes.spines.values():
        spine.set(edgecolor=GREY, linewidth=0.6)


def _scatter(axes: Axes, points: Points, owners: npt.NDArray[np.integer]) -> None:
    # In the order of classes the last one would hide the others.
    order = np.random.default_rng(0).permutation(len(points))
    colours = np.array(CLASS_COLOURS)
    many = min(1.0, 2_000 / len(points))
    axes.scatter(
        points[order, 0],
        points[order, 1],
        c=colours[owners[order] % len(colours)],
        s=1.5 + 8 * many,
        alpha=0.25 + 0.45 * many,
        linewidths=0,
        rasterized=True,
        zorder=1,
    )


def _density(points: Points, limits: Limits) -> Points:
    """The smoothed density over a square, as a share of its highest value."""
    x, y = np.asarray(points, float)[np.isfinite(points).all(1)].T
    counts: Points = np.histogram2d(x, y, bins=DENSITY_CELLS, range=limits)[0]
    kernel = np.exp(-0.5 * np.arange(-4, 5) ** 2 / 1.2**2)
    for axis in (0, 1):
        counts = np.apply_along_axis(np.convolve, axis, counts, kernel / kernel.sum(), mode="same")
    return counts / (counts.max() or 1.0)


def _mark_anchors(axes: Axes, anchors: Points, names: Sequence[str], limits: Limits) -> None:
    """A cross for each anchor, its name above it, or where the frame is in the way below it or to one side."""
    axes.plot(
        anchors[:, 0],
        anchors[:, 1],
        linestyle="",
        marker="X",
        markersize=6.5,
        markerfacecolor=INK,
        markeredgecolor="white",
        markeredgewidth=0.8,
        zorder=3,
    )
    (left, right), (_, top) = limits
    scale = SIDE * 72 / (right - left)
    size = TICK + 0.5 if len(names) <= 12 else TICK - 2
    for (x, y), name in zip(anchors, (shorten(name, 12) for name in names), strict=True):
        half = 1.15 * 36 * text_inches(name, size) + 2
        aside = max(half - (x - left) * scale, 0) - max(half - (right - x) * scale, 0)
        below = (top - y) * scale < size + 8
        axes.annotate(
            name,
            (x, y),
            xytext=(aside, -4.5 if below else 4.5),
            textcoords="offset points",
            ha="center",
            va="top" if below else "bottom",
            fontsize=size,
            fontweight="bold",
            color=INK,
            path_effects=[patheffects.withStroke(linewidth=2, foreground="white")],
            zorder=4,
        )


def _say_outside(axes: Axes, points: Points, limits: Limits) -> None:
    low, high = np.transpose(limits)
    outside = int((~((points >= low) & (points <= high)).all(1)).sum())
    if outside:
        axes.text(
            0.98,
            0.02,
            f"{outside:,} outside",
            transform=axes.transAxes,
            ha="right",
            va="bottom",
            fontsize=TICK - 1,
            color=GREY,
            path_effects=[patheffects.withStroke(linewidth=2, foreground="white")],
        )
