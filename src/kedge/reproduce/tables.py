"""Tables of our results beside the paper's: as Markdown, LaTeX, CSV and in the terminal."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import pandas as pd
from rich.markdown import Markdown

from kedge.errors import DataError
from kedge.io import atomic_write
from kedge.reproduce.paper import PaperValue, display

__all__ = ["DEVIATION", "MARKS", "Cell", "Column", "Rows", "Table", "format_value", "write_table"]

Unit = Literal["fraction", "percent", "ms", "times", "rank"]
"""How a number is written: .790, 79.00%, 6.40, 2.6 or 1."""
DECIMALS: dict[Unit, int] = {"fraction": 3, "percent": 4, "ms": 2, "times": 1, "rank": 0}
Verdict = Literal["above", "within", "below"]
MARKS: dict[Verdict, str] = {"above": "↑", "within": "=", "below": "↓"}

DEVIATION = "two standard deviations, ours and the paper's combined"
"""What `Cell.verdict` allows for."""

# An underscore after a letter or a digit opens no emphasis: names stay readable in the raw text.
_MARKDOWN = re.compile(r"[\\`*\[\]<>|~$&#]|(?<![^\W_])_")
# What would start a list or draw a line.
_MARKDOWN_OPENING = re.compile(r"^(?:(?=[-+](?:\s|$)|--)|(\d+)(?=[.)](?:\s|$)))")
_LATEX = str.maketrans(
    {sign: f"\\{sign}" for sign in "{}$&#%_"}
    # A star or a bracket after the end of a row would be taken for its argument.
    | {sign: f"{{{sign}}}" for sign in "*[]"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}
    | {"±": r"$\pm$", "–": "--", "↑": r"$\uparrow$", "↓": r"$\downarrow$"}
)


@dataclass(frozen=True)
class Cell:
    """The values of one metric, one per seed (none: it was not run), and the paper's value if it prints one."""

    values: tuple[float, ...]
    paper: PaperValue | None = None

    @property
    def mean(self) -> float | None:
        """The mean over seeds."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def std(self) -> float | None:
        """The sample standard deviation (n - 1); None for fewer than two seeds."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def verdict(self) -> Verdict | None:
        """Whether our mean lies within two standard deviations of the paper's; None without one or the other.

        The deviation is that of a difference: √(ours² + the paper's²), where one that is not known counts as 0. Our
        mean is first rounded to the printed decimals, so that without deviations ours is within if it would be printed
        as the same number.

        >>> Cell((0.6319,), PaperValue(0.622, 0.005)).verdict, Cell((0.9664,), PaperValue(0.967)).verdict
        ('within', 'below')
        >>> Cell((0.626, 0.646), PaperValue(0.622, 0.005)).verdict
        'within'
        """
        if self.mean is None or self.paper is None:
            return None
        # Whole units of the last printed digit: differences of decimals as floats would miss equality.
        scale = 10**self.paper.digits
        gap = round(round(self.mean, self.paper.digits) * scale) - round(self.paper.mean * scale)
        bound = 2 * scale * math.hypot(self.std or 0.0, self.paper.std or 0.0)
        return "within" if abs(gap) <= bound + 1e-6 else "above" if gap > 0 else "below"

    def text(self, unit: Unit = "fraction") -> str:
        """Mean and standard deviation, or that it was not run.

        >>> Cell((0.784, 0.790, 0.796)).text(), Cell((0.79,)).text(), Cell((6.4,)).text("ms"), Cell(()).text()
        ('.790 ± .006', '.790', '6.40', 'not run')
        """
        return "not run" if self.mean is None else format_value(self.mean, self.std, unit)


@dataclass(frozen=True)
class Column:
    """One metric of every row; `better` is None where no value is better than another."""

    title: str
    unit: Unit = "fraction"
    better: Literal["high", "low"] | None = "high"
    metric: str = ""
    """Where the values of a run have it: `brute_force.mAP`."""
    measure: str = "scores"
    """The measure whose values have it."""

    def verdict(self, cell: Cell | None) -> Verdict | None:
        """That of a cell of this column; milliseconds of another machine are not compared."""
        return None if cell is None or self.unit == "ms" else cell.verdict


Rows = dict[tuple[str, ...], tuple[Cell | None, ...]]
"""Cells by the labels of their row."""


