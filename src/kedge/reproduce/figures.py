"""Results of experiments as figures: curves, small multiples, 2-D embeddings, the league of losses."""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps, patheffects, rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.textpath import TextPath
from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter

from kedge.errors import ConfigError
from kedge.files import whole_file

__all__ = ["Style", "curves", "embeddings_2d", "league_chart", "panels", "style_of", "styles_of", "write_figure"]

Curve = Mapping[float, Sequence[float]] | Mapping[int, Sequence[float]]
Series = Mapping[str, Curve]
Printed = Mapping[str, Mapping[float, float] | Mapping[int, float]]
Split = Literal["train", "test"]
Points = npt.NDArray[np.floating]
Cloud = tuple[Points, npt.NDArray[np.integer]]
Limits = tuple[tuple[float, float], tuple[float, float]]

INK, GREY, PALE = "#222222", "#6b6b6b", "#e4e4e4"
NOT_RUN = "not run"
HEADS: dict[Split, str] = {"train": "training images", "test": "test images"}


@dataclass(frozen=True)
class Style:
    """How one loss looks in every figure."""

    colour: str
    marker: str


# Apart for every common kind of colour blindness; markers say the same without colour.
FIXED = {
    "cam": Style("#d55e00", "o"),
    "cross_entropy": Style("#0072b2", "s"),
    "contrastive": Style("#009e73", "^"),
}
# The rivals that Kedge ships have the first of these for good; any other loss one that its name picks.
RIVALS = ("triplet", "arcface", "proxy_anchor", "cosface", "multi_similarity", "supcon", "center")
OTHER_COLOURS = ("#cc79a7", "#56b4e9", "#e69f00", "#332288", "#882255", "#999933", "#1a1a1a", "#8c510a", "#8a8a8a")
OTHER_MARKERS = ("D", "v", "P", "X", "<", ">", "p", "h", "*")
# Columns of the league; none of them is the colour of a loss that is always there.
COLUMN_STYLES = (
    Style("#222222", "o"),
    Style("#e69f00", "s"),
    Style("#56b4e9", "D"),
    Style("#aa4499", "^"),
    Style("#999933", "v"),
    Style("#8c510a", "P"),
)
# Ten that people know apart, then each time the colour that is farthest from all before it.
CLASS_COLOURS = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"),
    *("#3c0078", "#003c00", "#690000", "#960078", "#2d2dd2", "#c3c3ff", "#3c690f", "#00f069", "#1e4b69", "#5a96ff"),
    *("#d21ea5", "#ffb4a5", "#780fc3", "#5a5aff", "#a58700", "#a5d2b4", "#c39687", "#ff3c78", "#694b87", "#c369ff"),
    *("#4bc378", "#a5002d"),
)
DENSITY_CELLS = 150
TICK, LABEL, TITLE = 8, 9.5, 11


def style_of(loss: str) -> Style:
    """The colour and marker of a loss, from its name alone: ``cam``, ``cross_entropy``, any other."""
    return styles_of([loss])[loss]


