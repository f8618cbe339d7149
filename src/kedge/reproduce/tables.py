"""Tables of our results beside the paper's: as Markdown, LaTeX, CSV and in the terminal."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from textwrap import wrap
from typing import Literal

import pandas as pd
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape as for_rich
from rich.table import Table as RichTable
from rich.text import Text

from kedge.errors import ConfigError, DataError
from kedge.io import atomic_write
from kedge.reproduce.latex import for_latex, typeset
from kedge.reproduce.names import display
from kedge.reproduce.paper import PaperValue

__all__ = ["Cell", "Column", "Table", "Unit", "Verdict", "for_markdown", "format_value", "write_table"]

Unit = Literal["fraction", "percent", "ms", "rank"]
"""How a number is written: .790, 79.00%, 6.40 or 1."""
Verdict = Literal["above", "within", "below"]

NOT_RUN = "not run"
NOT_APPLICABLE = "–"
MARKS: dict[Verdict, str] = {"above": "↑", "within": "=", "below": "↓"}
_DECIMALS: dict[Unit, int] = {"fraction": 3, "percent": 4, "ms": 2, "rank": 0}
# An underscore after a letter or a digit opens no emphasis: names stay readable in the raw text.
_MARKDOWN = re.compile(r"[\\`*\[\]<>|~$&#]|(?<![^\W_])_")
# What would start a list or draw a line.
_MARKDOWN_OPENING = re.compile(r"^(?:(?=[-+](?:\s|$)|--)|(\d+)(?=[.)](?:\s|$)))")


@dataclass(frozen=True)
class Cell:
    """The values of one metric, one per seed (none: it was not run), and the paper's value if it prints one."""

    values: tuple[float, ...]
    paper: PaperValue | None = None

    def __post_init__(self) -> None:
        for value in self.values:
            if not math.isfinite(value):
                raise DataError(f"A cell of a table holds the value {value}; leave out runs that measured no number.")

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
        """Our mean against the paper's mean ± two standard deviations; None without one or the other.

        Our mean is first rounded to the printed decimals. So where the paper prints no deviation, as in its ablation,
        or one of .000, ours is within if it would be printed as the same number.

        >>> Cell((0.6319,), PaperValue(0.622, 0.005)).verdict, Cell((0.9664,), PaperValue(0.967)).verdict
        ('within', 'below')
        """
        if self.mean is None or self.paper is None:
            return None
        # Whole units of the last printed digit: differences of decimals as floats would miss equality.
        scale = 10**self.paper.digits
        gap = round(round(self.mean, self.paper.digits) * scale) - round(self.paper.mean * scale)
        bound = 2 * round((self.paper.std or 0.0) * scale)
        return "within" if abs(gap) <= bound else "above" if gap > 0 else "below"

    def text(self, unit: Unit = "fraction") -> str:
        """Mean and standard deviation, or that it was not run.

        >>> Cell((0.784, 0.790, 0.796)).text(), Cell((0.79,)).text(), Cell((6.4,)).text("ms"), Cell(()).text()
        ('.790 ± .006', '.790', '6.40', 'not run')
        """
        return NOT_RUN if self.mean is None else format_value(self.mean, self.std, unit)