@dataclass(frozen=True)
class Table:
    """Cells by row and column; rows are labelled from the widest label to the narrowest, by Kedge's names.

    A cell is None where none makes sense. Rows that share all but the last label are a group; only cells of one
    column within one group are compared with each other.
    """

    name: str
    title: str
    labels: tuple[str, ...]
    columns: tuple[Column, ...]
    rows: Rows
    notes: tuple[str, ...] = ()

    def ranks(self) -> Table:
        """Each row's rank in its group, column by column; ties share a rank, and what was not run has none.

        Ties are of numbers as they are shown. Columns in which nothing is better than anything else are left out.
        """
        ranks = self._scores().groupby(level=0).rank(method="min", ascending=False).to_numpy()
        ranked = [place for place, column in enumerate(self.columns) if column.better]
        rows = {
            labels: tuple(cells[at] and Cell(() if math.isnan(places[at]) else (float(places[at]),)) for at in ranked)
            for (labels, cells), places in zip(self.rows.items(), ranks, strict=True)
        }
        columns = tuple(Column(self.columns[place].title, "rank", None) for place in ranked)
        note = "Places in one column, among rows that differ in the last label only; ties share a place."
        return Table(f"{self.name}-places", f"{self.title}: places", self.labels, columns, rows, (note,))

    def markdown(self) -> str:
        """The table as GitHub shows it, with title, legend and notes."""
        heads, *body = self._texts("**{}**".format, for_markdown)
        rules = ["---"] * len(self.labels) + ["---:"] * (len(heads) - len(self.labels))
        drawn = "\n".join(f"| {' | '.join(line)} |" for line in (heads, rules, *body))
        notes = "\n".join(f"- {for_markdown(note)}" for note in self._notes())
        return f"### {for_markdown(self.title)}\n\n{drawn}\n" + (f"\n{notes}\n" if notes else "")

    def latex(self) -> str:
        """In landscape, over as many pages as it needs; the document must load the packages of its first lines."""
        heads, *body = self._texts(r"\textbf{{{}}}".format, for_latex)
        # Stacked heads widen no column.
        stacks = [r"\shortstack[r]{{{}}}".format(head.replace(", ", r",\\")) for head in heads]
        top = [r"\toprule", rf"{' & '.join(stacks)} \\", r"\midrule"]
        rows = []
        for (above, row), line in zip(pairwise([(), *self.rows]), body, strict=True):
            rows += [r"\addlinespace"] if above and above[:-1] != row[:-1] else []
            rows.append(rf"{' & '.join(line)} \\")
        lines = [
            *(rf"% \usepackage{{{package}}}" for package in ("booktabs", "longtable", "pdflscape")),
            *(r"\begin{landscape}", r"\scriptsize"),
            *(r"\setlength{\tabcolsep}{2pt}", r"\setlength{\LTcapwidth}{\linewidth}"),
            rf"\begin{{longtable}}{{{'l' * len(self.labels) + 'r' * (len(heads) - len(self.labels))}}}",
            *(rf"\caption{{{for_latex(self.title)}}}", rf"\label{{tab:{self.name}}}", r"\\"),
            *(*top, r"\endfirsthead", *top, r"\endhead", r"\bottomrule", r"\endfoot"),
            *(*rows, r"\end{longtable}"),
            *(rf"\par\smallskip{{\footnotesize\raggedright {for_latex(note)}\par}}" for note in self._notes()),
            r"\end{landscape}",
        ]
        return "\n".join(lines) + "\n"

    def csv(self) -> str:
        """A line for each cell, by Kedge's names and at full precision; what was not run has 0 seeds."""
        records = []
        for labels, column, cell in self.cells():
            paper = cell.paper or PaperValue(math.nan)
            values = (cell.mean, cell.std, len(cell.values), paper.mean, paper.std, column.verdict(cell))
            records.append((*labels, column.title, *values))
        names = ["column", "mean", "std", "seeds", "printed_mean", "printed_std", "verdict"]
        frame = pd.DataFrame(records, columns=[*self.labels, *names])
        return str(frame.to_csv(index=False, lineterminator="\n"))

    def __rich__(self) -> Markdown:
        return Markdown(self.markdown())

    def cells(self) -> Iterator[tuple[tuple[str, ...], Column, Cell]]:
        """Row by row every cell that makes sense, with the labels of its row and its column."""
        for labels, cells in self.rows.items():
            for column, cell in zip(self.columns, cells, strict=True):
                if cell is not None:
                    yield labels, column, cell

    def _scores(self) -> pd.DataFrame:
        """Means as they are shown, larger the better, by group; NaN for what was not run or is not compared."""

        def score(cell: Cell | None, column: Column) -> float:
            if cell is None or cell.mean is None or column.better is None:
                return math.nan
            value = round(cell.mean, DECIMALS[column.unit])
            return value if column.better == "high" else -value

        scores = [[*map(score, cells, self.columns)] for cells in self.rows.values()]
        groups = pd.Index(["\t".join(labels[:-1]) for labels in self.rows], dtype=object)
        return pd.DataFrame(scores, index=groups, columns=range(len(self.columns)), dtype=float)

    def _best(self) -> list[list[bool]]:
        """Which cells are the best of several in their column and group."""
        scores = self._scores()
        groups = scores.groupby(level=0)
        best: list[list[bool]] = ((scores == groups.transform("max")) & (groups.transform("count") > 1)).values.tolist()
        return best

    def _texts(self, bold: Callable[[str], str], escape: Callable[[str], str]) -> list[list[str]]:
        """The heads, and row by row the labels, blank where they repeat those above, and a text under every head.

        A column for which the paper prints something is followed by what it prints.
        """
        printed = {column for _, column, cell in self.cells() if cell.paper}
        heads = [head for column in self.columns for head in [column.title, "paper"][: 1 + (column in printed)]]
        texts = [[escape(head) for head in (*self.labels, *heads)]]
        for above, (labels, cells), best in zip([(), *self.rows], self.rows.items(), self._best(), strict=False):
            blank = [above[: depth + 1] == labels[: depth + 1] for depth in range(len(labels))]
            line = ["" if same else escape(display(label)) for label, same in zip(labels, blank, strict=True)]
            for column, cell, is_best in zip(self.columns, cells, best, strict=True):
                number = escape("–" if cell is None else cell.text(column.unit))
                count = f"({len(cell.values)})" if cell and cell.values and column.unit != "rank" else ""
                mark = escape(MARKS[verdict]) if (verdict := column.verdict(cell)) else ""
                line.append(" ".join(filter(None, (bold(number) if is_best else number, count, mark))))
                if column in printed:
                    paper = cell and cell.paper
                    line.append(escape(format_value(paper.mean, paper.std, column.unit, paper.digits)) if paper else "")
            texts.append(line)
        return texts

    def _notes(self) -> list[str]:
        """The legend of what occurs in the table, and its notes."""
        legend = []
        if any(cell.values and column.unit != "rank" for _, column, cell in self.cells()):
            legend.append("Mean ± standard deviation (seeds).")
        if any(map(any, self._best())):
            group = f" among rows that differ in {self.labels[-1]} only" if len(self.labels) > 1 else ""
            legend.append(f"Bold: the best of a column{group}.")
        if any(column.verdict(cell) for _, column, cell in self.cells()):
            meaning = ", ".join(f"{mark} {verdict}" for verdict, mark in MARKS.items())
            legend.append(f"{meaning} the paper's mean ± {DEVIATION}.")
        return [*([" ".join(legend)] if legend else []), *self.notes]