def styles_of(losses: Iterable[str]) -> dict[str, Style]:
    """The looks of losses that share a figure: where two would look alike, the later name takes the next free look."""
    names = {loss: _canonical(loss) for loss in losses}
    looks = dict(FIXED)
    count = len(OTHER_COLOURS)
    taken: set[int] = set()
    others = set(names.values()) - set(FIXED)
    for name in [*(rival for rival in RIVALS if rival in others), *sorted(others - set(RIVALS))]:
        wanted = RIVALS.index(name) if name in RIVALS else zlib.crc32(name.encode()) % count
        tries = [turn * count + (wanted + step) % count for turn in range(count) for step in range(count)]
        place = next((place for place in tries if place not in taken), wanted)
        taken.add(place)
        looks[name] = Style(OTHER_COLOURS[place % count], OTHER_MARKERS[(place + place // count) % count])
    return {loss: looks[name] for loss, name in names.items()}


def curves(
    series: Series,
    *,
    x_label: str,
    y_label: str = "mAP",
    log2_x: bool = False,
    title: str = "",
    printed: Printed | None = None,
    labels: Mapping[str, str] | None = None,
) -> Figure:
    """A line per loss at the mean over its seeds, with a band of one standard deviation (of a sample) either side.

    ``series`` maps a loss to x to the values of its seeds; ``printed`` to x to the value that the paper prints, shown
    as a hollow marker; ``labels`` to the name to show. With ``log2_x`` the x axis is logarithmic.
    """
    if not any(_has_points(curve) for curve in series.values()):
        raise ConfigError("series holds no values; give at least one loss with one value.")
    shown = {loss: curve for loss, curve in series.items() if _has_points(curve)}
    names = {loss: _display(loss, labels) for loss in shown}
    styles = styles_of(series)
    wide, high = 4.6, 3.3
    left, bottom, top = 0.72, 0.52, 0.42 if title else 0.18
    right = 0.32 + 1.1 * max(_text_inches(name, LABEL) for name in names.values())
    figure = _figure(left + wide + right, bottom + high + top)
    axes = figure.add_axes(_box(figure, left, bottom, wide, high))
    _plain(axes)
    _draw_curves(axes, shown, styles, printed or {}, names)
    _fit_x(axes, _all_x(shown, printed or {}), log2_x, wide, TICK)
    _fit_y(axes, shown)
    axes.set_xlabel(x_label, fontsize=LABEL)
    axes.set_ylabel(y_label, fontsize=_fitting(y_label, LABEL, high))
    if title:
        axes.set_title(
            title, fontsize=_fitting(title, TITLE, 0.87 * (wide + right)), fontweight="bold", loc="left", pad=8
        )
    _label_ends(axes, shown, styles, names, high * 72)
    if printed and any(printed.get(loss) for loss in shown):
        axes.legend(handles=[_printed_handle()], loc="best", fontsize=TICK, frameon=False, handletextpad=0.3)
    return figure


def panels(
    grid: Mapping[tuple[str, str], Series],
    *,
    x_label: str,
    y_label: str = "mAP",
    log2_x: bool = False,
    title: str = "",
    printed: Mapping[tuple[str, str], Printed] | None = None,
    labels: Mapping[str, str] | None = None,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
) -> Figure:
    """Small multiples of :func:`curves`, by (row, column), such as (dataset, encoder).

    All panels share the y axis, those of a row the x axis. ``rows`` and ``columns`` say which there are and in which
    order; without them, those of ``grid`` as they come. What has no values says "not run".
    """
    rows = list(dict.fromkeys(row for row, _ in grid)) if rows is None else list(rows)
    columns = list(dict.fromkeys(column for _, column in grid)) if columns is None else list(columns)
    filled = {
        (row, column): {loss: curve for loss, curve in grid[row, column].items() if _has_points(curve)}
        for row in rows
        for column in columns
        if (row, column) in grid
    }
    filled = {place: series for place, series in filled.items() if series}
    if not filled:
        raise ConfigError("grid holds no values; give at least one panel with one value.")
    losses = list(dict.fromkeys(loss for series in grid.values() for loss in series))
    losses = [loss for loss in losses if any(loss in series for series in filled.values())]
    names, styles = {loss: _display(loss, labels) for loss in losses}, styles_of(losses)
    marks = {place: (printed or {}).get(place, {}) for place in filled}
    row_x = {
        row: sorted({x for place, series in filled.items() if place[0] == row for x in _all_x(series, marks[place])})
        for row in rows
    }
    same_x = len({tuple(xs) for xs in row_x.values() if xs}) == 1
    if same_x:
        row_x = dict.fromkeys(rows, next(xs for xs in row_x.values() if xs))

    wide, high = 2.35, 1.6
    gap_x, gap_y = 0.28, 0.16 if same_x else 0.34
    left, right, bottom = 0.92, 0.2, 0.56
    width = left + len(columns) * (wide + gap_x) - gap_x + right
    handles = [_line_handle(styles[loss], names[loss]) for loss in losses]
    if any(marks.values()):
        handles.append(_printed_handle())
    across = _legend_columns([str(handle.get_label()) for handle in handles], width - 0.2, LABEL)
    head = 0.42 if title else 0.1
    top = head + _legend_inches(len(handles), across, LABEL) + 0.36
    figure = _figure(width, bottom + len(rows) * (high + gap_y) - gap_y + top)
    first: Axes | None = None
    for down, row in enumerate(rows):
        for along, column in enumerate(columns):
            corner = bottom + (len(rows) - 1 - down) * (high + gap_y)
            place = _box(figure, left + along * (wide + gap_x), corner, wide, high)
            axes = figure.add_axes(place, sharey=first)
            first = first or axes
            _plain(axes)
            if row_x[row]:
                _fit_x(axes, row_x[row], log2_x, wide, TICK - 1)
            else:
                axes.set_xticks([])
            axes.tick_params(labelleft=along == 0, labelbottom=not same_x or down == len(rows) - 1, labelsize=TICK - 1)
            if down == 0:
                axes.set_title(column, fontsize=_fitting(column, LABEL, 0.87 * wide), fontweight="bold", pad=5)
            if along == 0:
                axes.set_ylabel(y_label, fontsize=_fitting(y_label, TICK, high))
                middle = (corner + high / 2) / figure.get_figheight()
                figure.text(
                    0.2 / width,
                    middle,
                    row,
                    rotation=90,
                    ha="center",
                    va="center",
                    fontsize=_fitting(row, LABEL, 0.87 * high),
                    fontweight="bold",
                )
            if (row, column) in filled:
                _draw_curves(axes, filled[row, column], styles, marks[row, column], names, small=True)
            else:
                _say_not_run(axes)
    assert first is not None
    _fit_y(first, *filled.values())
    middle = (left + width - right) / 2 / width
    figure.text(middle, 0.14 / figure.get_figheight(), x_label, ha="center", va="bottom", fontsize=LABEL)
    if title:
        _head(figure, title)
    _legend(figure, handles, across, head)
    return figure


def embeddings_2d(
    clouds: Mapping[str, Mapping[Split, Cloud]],
    anchors: Mapping[str, Points | None],
    classes: Sequence[str],
    *,
    labels: Mapping[str, str] | None = None,
) -> Figure:
    """A column per loss: training embeddings by class, their density in the plane, and both again for test.

    ``clouds`` maps a loss to the points (n x 2) and labels (n) of "train" and "test". Anchors (classes x 2), where
    a loss has some, are crosses with the name of their class. All of a column has one scale, which the most distant
    half percent on each side does not stretch: how many points lie outside is said.
    """
    if not clouds:
        raise ConfigError("clouds is empty; give the embeddings of at least one loss.")
    for loss, splits in clouds.items():
        for split, cloud in splits.items():
            _check_cloud(f"clouds[{loss!r}][{split!r}]", cloud, len(classes))
        own = anchors.get(loss)
        if own is not None and np.shape(own) != (len(classes), 2):
            raise ConfigError(f"anchors[{loss!r}] has shape {np.shape(own)}; give one point for each class.")
    parts: list[Split] = [split for split in HEADS if any(split in splits for splits in clouds.values())]
    if not parts:
        raise ConfigError("clouds holds no embeddings; give those of the training or the test images.")
    side, gap_x, gap_y, air = 2.75, 0.5, 0.12, 0.24
    left, right, top = 0.85, 0.15, 0.42
    width = left + len(clouds) * (side + gap_x) - gap_x + right
    handles = [
        Line2D([], [], linestyle="", marker="o", markersize=6, color=_class_colour(place), label=_shorten(name))
        for place, name in enumerate(classes)
    ]
    if any(anchors.get(loss) is not None for loss in clouds):
        handles.append(_anchor_handle())
    across = _legend_columns([str(handle.get_label()) for handle in handles], width - 0.2, TICK)
    legend = _legend_inches(len(handles), across, TICK)
    bottom = 0.42 + 0.11 + 0.14 + legend + 0.36
    block = 2 * side + gap_y
    figure = _figure(width, bottom + len(parts) * (block + air) - air + top)
    norm, colours = PowerNorm(0.5, 0, 1), _density_colours()
    rows: list[tuple[Split, bool, float]] = []
    for place, split in enumerate(reversed(parts)):
        lower = bottom + place * (block + air)
        rows = [(split, False, lower + side + gap_y), (split, True, lower), *rows]
    for along, (loss, splits) in enumerate(clouds.items()):
        own = anchors.get(loss)
        limits = _limits(splits, own)
        shared: Axes | None = None
        for split, as_density, height in rows:
            frame = _box(figure, left + along * (side + gap_x), height, side, side)
            axes = figure.add_axes(frame, sharex=shared, sharey=shared)
            if shared is None:
                axes.set_title(_display(loss, labels), fontsize=TITLE, fontweight="bold", pad=7)
                axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
                axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
            shared = shared or axes
            axes.tick_params(labelsize=TICK - 1, labelbottom=height == bottom, length=2.5, color=GREY)
            axes.set(xlim=limits[0], ylim=limits[1])
            axes.set_aspect("equal", adjustable="box")
            for spine in axes.spines.values():
                spine.set(edgecolor=GREY, linewidth=0.6)
            if along == 0:
                axes.set_ylabel("their distribution" if as_density else HEADS[split], fontsize=LABEL, labelpad=5)
            points, owners = splits.get(split, (np.empty((0, 2)), np.empty(0, int)))
            if len(points) == 0:
                _say_not_run(axes)
                continue
            if as_density:
                axes.imshow(
                    _density(points, limits).T,
                    origin="lower",
                    extent=(*limits[0], *limits[1]),
                    norm=norm,
                    cmap=colours,
                    interpolation="none",
                    aspect="equal",
                )
                continue
            _scatter(axes, points, owners)
            _say_outside(axes, points, limits)
            if own is not None:
                _mark_anchors(axes, own, classes)
    wide = min(2.75, width - 0.6)
    bar = figure.add_axes(_box(figure, (width - wide) / 2, 0.42, wide, 0.11))
    figure.colorbar(ScalarMappable(norm, colours), cax=bar, orientation="horizontal")
    bar.tick_params(labelsize=TICK - 1, length=2.5)
    bar.set_xlabel("density (share of the densest spot of its panel)", fontsize=TICK, labelpad=2)
    _legend(figure, handles, across, figure.get_figheight() - bottom + 0.36, TICK)
    return figure


def league_chart(
    rows: Mapping[str, Sequence[Sequence[float]]],
    column_titles: Sequence[str],
    *,
    x_label: str = "",
    title: str = "",
    labels: Mapping[str, str] | None = None,
) -> Figure:
    """A dot plot: a line per loss, the best in the first column on top, a dot per column at the mean over seeds.

    ``rows`` maps a loss to the values of the seeds in each column (an empty sequence: not measured). A thin line
    reaches from the worst seed to the best.
    """
    if not rows or not column_titles:
        raise ConfigError("A league needs at least one loss and one column.")
    for loss, cells in rows.items():
        if len(cells) != len(column_titles):
            raise ConfigError(f"rows[{loss!r}] has {len(cells)} columns; {len(column_titles)} are titled.")
    if len(column_titles) > len(COLUMN_STYLES):
        raise ConfigError(f"A league shows up to {len(COLUMN_STYLES)} columns; {len(column_titles)} were given.")
    values = {loss: [_finite(cell) for cell in cells] for loss, cells in rows.items()}
    # Python sorts stably: equals, and losses without a first column, stay as they came.
    order = sorted(values, key=lambda loss: -statistics.fmean(values[loss][0]) if values[loss][0] else math.inf)
    names = [_display(loss, labels) for loss in order]
    pitch, wide = 0.36, 5.2
    left = 0.24 + max(_text_inches(name, LABEL) for name in names)
    right, bottom = 0.2, 0.58 if x_label else 0.36
    width = left + wide + right
    handles = [
        Line2D([], [], linestyle="", marker=style.marker, color=style.colour, markersize=6.5, label=text)
        for style, text in zip(COLUMN_STYLES, column_titles, strict=False)
    ]
    across = _legend_columns(list(column_titles), width - 0.2, LABEL)
    head = 0.42 if title else 0.1
    top = head + _legend_inches(len(handles), across, LABEL) + 0.1
    high = pitch * len(order)
    figure = _figure(width, bottom + high + top)
    axes = figure.add_axes(_box(figure, left, bottom, wide, high))
    _plain(axes, "x")
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
    axes.set_yticks(range(len(order)), names)
    axes.tick_params(axis="y", length=0, labelsize=LABEL)
    axes.set_ylim(len(order) - 0.5, -0.5)
    axes.margins(x=0.04)
    axes.set_xlabel(x_label, fontsize=LABEL)
    if title:
        _head(figure, title)
    _legend(figure, handles, across, head)
    return figure


def write_figure(figure: Figure, folder: Path, name: str) -> list[Path]:
    """The figure as ``name.png`` (150 dots per inch) and ``name.svg``; the same figure gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    # The SVG carries scatters as pictures: coarser ones keep it small.
    kinds: dict[str, tuple[int, dict[str, str | None]]] = {
        "png": (150, {"Software": None}),
        "svg": (110, {"Date": None, "Creator": "Kedge"}),
    }
    written = []
    for kind, (dpi, metadata) in kinds.items():
        final = folder / f"{name}.{kind}"
        with rc_context({"svg.hashsalt": "kedge"}), whole_file(final) as stream:
            figure.savefig(stream, format=kind, dpi=dpi, metadata=metadata)
        written.append(final)
    return written


def _canonical(loss: str) -> str:
    return loss.strip().lower().replace("-", "_").replace(" ", "_")


def _display(loss: str, labels: Mapping[str, str] | None) -> str:
    return (labels or {}).get(loss, loss)


def _shorten(name: str, length: int = 16) -> str:
    name = name.replace("_", " ")
    return name if len(name) <= length else name[: length - 1] + "…"


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _box(figure: Figure, left: float, bottom: float, width: float, height: float) -> tuple[float, float, float, float]:
    """Inches as the fractions of a figure."""
    wide, high = figure.get_figwidth(), figure.get_figheight()
    return left / wide, bottom / high, width / wide, height / high


def _text_inches(text: str, size: float) -> float:
    return float(TextPath((0, 0), text or " ", size=size).get_extents().width) / 72


def _fitting(text: str, size: float, inches: float) -> float:
    """The size of a font at which the text is no longer than this, at most ``size``; bold takes a seventh more."""
    return size * min(1.0, inches / max(_text_inches(text, size), 1e-6))


def _plain(axes: Axes, grid: Literal["both", "x", "y"] = "y") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set(edgecolor=GREY, linewidth=0.7)
    axes.tick_params(labelsize=TICK, length=3, color=GREY)
    axes.grid(axis=grid, color=PALE, linewidth=0.7)
    axes.set_axisbelow(True)


def _say_not_run(axes: Axes) -> None:
    axes.text(
        0.5,
        0.5,
        NOT_RUN,
        transform=axes.transAxes,
        ha="center",
        va="center",
        fontsize=LABEL,
        color=GREY,
        fontstyle="italic",
    )


def _finite(values: Iterable[float]) -> list[float]:
    return [float(value) for value in values if math.isfinite(value)]


def _has_points(curve: Curve) -> bool:
    return any(_finite(values) for values in curve.values())


def _points(curve: Curve) -> tuple[list[float], list[float], list[float]]:
    """Where a curve has values: x, their mean, their standard deviation (none of a single value: nan)."""
    found = {float(x): _finite(values) for x, values in curve.items()}
    xs = sorted(x for x, values in found.items() if values)
    means = [statistics.fmean(found[x]) for x in xs]
    return xs, means, [statistics.stdev(found[x]) if len(found[x]) > 1 else math.nan for x in xs]


def _all_x(series: Series, printed: Printed) -> list[float]:
    seen = {x for curve in series.values() for x in _points(curve)[0]}
    return sorted(seen | {float(x) for loss in series for x in printed.get(loss, {})})


def _draw_curves(
    axes: Axes,
    series: Series,
    styles: Mapping[str, Style],
    printed: Printed,
    names: Mapping[str, str],
    *,
    small: bool = False,
) -> None:
    size = 3.4 if small else 5.0
    for loss, curve in series.items():
        style = styles[loss]
        xs, means, spread = (np.array(part) for part in _points(curve))
        several = np.isfinite(spread)
        every = max(1, len(xs) // 16)
        width = np.where(several, spread, 0.0)
        # A band needs two neighbours; a point without one has a bar of the same length.
        beside = np.pad(several, 1)
        alone = several & ~beside[:-2] & ~beside[2:]
        axes.fill_between(
            xs,
            means - width,
            means + width,
            where=several & ~alone,
            color=style.colour,
            alpha=0.18,
            linewidth=0,
            zorder=1.5,
        )
        axes.vlines(
            xs[alone],
            (means - width)[alone],
            (means + width)[alone],
            color=style.colour,
            alpha=0.6,
            linewidth=1.2,
            zorder=1.6,
        )
        axes.plot(
            xs,
            means,
            color=style.colour,
            marker=style.marker,
            markersize=size,
            markeredgecolor="white",
            markeredgewidth=0.5,
            markevery=((len(xs) - 1) % every, every),
            linewidth=1.3 if small else 1.8,
            label=names[loss],
            clip_on=False,
            zorder=3,
        )
        marks = {float(x): value for x, value in printed.get(loss, {}).items()}
        if marks:
            axes.plot(
                list(marks),
                list(marks.values()),
                linestyle="",
                marker=style.marker,
                markersize=size + 3,
                markerfacecolor="none",
                markeredgecolor=style.colour,
                markeredgewidth=1.2,
                label="_printed",
                clip_on=False,
                zorder=2.8,
            )


def _fit_x(axes: Axes, xs: Sequence[float], log2: bool, inches: float, size: float) -> None:
    low, high = min(xs), max(xs)
    if not log2:
        pad = 0.02 * (high - low) or 0.5
        axes.set_xlim(low - pad, high + pad)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=max(3, int(inches * 2)), integer=True, steps=[1, 2, 5, 10]))
        return
    if low <= 0:
        raise ConfigError(f"x = {low:g} has no place on a logarithmic axis; use log2_x=False.")
    axes.set_xscale("log", base=2)
    pad = 0.03 * math.log2(high / low) or 0.5
    axes.set_xlim(low / 2**pad, high * 2**pad)
    octave = inches * 72 / (math.log2(high / low) + 2 * pad)
    shown = _readable(xs, octave, size)
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_minor_locator(FixedLocator([x for x in xs if x not in shown]))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", which="minor", length=2, color=GREY)


def _readable(xs: Sequence[float], octave: float, size: float) -> list[float]:
    """The numbers whose labels do not touch (an octave has so many points): the last, and every n-th before it."""

    def apart(low: float, high: float) -> bool:
        need = (_text_inches(f"{low:g}", size) + _text_inches(f"{high:g}", size)) * 36 + 0.45 * size
        return math.log2(high / low) * octave >= need

    last = xs[-1]
    for stride in range(1, len(xs)):
        regular = xs[:-1:stride]
        if all(apart(low, high) for low, high in pairwise(regular)):
            return [*(x for x in regular if apart(x, last)), last]
    return [last]


def _fit_y(axes: Axes, *grids: Series) -> None:
    axes.margins(y=0.06)
    means = [mean for series in grids for curve in series.values() for mean in _points(curve)[1]]
    if min(means) >= 0 and axes.get_ylim()[0] < 0:
        axes.set_ylim(bottom=0)


def _label_ends(
    axes: Axes, series: Series, styles: Mapping[str, Style], names: Mapping[str, str], points_high: float
) -> None:
    """The name of each line to its right, at the height of its end or as near as the others allow."""
    low, high = axes.get_ylim()
    ends = {loss: (xs[-1], means[-1]) for loss, (xs, means, _) in ((loss, _points(series[loss])) for loss in series)}
    farthest = max(x for x, _ in ends.values())
    order = sorted(series, key=lambda loss: ends[loss][1])
    wanted = [(ends[loss][1] - low) / (high - low) * points_high for loss in order]
    gap = min(LABEL * 1.35, points_high / max(len(order) - 1, 1))
    for loss, height, aim in zip(order, _spread(wanted, gap, 0.0, points_high), wanted, strict=True):
        colour = styles[loss].colour
        led = abs(height - aim) > 1.5 or ends[loss][0] < farthest
        axes.annotate(
            names[loss],
            xy=ends[loss],
            xycoords="data",
            xytext=(1.035, height / points_high),
            textcoords="axes fraction",
            ha="left",
            va="center",
            fontsize=LABEL,
            color=colour,
            fontweight="bold" if _canonical(loss) == "cam" else "normal",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.7,
                "alpha": 0.7,
                "linestyle": "-" if ends[loss][0] == farthest else (0, (1, 2)),
                "shrinkA": 1,
                "shrinkB": 4,
            }
            if led
            else None,
        )


def _spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The places nearest to the wanted ones (ascending), in squares, that are ``gap`` apart and within the bounds.

    >>> _spread([1, 5, 5, 9], 2, 0, 10)
    [1.0, 4.0, 6.0, 9.0]
    """
    # Less what the gaps before it take, each place must not lie below the last: neighbours that do are pooled.
    pools: list[tuple[float, int]] = []
    for place, aim in enumerate(wanted):
        pools.append((aim - place * gap, 1))
        while len(pools) > 1 and pools[-1][0] < pools[-2][0]:
            (after, more), (before, some) = pools.pop(), pools.pop()
            pools.append(((before * some + after * more) / (some + more), some + more))
    top = max(low, high - (len(wanted) - 1) * gap)
    flat = [min(max(mean, low), top) for mean, count in pools for _ in range(count)]
    return [float(mean + place * gap) for place, mean in enumerate(flat)]


def _line_handle(style: Style, name: str) -> Line2D:
    return Line2D([], [], color=style.colour, marker=style.marker, markersize=5, linewidth=1.6, label=name)


def _printed_handle() -> Line2D:
    return Line2D(
        [],
        [],
        linestyle="",
        marker="o",
        markersize=7,
        markerfacecolor="none",
        markeredgecolor=GREY,
        markeredgewidth=1.2,
        label="printed in the paper",
    )


def _anchor_handle() -> Line2D:
    return Line2D(
        [], [], linestyle="", marker="X", markersize=7, color=INK, markeredgecolor="white", label="class anchor"
    )


def _legend_columns(names: Sequence[str], inches: float, size: float) -> int:
    """How many entries of a legend fit beside one another."""
    entries = [_text_inches(name, size) + size * 3.6 / 72 for name in names]
    for across in range(len(names), 1, -1):
        if sum(max(entries[place::across]) for place in range(across)) <= inches:
            return across
    return 1


def _legend_inches(count: int, across: int, size: float) -> float:
    return math.ceil(count / across) * size * 1.4 / 72


def _legend(figure: Figure, handles: Sequence[Line2D], across: int, from_top: float, size: float = LABEL) -> None:
    figure.legend(
        # A legend is filled by columns; this order makes it read by rows.
        handles=[handle for place in range(across) for handle in handles[place::across]],
        loc="upper center",
        bbox_to_anchor=(0.5, 1 - from_top / figure.get_figheight()),
        ncols=across,
        fontsize=size,
        frameon=False,
        borderaxespad=0,
        borderpad=0,
        handlelength=1.6,
        handletextpad=0.4,
        columnspacing=1.4,
        labelspacing=0.35,
    )


def _head(figure: Figure, title: str) -> None:
    figure.text(
        0.1 / figure.get_figwidth(),
        1 - 0.1 / figure.get_figheight(),
        title,
        ha="left",
        va="top",
        fontsize=_fitting(title, TITLE, 0.87 * (figure.get_figwidth() - 0.2)),
        fontweight="bold",
    )


def _class_colour(place: int) -> str:
    return CLASS_COLOURS[place % len(CLASS_COLOURS)]


def _check_cloud(name: str, cloud: Cloud, classes: int) -> None:
    points, owners = cloud
    if np.shape(points) != (len(owners), 2):
        raise ConfigError(
            f"{name} has points of shape {np.shape(points)} and {len(owners)} labels; give one point (x, y) per label."
        )
    if len(owners) and not 0 <= np.min(owners) <= np.max(owners) < classes:
        raise ConfigError(
            f"{name} has labels from {np.min(owners)} to {np.max(owners)}; "
            f"those of {classes} classes run from 0 to {classes - 1}."
        )


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


def _scatter(axes: Axes, points: Points, owners: npt.NDArray[np.integer]) -> None:
    # In the order of classes the last one would hide the others.
    order = np.random.default_rng(0).permutation(len(points))
    colours = np.array([_class_colour(place) for place in range(len(CLASS_COLOURS))])
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


def _density_colours() -> ListedColormap:
    """From nothing to black; the lowest steps fade in, so that single points do not draw a border."""
    steps = colormaps["magma_r"](np.linspace(0, 1, 256))
    steps[:40, 3] = np.linspace(0, 1, 40)
    return ListedColormap(steps)


def _mark_anchors(axes: Axes, anchors: Points, names: Sequence[str]) -> None:
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
    for (x, y), name in zip(anchors, names, strict=False):
        axes.annotate(
            _shorten(name, 10),
            (x, y),
            xytext=(0, 4.5),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=TICK + 0.5 if len(names) <= 12 else TICK - 2,
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