@dataclass(frozen=True)
class Column:
    """One metric of every row; `better` is None where no value is better than another."""

    title: str
    unit: Unit = "fraction"
    better: Literal["high", "low"] | None = "high"


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
    rows: dict[tuple[str, ...], tuple[Cell | None, ...]]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.-]*", self.name, re.ASCII):
            raise ConfigError(f"A table cannot be named {self.name!r}; use letters, digits, dots and dashes.")
        for row, cells in self.rows.items():
            if (len(row), len(cells)) != (len(self.labels), len(self.columns)):
                shape = f"{len(self.labels)} labels and {len(self.columns)} cells"
                raise ConfigError(f"The row {' '.join(row)} of table {self.name} does not fit; give it {shape}.")

    def ranks(self) -> Table:
        """Each row's rank in its group, column by column; ties share a rank, and what was not run has none.

        Ties are of numbers as they are shown. Columns in which nothing is better than anything else are left out.
        """
        ranks = self._scores().groupby(self._groups()).rank(method="min", ascending=False)
        ranked = [place for place, column in enumerate(self.columns) if column.better]

        def cell(row: int, place: int) -> Cell | None:
            rank = float(ranks.iloc[row, place])
            missing = list(self.rows.values())[row][place] is None
            return None if missing else Cell(() if math.isnan(rank) else (rank,))

        return Table(
            f"{self.name}-places",
            f"{self.title}: places",
            self.labels,
            tuple(Column(self.columns[place].title, "rank", None) for place in ranked),
            {labels: tuple(cell(row, place) for place in ranked) for row, labels in enumerate(self.rows)},
            ("Places in one column, among rows that differ in the last label only; ties share a place.",),
        )

    def markdown(self) -> str:
        """The table as GitHub shows it, with title, legend and notes."""
        heads = [for_markdown(head) for head in (*self.labels, *self._heads())]
        rules = ["---"] * len(self.labels) + ["---:"] * (len(heads) - len(self.labels))
        body = [
            [*map(for_markdown, labels), *cells]
            for labels, cells in self._shown(lambda text: f"**{text}**", lambda text: text)
        ]
        drawn = "\n".join(f"| {' | '.join(line)} |" for line in (heads, rules, *body))
        notes = "\n".join(f"- {for_markdown(note)}" for note in self._notes())
        return f"### {for_markdown(self.title)}\n\n{drawn}\n" + (f"\n{notes}\n" if notes else "")

    def latex(self) -> str:
        """The table for a document that loads the packages named in its first lines; it fits a page of an article.

        Where all cells have as many seeds, their number stands below the table and not in each cell.
        """
        counts = {len(cell.values) for _, cell in self._cells() if cell.values}
        seeds = counts.pop() if len(counts) == 1 else None
        shown = self._shown(lambda text: rf"\textbf{{{text}}}", for_latex, counted=seeds is None)
        rows = [[*map(for_latex, labels), *cells] for labels, cells in shown]
        rules = [""]
        for above, row in pairwise(self.rows):
            same = above[:-1] == row[:-1]
            rules.append("" if same else r"\addlinespace" if above[0] == row[0] else r"\midrule")
        heads = [*self.labels, *self._heads()]
        align = "l" * len(self.labels) + "r" * (len(heads) - len(self.labels))
        return typeset(self.name, self.title, heads, align, list(zip(rules, rows, strict=False)), self._notes(seeds))

    def csv(self) -> str:
        """A line for each cell, by Kedge's names and at full precision; what was not run has 0 seeds."""
        records = []
        for labels, cells in self.rows.items():
            for column, cell in zip(self.columns, cells, strict=True):
                if cell is not None:
                    paper = cell.paper or PaperValue(math.nan)
                    values = (cell.mean, cell.std, len(cell.values), paper.mean, paper.std, cell.verdict)
                    records.append((*labels, column.title, *values))
        names = ["column", "mean", "std", "seeds", "printed_mean", "printed_std", "verdict"]
        frame = pd.DataFrame(records, columns=[*self.labels, *names])
        return str(frame.to_csv(index=False, lineterminator="\n"))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """In the terminal; columns for which there is no room follow below, under the same labels."""
        heads = list(self._heads())
        lines = [
            ([Text(label) for label in labels], [Text.from_markup(cell) for cell in cells])
            for labels, cells in self._shown(lambda text: f"[bold]{text}[/bold]", for_rich)
        ]
        widths = [max([cells[place].cell_len for _, cells in lines], default=1) for place in range(len(heads))]
        # Long heads are wrapped, so that they widen no column.
        wrapped = [
            "\n".join(wrap(head, max(4, room), break_long_words=False))
            for head, room in zip(heads, widths, strict=True)
        ]
        widths = [max(width, *map(len, head.split("\n"))) for width, head in zip(widths, wrapped, strict=True)]
        label_widths = [
            max(len(name), *(labels[place].cell_len for labels, _ in lines), 0)
            for place, name in enumerate(self.labels)
        ]
        yield Text(self.title, style="table.title")
        for places in _fitting(widths, options.max_width - sum(width + 2 for width in label_widths)):
            drawn = RichTable(box=box.SIMPLE_HEAD)
            for name in self.labels:
                drawn.add_column(Text(name), overflow="fold")
            for place in places:
                drawn.add_column(Text(wrapped[place]), justify="right", overflow="fold")
            above: tuple[str, ...] = ()
            for (labels, cells), row in zip(lines, self.rows, strict=True):
                if above and above[:-1] != row[:-1]:
                    drawn.add_section()
                drawn.add_row(*labels, *(cells[place] for place in places))
                above = row
            yield drawn
        for note in self._notes():
            yield Text(note, style="table.caption")

    # ------------------------------------------------------------------ what the formats share

    def _cells(self) -> Iterator[tuple[Column, Cell]]:
        for cells in self.rows.values():
            for column, cell in zip(self.columns, cells, strict=True):
                if cell is not None:
                    yield column, cell

    def _groups(self) -> pd.Series:
        """The group of each row."""
        numbers = {labels: number for number, labels in enumerate(dict.fromkeys(row[:-1] for row in self.rows))}
        return pd.Series([numbers[row[:-1]] for row in self.rows], dtype=int)

    def _scores(self) -> pd.DataFrame:
        """Means as they are shown, larger the better; NaN for what was not run or is not compared."""

        def score(cell: Cell | None, column: Column) -> float:
            if cell is None or cell.mean is None or column.better is None:
                return math.nan
            value = round(cell.mean, _DECIMALS[column.unit])
            return value if column.better == "high" else -value

        pairs = [zip(cells, self.columns, strict=True) for cells in self.rows.values()]
        return pd.DataFrame([[score(*pair) for pair in row] for row in pairs], columns=range(len(self.columns)))

    def _best(self) -> list[list[bool]]:
        """Which cells are the best of several in their column and group."""
        scores = self._scores()
        groups = scores.groupby(self._groups())
        best: list[list[bool]] = ((scores == groups.transform("max")) & (groups.transform("count") > 1)).values.tolist()
        return best

    def _in_paper(self) -> list[bool]:
        """Which columns have a value of the paper's."""
        cells = [[row[place] for row in self.rows.values()] for place in range(len(self.columns))]
        return [any(cell is not None and cell.paper for cell in column) for column in cells]

    def _heads(self) -> Iterator[str]:
        """The heads over the numbers: of each column ours and, where it has any, the paper's."""
        for column, in_paper in zip(self.columns, self._in_paper(), strict=True):
            yield from (column.title, "paper") if in_paper else (column.title,)

    def _shown(
        self, bold: Callable[[str], str], escape: Callable[[str], str], *, counted: bool = True
    ) -> Iterator[tuple[list[str], list[str]]]:
        """Row by row the labels, blank where they repeat those above, and the text under every head."""
        above: tuple[str, ...] = ()
        for (labels, cells), best in zip(self.rows.items(), self._best(), strict=True):
            texts: list[str] = []
            for column, cell, is_best, in_paper in zip(self.columns, cells, best, self._in_paper(), strict=True):
                if cell is None:
                    texts.append(escape(NOT_APPLICABLE))
                else:
                    figure = escape(cell.text(column.unit))
                    count = f"({len(cell.values)})" if cell.values and column.unit != "rank" and counted else ""
                    mark = escape(MARKS[cell.verdict]) if cell.verdict else ""
                    texts.append(" ".join(filter(None, (bold(figure) if is_best else figure, count, mark))))
                if in_paper:
                    paper = cell.paper if cell is not None else None
                    texts.append(escape(_paper_text(paper, column.unit)) if paper else "")
            blank = [above[: depth + 1] == labels[: depth + 1] for depth in range(len(labels))]
            yield ["" if same else display(label) for label, same in zip(labels, blank, strict=True)], texts
            above = labels

    def _notes(self, seeds: int | None = None) -> list[str]:
        """The legend of what occurs in the table, and its notes; `seeds` where no cell says how many it has."""
        legend = []
        if any(cell.values and column.unit != "rank" for column, cell in self._cells()):
            over = "(seeds)" if seeds is None else f"over {seeds} seeds"
            legend.append("One seed." if seeds == 1 else f"Mean ± standard deviation {over}.")
        if any(map(any, self._best())):
            group = f" among rows that differ in {self.labels[-1]} only" if len(self.labels) > 1 else ""
            legend.append(f"Bold: the best of a column{group}.")
        if judged := [cell.paper for _, cell in self._cells() if cell.paper and cell.verdict]:
            meaning = ", ".join(f"{mark} {verdict}" for verdict, mark in MARKS.items())
            text = f"{meaning} the paper's mean ± two of its standard deviations"
            exact = (
                " (where it prints none: its number as printed)" if any(value.std is None for value in judged) else ""
            )
            legend.append(f"{text}{exact}.")
        return ([" ".join(legend)] if legend else []) + list(self.notes)


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
    decimals = _DECIMALS[unit] if decimals is None else decimals

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


def _paper_text(value: PaperValue, unit: Unit) -> str:
    return format_value(value.mean, value.std, unit, value.digits)


def _fitting(widths: Sequence[int], room: int) -> Iterator[list[int]]:
    """Columns in turns, as many at a time as there is room for."""
    turn: list[int] = []
    for place, width in enumerate(widths):
        if turn and sum(widths[column] + 2 for column in turn) + width + 2 > room:
            yield turn
            turn = []
        turn.append(place)
    yield turn
