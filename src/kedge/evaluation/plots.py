"""Plots of retrieval: queries and their first hits, models side by side; the confusion matrix."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kedge.datasets import Dataset, ImageSplit
from kedge.errors import ConfigError
from kedge.metrics import nearest
from kedge.model import Model
from kedge.model.features import split_embeddings

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = npt.NDArray[np.int64]

# Two colours that also differ in lightness; a mark in the corner says the same without colour.
RIGHT, WRONG, NEUTRAL = "#1b9e4b", "#c8102e", "#4a4a4a"


def top_hits(
    model: Model, dataset: Dataset, queries: Sequence[int] | Rows, k: int = 6, *, batch_size: int = 256
) -> Rows:
    """The training rows nearest to each of these test rows (queries x k), by brute force."""
    test = dataset.test.subset(queries)
    query_embeddings = split_embeddings(model, test, batch_size=batch_size, title="queries")
    gallery = split_embeddings(model, dataset.train, batch_size=batch_size, title="gallery")
    hits: Rows = nearest(query_embeddings, gallery, k).cpu().numpy()
    return hits


def retrieval_grid(
    dataset: Dataset, queries: Sequence[int] | Rows, hits: Mapping[str, Rows], *, title: str = ""
) -> Figure:
    """Each query (a test row), and for each model a row of its hits (training rows, as from :func:`top_hits`).

    Right hits have a green frame and a tick, wrong ones a red frame and a cross.
    """
    if not hits or len(queries) == 0:
        raise ConfigError("A plot of hits needs at least one model and one query.")
    shapes = {name: np.shape(rows) for name, rows in hits.items()}
    depth = next(iter(shapes.values()))[-1]
    if set(shapes.values()) != {(len(queries), depth)}:
        raise ConfigError(f"hits have the shapes {shapes}; give one row of hits per query, all of one length.")
    height = len(queries) * len(hits)
    figure = new_figure(depth + 1.6, 1.25 * height + 0.5, title)
    grid = figure.subplots(height, 1 + depth, squeeze=False)
    grid[0, 0].set_title("query", fontsize=9, fontweight="bold")
    for row, (place, name) in enumerate(itertools.product(range(len(queries)), hits)):
        query = int(queries[place])
        query_label = dataset.test.labels[query]
        if row % len(hits) == 0:
            _draw(grid[row, 0], dataset.test, query, dataset.classes, NEUTRAL)
        else:
            grid[row, 0].set_visible(False)
        grid[row, 1].set_ylabel(name, fontsize=8, fontweight="bold", labelpad=5)
        for axes, hit in zip(grid[row, 1:], hits[name][place], strict=True):
            right = dataset.train.labels[hit] == query_label
            colour, mark = (RIGHT, "✓") if right else (WRONG, "✗")
            _draw(axes, dataset.train, int(hit), dataset.classes, colour)
            box = {"boxstyle": "round,pad=0.18", "facecolor": colour, "edgecolor": "white", "lw": 0.5}
            style: dict[str, Any] = {"ha": "right", "va": "top", "fontsize": 7, "color": "white", "bbox": box}
            axes.text(0.97, 0.97, mark, transform=axes.transAxes, fontweight="bold", **style)
    return figure


def confusion_plot(matrix: pd.DataFrame, queries: np.ndarray, total: int) -> Figure:
    """Which classes (rows) are taken for which (columns); right predictions are green, wrong ones red.

    A cell's colour is its share of the `queries` of the row's class. `total` is the number of all classes, of which the
    matrix may show some.
    """
    from matplotlib.colors import to_rgb

    counts, size = matrix.to_numpy(), len(matrix)
    shares = counts / np.maximum(queries, 1)[:, None]
    side = 2.6 + 0.3 * max(size, 6)
    title = "Confusion matrix" if size == total else f"Confusion matrix: the {size} most confused of {total:,} classes"
    figure = new_figure(side, side, title)
    axes = figure.subplots()
    colours = np.where(np.eye(size, dtype=bool)[:, :, None], to_rgb(RIGHT), to_rgb(WRONG))
    # The square root makes a few wrong predictions among many right ones visible.
    cells = 1 - np.sqrt(shares)[:, :, None] * (1 - colours)
    edges = np.arange(size + 1) - 0.5
    axes.pcolormesh(edges, edges, cells, edgecolors="#e4e4e4", linewidth=0.3)
    axes.set(aspect="equal", ylim=(size - 0.5, -0.5))
    for row, column in np.argwhere(counts):
        colour = "white" if shares[row, column] > 0.6 else "black"
        axes.text(column, row, f"{counts[row, column]}", ha="center", va="center", fontsize=6.5, color=colour)
    names = [shorten(str(name), 22) for name in matrix.index]
    axes.set_xticks(range(size), names, fontsize=7, rotation=90)
    axes.set_yticks(range(size), names, fontsize=7)
    axes.tick_params(length=0)
    axes.set_xlabel("predicted class", fontsize=9)
    axes.set_ylabel("class", fontsize=9)
    axes.spines[:].set_color("#b0b0b0")
    return figure


def _draw(axes: Axes, images: ImageSplit, row: int, classes: Sequence[str], colour: str) -> None:
    axes.imshow(images.take([row])[0].permute(1, 2, 0).numpy(), interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(edgecolor=colour, linewidth=2.4)
    axes.set_xlabel(shorten(classes[int(images.labels[row])]), fontsize=7, labelpad=2.5, color=colour)


def new_figure(width: float, height: float, title: str = "") -> Figure:
    """An empty figure, in inches, whose parts make room for each other."""
    from matplotlib.figure import Figure  # half a second, of every evaluation without plots

    figure = Figure(figsize=(width, height), dpi=150, facecolor="white", layout="constrained")
    if title:
        figure.suptitle(title, fontsize=11, fontweight="bold")
    return figure


def shorten(name: str, length: int = 16) -> str:
    """The name of a class where there is little room."""
    name = name.replace("_", " ")
    return name if len(name) <= length else name[: length - 1] + "…"
