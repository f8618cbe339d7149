"""The league of losses: a dot plot, the best on top."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kedge.errors import ConfigError
from kedge.reproduce.figures.axes import plain
from kedge.reproduce.figures.layout import LABEL, Legend, box, new_figure, put_title, text_inches
from kedge.reproduce.figures.series import finite
from kedge.reproduce.figures.styles import Style

__all__ = ["league_chart"]

# None of them is the colour of a loss that is always there.
COLUMN_STYLES = (
    Style("#222222", "o"),
    Style("#e69f00", "s"),
    Style("#56b4e9", "D"),
    Style("#aa4499", "^"),
    Style("#999933", "v"),
    Style("#8c510a", "P"),
)


def league_chart(
    rows: Mapping[str, Sequence[Sequence[float]]],
    column_titles: Sequence[str],
    *,
    x_label: str = "",
    title: str = "",
) -> Figure:
    """A line per loss, the best in the first column on top, a dot per column at the mean over seeds.

    ``rows`` maps the name of a loss to the values of the seeds in each column (an empty sequence: not measured). A
    thin line reaches from the worst seed to the best.
    """
    if not rows or not column_titles:
        raise ConfigError("A league needs at least one loss and one column.")
    for loss, cells in rows.items():
        if len(cells) != len(column_titles):
            raise ConfigError(f"rows[{loss!r}] has {len(cells)} columns; {len(column_titles)} are titled.")
    if len(column_titles) > len(COLUMN_STYLES):
        raise ConfigError(f"A league shows up to {len(COLUMN_STYLES)} columns; {len(column_titles)} were given.")
    values = {loss: [finite(cell) for cell in cells] for loss, cells in rows.items()}
    # Python sorts stably: equals, and losses without a first column, stay as they came.
    order = sorted(values, key=lambda loss: -statistics.fmean(values[loss][0]) if values[loss][0] else math.inf)
    pitch, wide = 0.36, 5.2
    left = 0.24 + max(text_inches(loss, LABEL) for loss in order)
    right, bottom = 0.2, 0.58 if x_label else 0.36
    width = left + wide + right
    handles = [
        Line2D([], [], linestyle="", marker=style.marker, color=style.colour, markersize=6.5, label=text)
        for style, text in zip(COLUMN_STYLES, column_titles, strict=False)
    ]
    legend = Legend(handles, width - 0.2)
    head = 0.42 if title else 0.1
    top = head + legend.inches + 0.1
    high = pitch * len(order)
    figure = new_figure(width, bottom + high + top)
    axes = figure.add_axes(box(figure, left, bottom, wide, high))
    plain(axes, "x")
    for place in range(0, len(order), 2):
        axes.axhspan(place - 0.5, place + 0.5, color="#f5f5f5", linewidth=0, zorder=0)
    step = 0.56 / max(len(column_titles), 2)
    for column, style in enumerate(COLUMN_STYLES[: len(column_titles)]):
        seen = [(place, values[loss][column]) for place, loss in enumerate(order) if values[loss][column]]
        # Accuracy and mAP of label lists nearly coincide: dots of a loss lie a little below one another.
        heights = [place + step * (column - (len(column_titles) - 1) / 2) for place, _ in seen]
        axes.hlines(
            heights,
            [min(found) for _, found in seen],
            [max(found) for _, found in seen],
            color=style.colour,
            linewidth=1.1,
            zorder=2,
        )
        axes.plot(
            [statistics.fmean(found) for _, found in seen],
            heights,
            linestyle="",
            marker=style.marker,
            color=style.colour,
            markersize=5.2,
            markeredgecolor="white",
            markeredgewidth=0.5,
            label=column_titles[column],
            zorder=3,
        )
    axes.set_yticks(range(len(order)), order)
    axes.tick_params(axis="y", length=0, labelsize=LABEL)
    axes.set_ylim(len(order) - 0.5, -0.5)
    axes.margins(x=0.04)
    axes.set_xlabel(x_label, fontsize=LABEL)
    if title:
        put_title(figure, title)
    legend.put(figure, head)
    return figure
