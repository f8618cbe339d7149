"""One set of axes: plain looks, limits and ticks that suit the numbers, a word where nothing was run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter

from kedge.errors import ConfigError
from kedge.reproduce.figures.layout import GREY, LABEL, PALE, TICK, text_inches
from kedge.reproduce.figures.series import Series, points

__all__ = ["fit_x", "fit_y", "plain", "say_not_run"]

NOT_RUN = "not run"


def plain(axes: Axes, grid: Literal["both", "x", "y"] = "y") -> None:
    """No frame, and a pale grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set(edgecolor=GREY, linewidth=0.7)
    axes.tick_params(labelsize=TICK, length=3, color=GREY)
    axes.grid(axis=grid, color=PALE, linewidth=0.7)
    axes.set_axisbelow(True)


def say_not_run(axes: Axes) -> None:
    """In the middle of empty axes."""
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


def fit_x(axes: Axes, xs: Sequence[float], log2: bool, inches: float, size: float) -> None:
    """Limits around these numbers and ticks that can be read; on a logarithmic axis at the numbers themselves."""
    low, high = min(xs), max(xs)
    if not log2:
        pad = 0.02 * (high - low) or 0.5
        axes.set_xlim(low - pad, high + pad)
        several = MaxNLocator(nbins=max(3, int(inches * 2)), integer=True, steps=[1, 2, 5, 10])
        axes.xaxis.set_major_locator(several if high > low else FixedLocator([low]))
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
        need = (text_inches(f"{low:g}", size) + text_inches(f"{high:g}", size)) * 36 + 0.6 * size
        return math.log2(high / low) * octave >= need

    last = xs[-1]
    for stride in range(1, len(xs)):
        regular = xs[:-1:stride]
        if all(apart(low, high) for low, high in pairwise(regular)):
            return [*(x for x in regular if apart(x, last)), last]
    return [last]


def fit_y(axes: Axes, *grids: Series) -> None:
    """Limits around what is drawn; not below zero for a band alone."""
    axes.margins(y=0.06)
    means = [mean for series in grids for curve in series.values() for mean in points(curve)[1]]
    if min(means) >= 0 and axes.get_ylim()[0] < 0:
        axes.set_ylim(bottom=0)
