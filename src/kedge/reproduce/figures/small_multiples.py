"""Small multiples: curves of many datasets and encoders, a panel each, under one legend."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kedge.errors import ConfigError
from kedge.reproduce.figures.axes import fit_x, fit_y, plain, say_not_run
from kedge.reproduce.figures.layout import LABEL, TICK, Legend, box, fitting, new_figure, put_title
from kedge.reproduce.figures.lines import draw_lines
from kedge.reproduce.figures.series import Series, all_x, filled
from kedge.reproduce.figures.styles import Style, shown_name, styles_of

__all__ = ["panels"]


def panels(
    grid: Mapping[tuple[str, str], Series],
    *,
    x_label: str,
    y_label: str = "mAP",
    log2_x: bool = False,
    title: str = "",
    labels: Mapping[str, str] | None = None,
) -> Figure:
    """Curves by (row, column), such as (dataset, encoder), in the order in which they come.

    All panels share the y axis, those of a row the x axis. What has no values says "not run".
    """
    shown = {place: some for place, series in grid.items() if (some := filled(series))}
    if not shown:
        raise ConfigError("grid holds no values; give at least one panel with one value.")
    rows = list(dict.fromkeys(row for row, _ in shown))
    columns = list(dict.fromkeys(column for _, column in shown))
    losses = list(dict.fromkeys(loss for series in shown.values() for loss in series))
    names, styles = {loss: shown_name(loss, labels) for loss in losses}, styles_of(losses)
    row_x = {row: all_x(*(series for place, series in shown.items() if place[0] == row)) for row in rows}
    same_x = len({tuple(xs) for xs in row_x.values()}) == 1

    wide, high = 2.35, 1.6
    gap_x, gap_y = 0.28, 0.16 if same_x else 0.34
    left, right, bottom = 0.92, 0.2, 0.56
    width = left + len(columns) * (wide + gap_x) - gap_x + right
    legend = Legend([_handle(styles[loss], names[loss]) for loss in losses], width - 0.2)
    head = 0.42 if title else 0.1
    top = head + legend.inches + 0.36
    figure = new_figure(width, bottom + len(rows) * (high + gap_y) - gap_y + top)
    first: Axes | None = None
    for down, row in enumerate(rows):
        corner = bottom + (len(rows) - 1 - down) * (high + gap_y)
        figure.text(
            0.2 / width,
            (corner + high / 2) / figure.get_figheight(),
            row,
            rotation=90,
            ha="center",
            va="center",
            fontsize=fitting(row, LABEL, 0.87 * high),
            fontweight="bold",
        )
        for along, column in enumerate(columns):
            axes = figure.add_axes(box(figure, left + along * (wide + gap_x), corner, wide, high), sharey=first)
            first = first or axes
            plain(axes)
            fit_x(axes, row_x[row], log2_x, wide, TICK - 1)
            axes.tick_params(labelleft=along == 0, labelbottom=not same_x or down == len(rows) - 1, labelsize=TICK - 1)
            if down == 0:
                axes.set_title(column, fontsize=fitting(column, LABEL, 0.87 * wide), fontweight="bold", pad=5)
            if along == 0:
                axes.set_ylabel(y_label, fontsize=fitting(y_label, TICK, high))
            if (row, column) in shown:
                draw_lines(axes, shown[row, column], styles, names, small=True)
            else:
                say_not_run(axes)
    assert first is not None
    fit_y(first, *shown.values())
    middle = (left + width - right) / 2 / width
    figure.text(middle, 0.14 / figure.get_figheight(), x_label, ha="center", va="bottom", fontsize=LABEL)
    if title:
        put_title(figure, title)
    legend.put(figure, head)
    return figure


def _handle(style: Style, name: str) -> Line2D:
    return Line2D([], [], color=style.colour, marker=style.marker, markersize=5, linewidth=1.6, label=name)
