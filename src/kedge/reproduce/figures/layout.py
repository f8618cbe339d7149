"""What all figures share: sizes in inches, greys and fonts, text that fits, the title and the legend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.textpath import TextPath

__all__ = [
    "GREY",
    "INK",
    "LABEL",
    "PALE",
    "TICK",
    "TITLE",
    "Legend",
    "box",
    "fitting",
    "new_figure",
    "put_title",
    "text_inches",
]

INK, GREY, PALE = "#222222", "#6b6b6b", "#e4e4e4"
TICK, LABEL, TITLE = 8, 9.5, 11


def new_figure(width: float, height: float) -> Figure:
    """An empty one, in inches."""
    figure = Figure(figsize=(width, height), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def box(figure: Figure, left: float, bottom: float, width: float, height: float) -> tuple[float, float, float, float]:
    """Inches as the fractions of a figure."""
    wide, high = figure.get_figwidth(), figure.get_figheight()
    return left / wide, bottom / high, width / wide, height / high


def text_inches(text: str, size: float) -> float:
    """How long a text is."""
    return float(TextPath((0, 0), text or " ", size=size).get_extents().width) / 72


def fitting(text: str, size: float, inches: float) -> float:
    """The size of a font at which the text is no longer than this, at most ``size``; bold takes a seventh more."""
    return size * min(1.0, inches / max(text_inches(text, size), 1e-6))


def put_title(figure: Figure, title: str) -> None:
    """The title, at the top left."""
    figure.text(
        0.1 / figure.get_figwidth(),
        1 - 0.1 / figure.get_figheight(),
        title,
        ha="left",
        va="top",
        fontsize=fitting(title, TITLE, 0.87 * (figure.get_figwidth() - 0.2)),
        fontweight="bold",
    )


@dataclass(frozen=True)
class Legend:
    """Entries in rows, as many beside one another as there is room for."""

    handles: Sequence[Line2D]
    room: float
    """Inches."""
    size: float = LABEL

    @cached_property
    def across(self) -> int:
        """How many entries stand beside one another."""
        entries = [text_inches(str(one.get_label()), self.size) + self.size * 3.6 / 72 for one in self.handles]
        for across in range(len(entries), 1, -1):
            if sum(max(entries[place::across]) for place in range(across)) <= self.room:
                return across
        return 1

    @property
    def inches(self) -> float:
        """How high it is."""
        return math.ceil(len(self.handles) / self.across) * self.size * 1.4 / 72

    def put(self, figure: Figure, from_top: float) -> None:
        """Draw it in the middle, so many inches below the top."""
        figure.legend(
            # A legend is filled by columns; this order makes it read by rows.
            handles=[handle for place in range(self.across) for handle in self.handles[place :: self.across]],
            loc="upper center",
            bbox_to_anchor=(0.5, 1 - from_top / figure.get_figheight()),
            ncols=self.across,
            fontsize=self.size,
            frameon=False,
            borderaxespad=0,
            borderpad=0,
            handlelength=1.6,
            handletextpad=0.4,
            columnspacing=1.4,
            labelspacing=0.35,
        )
