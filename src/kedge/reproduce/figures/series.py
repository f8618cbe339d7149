"""What curves are drawn from: of each loss the values of its seeds over a number, with their means and spread."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Curve", "Series", "all_x", "filled", "finite", "points"]

Curve = Mapping[float, Sequence[float]] | Mapping[int, Sequence[float]]
"""x to the values of the seeds."""
Series = Mapping[str, Curve]
"""By loss."""


def finite(values: Iterable[float]) -> list[float]:
    """Those that are numbers."""
    return [float(value) for value in values if math.isfinite(value)]


def filled(series: Series) -> dict[str, Curve]:
    """The losses that have a value."""
    return {loss: curve for loss, curve in series.items() if any(finite(values) for values in curve.values())}


def points(curve: Curve) -> tuple[list[float], list[float], list[float]]:
    """Where a curve has values: x, their mean, their standard deviation (none of a single value: nan)."""
    found = {float(x): finite(values) for x, values in curve.items()}
    xs = sorted(x for x, values in found.items() if values)
    means = [statistics.fmean(found[x]) for x in xs]
    return xs, means, [statistics.stdev(found[x]) if len(found[x]) > 1 else math.nan for x in xs]


def all_x(*grids: Series) -> list[float]:
    """Every x at which any loss has a value."""
    return sorted({x for series in grids for curve in series.values() for x in points(curve)[0]})
