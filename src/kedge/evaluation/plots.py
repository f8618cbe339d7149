"""Plots of retrieval: queries and their first hits, models side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from kedge.datasets import Dataset, ImageSplit
from kedge.errors import ConfigError
from kedge.metrics import nearest
from kedge.model import Model, embed_split

Rows = npt.NDArray[np.int64]

# Two colours that also differ in lightness; a mark in the corner says the same without colour.
RIGHT, WRONG, NEUTRAL = "#1b9e4b", "#c8102e", "#4a4a4a"
CELL_INCHES = 0.92
CAPTION_INCHES = 0.2


def top_hits(
    model: Model, dataset: Dataset, queries: Sequence[int] | Rows, k: int = 6, *, batch_size: int = 256
) -> Rows:
    """The training rows nearest to each of these test rows (queries x k), by brute force."""
    test = dataset.test.subset(queries)
    query_embeddings = embed_split(model.embed_pixels, test, batch_size=batch_size, title="queries")
    gallery = embed_split(model.embed_pixels, dataset.train, batch_size=batch_size, title="gallery")
    hits: Rows = nearest(query_embeddings, gallery, k).cpu().numpy()
    return hits


def retrieval_grid(
    dataset: Dataset, queries: Sequence[int] | Rows, hits: Mapping[str, Rows], *, title: str = ""
) -> Figure:
    """Each query (a test row), and for each model its hits (training rows, as from :func:`top_hits`).

    Two models stand side by side, more of them below one another. Right hits have a green frame and a tick, wrong ones
    a red frame and a cross.
    """
    if not hits or len(queries) == 0:
        raise ConfigError("A plot of hits needs at least one model and one query.")
    shapes = {name: np.shape(rows) for name, rows in hits.items()}
    depth = next(iter(shapes.values()))[-1]
    if set(shapes.values()) != {(len(queries), depth)}:
        raise ConfigError(f"hits have the shapes {shapes}; give one row of hits per query, all of one length.")

    stacked = len(hits) > 2
    down, beside, gap = (len(hits), 1, 0.35) if stacked else (1, len(hits), 0.2)
    widths = [1.0] + [width for _ in range(beside) for width in (gap, *[1.0] * depth)]
    height, head = CELL_INCHES + CAPTION_INCHES, 0.68 if title else 0.38
    size = (CELL_INCHES * sum(widths) + 0.2, height * down * len(queries) + head + 0.07)
    figure = Figure(figsize=size, dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    left, top = 0.1 / size[0], 1 - head / size[1]
    grid = figure.add_gridspec(
        down * len(queries),
        len(widths),
        width_ratios=widths,
        left=left,
        right=1 - left,
        top=top,
        bottom=0.22 / size[1],
        wspace=0.1,
        hspace=CAPTION_INCHES / CELL_INCHES + 0.1,
    )
    if title:
        figure.text(left, 1 - 0.1 / size[1], title, ha="left", va="top", fontsize=11, fontweight="bold")
    for number, query in enumerate(queries):
        query_label = int(dataset.test.labels[query])
        axes = figure.add_subplot(grid[number * down, 0])
        _draw(axes, dataset.test, int(query), dataset.classes[query_label], NEUTRAL)
        if number == 0:
            _head(figure, axes, axes, "query")
        for block, (name, rows) in enumerate(hits.items()):
            row, first = (number * down + block, 2) if stacked else (number, 2 + block * (depth + 1))
            cells = [figure.add_subplot(grid[row, first + place]) for place in range(depth)]
            for cell, hit in zip(cells, rows[number], strict=True):
                label = int(dataset.train.labels[hit])
                right = label == query_label
                _draw(cell, dataset.train, int(hit), dataset.classes[label], RIGHT if right else WRONG)
                _mark(cell, right)
            if stacked:
                cells[0].set_ylabel(name, fontsize=8, fontweight="bold", labelpad=5)
            elif number == 0:
                _head(figure, cells[0], cells[-1], name)
    return figure


def _draw(axes: Axes, images: ImageSplit, row: int, name: str, colour: str) -> None:
    axes.imshow(images.take([row])[0].permute(1, 2, 0).numpy(), interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set(edgecolor=colour, linewidth=2.4)
    axes.set_xlabel(shorten(name), fontsize=7, labelpad=2.5, color=colour)


def _mark(axes: Axes, right: bool) -> None:
    axes.text(
        0.97,
        0.97,
        "✓" if right else "✗",
        transform=axes.transAxes,
        ha="right",
        va="top",
        fontsize=7,
        fontweight="bold",
        color="white",
        bbox={
            "boxstyle": "round,pad=0.18",
            "facecolor": RIGHT if right else WRONG,
            "edgecolor": "white",
            "lw": 0.5,
        },
    )


def _head(figure: Figure, first: Axes, last: Axes, text: str) -> None:
    start, end = first.get_position(), last.get_position()
    middle, above = (start.x0 + end.x1) / 2, end.y1 + 0.07 / figure.get_figheight()
    figure.text(middle, above, text, ha="center", va="bottom", fontsize=9, fontweight="bold")


def shorten(name: str, length: int = 16) -> str:
    """The name of a class where there is little room."""
    name = name.replace("_", " ")
    return name if len(name) <= length else name[: length - 1] + "…"
