"""How the figures of the documentation look: each is drawn twice, for light and for dark pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

mpl.use("agg")
HERE = Path(__file__).parent
COLOURS = ("#2a86a8", "#d9722e", "#5d9f4a", "#a45bb0", "#c9a227", "#c4485b", "#4f6fc4", "#7d6b5d", "#3aa694", "#9a9a35")
"""Ten that can be told apart on white and on black."""


@dataclass(frozen=True)
class Theme:
    """What differs between the two."""

    name: str
    ink: str
    faint: str
    paper: str


LIGHT = Theme("light", "#2b3138", "#c9d0d6", "#ffffff")
DARK = Theme("dark", "#d5dbe1", "#4a525b", "#1d242b")


def draw(name: str, plot: Callable[[Theme], Figure]) -> None:
    """Write `name-light.png` and `name-dark.png`, on nothing, so that the page shines through."""
    for theme in (LIGHT, DARK):
        settings = {
            "axes.edgecolor": theme.faint,
            "axes.labelcolor": theme.ink,
            "axes.labelsize": 9.5,
            "axes.linewidth": 0.8,
            "axes.spines.right": False,
            "axes.spines.top": False,
            "axes.titlecolor": theme.ink,
            "axes.titlelocation": "left",
            "axes.titlepad": 8,
            "axes.titlesize": 10.5,
            "figure.dpi": 160,
            "font.family": "DejaVu Sans",
            "font.size": 9,
            "legend.frameon": False,
            "legend.labelcolor": theme.ink,
            "savefig.transparent": True,
            "text.color": theme.ink,
            "xtick.color": theme.ink,
            "xtick.labelsize": 8.5,
            "ytick.color": theme.ink,
            "ytick.labelsize": 8.5,
        }
        with mpl.rc_context(settings):
            figure = plot(theme)
            path = HERE / f"{name}-{theme.name}.png"
            figure.savefig(path, metadata={"Software": None})
        print(path.name)
