"""One figure of ours over its seeds, beside what the paper prints."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Literal

from kedge.errors import DataError
from kedge.reproduce.printed import Printed

__all__ = ["NOT_RUN", "Cell", "Unit", "Verdict", "number", "printed_text"]

Unit = Literal["share", "percent", "ms", "place"]
"""How a number is written: a share as .790, or as 79.00% ± 0.60; milliseconds as 6.40, a place in a ranking as 1."""
Verdict = Literal["above", "within", "below"]

NOT_RUN = "not run"
_DECIMALS: dict[Unit, int] = {"share": 3, "percent": 4, "ms": 2, "place": 0}


@dataclass(frozen=True)
class Cell:
    """The values of one figure, a value per seed (none: it was not run), and the paper's number if it has one."""

    values: tuple[float, ...]
    printed: Printed | None = None

    def __post_init__(self) -> None:
        for value in self.values:
            if not math.isfinite(value):
                raise DataError(f"A cell of a table holds the value {value}; leave out runs that measured no number.")

    @property
    def count(self) -> int:
        """How many seeds ran."""
        return len(self.values)

    @property
    def mean(self) -> float | None:
        """The mean over seeds."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def std(self) -> float | None:
        """The sample standard deviation (n - 1); None for fewer than two seeds."""
        return statistics.stdev(self.values) if self.count > 1 else None

    @property
    def verdict(self) -> Verdict | None:
        """Our mean against the printed mean ± two printed standard deviations; None without one or the other.

        Our mean is first rounded to the printed decimals. So where the paper prints no deviation, as in its ablation,
        or one of .000, ours is within if it would be printed as the same number.

        >>> Cell((0.6319,), Printed(0.622, 0.005)).verdict, Cell((0.9664,), Printed(0.967)).verdict
        ('within', 'below')
        """
        if self.mean is None or self.printed is None:
            return None
        # Whole units of the last printed digit: differences of decimals as floats would miss equality.
        scale = 10**self.printed.digits
        gap = round(round(self.mean, self.printed.digits) * scale) - round(self.printed.mean * scale)
        bound = 2 * round((self.printed.std or 0.0) * scale)
        return "within" if abs(gap) <= bound else "above" if gap > 0 else "below"

    def rounded(self, unit: Unit) -> float | None:
        """The mean as precisely as it is shown: what looks equal in a table is equal."""
        return None if self.mean is None else round(self.mean, _DECIMALS[unit])

    def figure(self, unit: Unit = "share") -> str:
        """Mean and standard deviation as text, or that it was not run."""
        if self.mean is None:
            return NOT_RUN
        return _spread(self.mean, None if unit == "place" else self.std, unit, _DECIMALS[unit])

    def text(self, unit: Unit = "share") -> str:
        """Mean, standard deviation and number of seeds.

        >>> Cell((0.784, 0.790, 0.796)).text(), Cell((0.79,)).text(), Cell((6.4,)).text("ms"), Cell(()).text()
        ('.790 ± .006 (3)', '.790 (1)', '6.40 (1)', 'not run')
        """
        return f"{self.figure(unit)} ({self.count})" if self.values and unit != "place" else self.figure(unit)


def printed_text(printed: Printed, unit: Unit = "share") -> str:
    """The paper's number with as many decimals as it prints.

    >>> printed_text(Printed(0.64, 0.008)), printed_text(Printed(0.9641, digits=4), "percent")
    ('.640 ± .008', '96.41%')
    """
    return _spread(printed.mean, printed.std, unit, printed.digits)


def number(value: float, unit: Unit = "share", decimals: int | None = None) -> str:
    """One number as text; `decimals` are those of the share where the unit is percent."""
    decimals = _DECIMALS[unit] if decimals is None else decimals
    value = round(value, decimals) + 0.0  # adding zero takes the sign off a negative zero
    if unit == "percent":
        return f"{100 * value:.{max(0, decimals - 2)}f}%"
    text = f"{value:.{decimals}f}"
    if unit == "share" and abs(value) < 1:
        return text.replace("0.", ".", 1)
    return text


def _spread(mean: float, std: float | None, unit: Unit, decimals: int) -> str:
    text = number(mean, unit, decimals)
    return text if std is None else f"{text} ± {number(std, unit, decimals).removesuffix('%')}"
