"""Curves: a line per loss over a number such as the epoch, a band for its seeds, its name at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kedge.errors import ConfigError
from kedge.reproduce.figures.axes import fit_x, fit_y, plain
from kedge.reproduce.figures.layout import LABEL, TICK, TITLE, box, fitting, new_figure, text_inches
from kedge.reproduce.figures.series import Series, all_x, filled, points
from kedge.reproduce.figures.styles import Style, canonical, shown_name, styles_of

__all__ = ["curves", "draw_lines"]


def curves(
    series: Series,
    *,
    x_label: str,
    y_label: str = "mAP",
    log2_x: bool = False,
    title: str = "",
    labels: Mapping[str, str] | None = None,
) -> Figure:
    """A line per loss at the mean over its seeds, with a band of one standard deviation (of a sample) either side.

    ``series`` maps a loss to x to the values of its seeds; ``labels`` to the name to show. With ``log2_x`` the x axis
    is logarithmic.
    """
    shown = filled(series)
    if not shown:
        raise ConfigError("series holds no values; give at least one loss with one value.")
    names = {loss: shown_name(loss, labels) for loss in shown}
    styles = styles_of(series)
    wide, high = 4.6, 3.3
    left, bottom, top = 0.72, 0.52, 0.42 if title else 0.18
    right = 0.32 + 1.1 * max(text_inches(name, LABEL) for name in names.values())
    figure = new_figure(left + wide + right, bottom + high + top)
    axes = figure.add_axes(box(figure, left, bottom, wide, high))
    plain(axes)
    draw_lines(axes, shown, styles, names)
    fit_x(axes, all_x(shown), log2_x, wide, TICK)
    fit_y(axes, shown)
    axes.set_xlabel(x_label, fontsize=LABEL)
    axes.set_ylabel(y_label, fontsize=fitting(y_label, LABEL, high))
    if title:
        axes.set_title(
            title, fontsize=fitting(title, TITLE, 0.87 * (wide + right)), fontweight="bold", loc="left", pad=8
        )
    _label_ends(axes, shown, styles, names, high * 72)
    return figure


def draw_lines(
    axes: Axes, series: Series, styles: Mapping[str, Style], names: Mapping[str, str], *, small: bool = False
) -> None:
    """The lines and bands alone."""
    for loss, curve in series.items():
        style = styles[loss]
        xs, means, spread = (np.array(part) for part in points(curve))
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
            markersize=3.4 if small else 5.0,
            markeredgecolor="white",
            markeredgewidth=0.5,
            markevery=((len(xs) - 1) % every, every),
            linewidth=1.3 if small else 1.8,
            label=names[loss],
            clip_on=False,
            zorder=3,
        )


def _label_ends(
    axes: Axes, series: Series, styles: Mapping[str, Style], names: Mapping[str, str], points_high: float
) -> None:
    """The name of each line to its right, at the height of its end or as near as the others allow."""
    low, high = axes.get_ylim()
    ends = {loss: (xs[-1], means[-1]) for loss, (xs, means, _) in ((loss, points(series[loss])) for loss in series)}
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
            fontweight="bold" if canonical(loss) == "cam" else "normal",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.7,
                "alpha": 0.7,
                "linestyle": "-" if ends[loss][0] == farthest else (0, (1, 2)),
                "relpos": (0, 0.5),  # from the first letter: from the middle it would run through other names
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