def write_table(table: Table, folder: Path) -> list[Path]:
    """Write NAME.md, NAME.tex and NAME.csv, each all or nothing; their paths."""
    contents = {"md": table.markdown(), "tex": table.latex(), "csv": table.csv()}
    paths = {folder / f"{table.name}.{suffix}": content for suffix, content in contents.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in paths.items():
            with atomic_write(path) as stream:
                stream.write(content.encode())
    except OSError as error:
        raise DataError(f"Table {table.name} cannot be written to {folder}: {error.strerror}.") from error
    return list(paths)


def format_value(mean: float, std: float | None, unit: Unit = "fraction", decimals: int | None = None) -> str:
    """Mean ± standard deviation; `decimals` are those of the fraction where the unit is percent.

    >>> format_value(0.64, 0.008), format_value(0.9641, None, "percent")
    ('.640 ± .008', '96.41%')
    """
    decimals = DECIMALS[unit] if decimals is None else decimals

    def number(value: float) -> str:
        value = round(value, decimals) + 0.0  # adding zero takes the sign off a negative zero
        if unit == "percent":
            return f"{100 * value:.{max(0, decimals - 2)}f}"
        text = f"{value:.{decimals}f}"
        return text.replace("0.", ".", 1) if unit == "fraction" and abs(value) < 1 else text

    sign = "%" if unit == "percent" else ""
    return number(mean) + sign + ("" if std is None else f" ± {number(std)}")


def for_markdown(text: str) -> str:
    """The text on one line, so that Markdown shows it as it is, also in a table.

    >>> print(for_markdown("a|b tiny_imagenet 2*3"))
    a\\|b tiny_imagenet 2\\*3
    """
    line = _MARKDOWN.sub(lambda match: "\\" + match[0], " ".join(text.split()))
    return _MARKDOWN_OPENING.sub(lambda match: (match[1] or "") + "\\", line)


def for_latex(text: str) -> str:
    """The text on one line, so that LaTeX sets it as it is, with no package but what it always loads.

    >>> print(for_latex("50% of tiny_imagenet"))
    50\\% of tiny\\_imagenet
    """
    return " ".join(text.split()).translate(_LATEX)
