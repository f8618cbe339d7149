"""Tables of our figures beside the printed ones: Markdown, LaTeX, CSV and the terminal."""

from __future__ import annotations

import csv as csv_format
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from textwrap import wrap
from typing import Literal

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from kedge.errors import ConfigError, DataError
from kedge.io import atomic_write
from kedge.reproduce.cells import Cell, Unit, Verdict, printed_text
from kedge.reproduce.escaping import for_latex, for_markdown
from kedge.reproduce.latex import typeset
from kedge.reproduce.names import display

__all__ = ["Column", "Row", "Table", "csv", "latex", "markdown", "ranks", "show", "write"]

SENSELESS = "–"
PAPER = "paper"
MARKS: dict[Verdict, str] = {"above": "↑", "within": "=", "below": "↓"}
_LATEX_MARKS: dict[Verdict, str] = {"above": r"$\uparrow$", "within": "$=$", "below": r"$\downarrow$"}


@dataclass(frozen=True)
class Column:
    """One figure of every row; `better` is None where no value is better than another."""

    title: str
    unit: Unit = "share"
    better: Literal["high", "low"] | None = "high"


@dataclass(frozen=True)
class Row:
    """Labels from the widest to the narrowest, by Kedge's names, and a cell per column, None where none makes sense."""

    labels: tuple[str, ...]
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True)
class Table:
    """Rows under columns; `stub` heads the labels. Rows that share all but the last label are a group.

    Only the cells of one column within one group are compared with each other.
    """

    name: str
    title: str
    stub: tuple[str, ...]
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.-]*", self.name, re.ASCII):
            raise ConfigError(f"A table cannot be named {self.name!r}; use letters, digits, dots and dashes.")
        titles = [column.title for column in self.columns]
        if not self.stub or not titles or len(set(titles)) < len(titles):
            raise ConfigError(f"Table {self.name} needs a stub and columns of different titles; it has {titles}.")
        if len({row.labels for row in self.rows}) < len(self.rows):
            raise ConfigError(f"Table {self.name} has rows with the same labels; make each row's labels its own.")
        for row in self.rows:
            if len(row.labels) != len(self.stub) or len(row.cells) != len(titles):
                shape = f"{len(self.stub)} labels and {len(titles)} cells"
                raise ConfigError(f"The row {' '.join(row.labels)} of table {self.name} does not fit; give it {shape}.")

    def __rich__(self) -> RenderableType:
        return show(self)


def ranks(table: Table) -> Table:
    """Each row's place in its group, column by column; ties share a place, and what was not run has none.

    Ties are of numbers as they are shown. Columns in which nothing is better than anything else are left out.
    """
    ranked = [(position, column) for position, column in enumerate(table.columns) if column.better]
    if not ranked:
        raise ConfigError(f"Table {table.name} has no column in which high or low is better; there is nothing to rank.")
    places: list[list[Cell | None]] = [[] for _ in table.rows]
    for position, column in ranked:
        for place, row, rivals in zip(places, table.rows, _rivals(table, position), strict=True):
            cell = row.cells[position]
            mine = _merit(cell, column)
            if cell is None or mine is None:
                place.append(None if cell is None else Cell(()))
            else:
                place.append(Cell((1 + sum(merit > mine for merit in rivals),)))
    return Table(
        f"{table.name}-places",
        f"{table.title}: places",
        table.stub,
        tuple(Column(column.title, "place", None) for _, column in ranked),
        tuple(Row(row.labels, tuple(cells)) for row, cells in zip(table.rows, places, strict=True)),
        ("Places in one column, among rows that differ in the last label only; ties share a place.",),
    )


def markdown(table: Table) -> str:
    """The table as GitHub shows it, with title, legend and notes."""
    heads = [*map(for_markdown, table.stub), *map(for_markdown, _heads(table))]
    rules = ["---"] * len(table.stub) + ["---:"] * (len(heads) - len(table.stub))
    lines = [heads, rules]
    for labels, shown in _lines(table):
        lines.append([*map(for_markdown, labels), *map(_in_markdown, shown)])
    drawn = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    below = "\n".join(f"- {for_markdown(note)}" for note in _below(table))
    return f"### {for_markdown(table.title)}\n\n{drawn}\n" + (f"\n{below}\n" if below else "")


def latex(table: Table) -> str:
    """The table for a document that loads the packages named in its first lines; it fits a page of an article.

    Where all cells have as many seeds, their number stands below the table and not in each cell.
    """
    seeds = _same_count(table)
    heads = [*table.stub, *_heads(table)]
    rows = [
        (rule, [*map(for_latex, labels), *(_in_latex(one, counted=seeds is None) for one in shown)])
        for (labels, shown), rule in zip(_lines(table), _rules(table), strict=True)
    ]
    align = "l" * len(table.stub) + "r" * (len(heads) - len(table.stub))
    return typeset(table.name, table.title, heads, align, rows, _below(table, seeds))


def csv(table: Table) -> str:
    """A line for each cell that makes sense, by Kedge's names and at full precision; what was not run has 0 seeds."""
    stream = io.StringIO()
    writer = csv_format.writer(stream, lineterminator="\n")
    writer.writerow([*table.stub, "column", "mean", "std", "seeds", "printed_mean", "printed_std", "verdict"])
    for row in table.rows:
        for column, cell in zip(table.columns, row.cells, strict=True):
            if cell is not None:
                printed = (cell.printed.mean, cell.printed.std) if cell.printed else (None, None)
                figures = (cell.mean, cell.std, cell.count, *printed, cell.verdict)
                writer.writerow([*row.labels, column.title, *figures])
    return stream.getvalue()


def show(table: Table) -> RenderableType:
    """The table for a terminal; where it is too wide, columns follow below under the same labels."""
    return _Screen(table)


def write(table: Table, folder: str | Path) -> list[Path]:
    """Write NAME.md, NAME.tex and NAME.csv, each all or nothing; their paths."""
    folder = Path(folder)
    contents = {"md": markdown(table), "tex": latex(table), "csv": csv(table)}
    paths = {folder / f"{table.name}.{ending}": content for ending, content in contents.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in paths.items():
            with atomic_write(path) as stream:
                stream.write(content.encode())
    except OSError as error:
        raise DataError(f"Table {table.name} cannot be written to {folder}: {error.strerror}.") from error
    return list(paths)


@dataclass(frozen=True)
class _Screen:
    """As many columns side by side as there is room for, then the next."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.table.title, style="table.title")
        side: list[int] = []
        for position in _all_of(self.table):
            wider = self._draw([*side, position])
            if side and Measurement.get(console, options.update(width=1_000_000), wider).maximum > options.max_width:
                yield self._draw(side)
                side = []
            side.append(position)
        yield self._draw(side)
        for note in _below(self.table):
            yield Text(note, style="table.caption")

    def _draw(self, positions: list[int]) -> RichTable:
        drawn = RichTable(box=box.SIMPLE_HEAD)
        for name in self.table.stub:
            drawn.add_column(Text(name), overflow="fold")
        lines = [(labels, list(map(_in_terminal, shown))) for labels, shown in _lines(self.table, positions)]
        for place, head in enumerate(_heads(self.table, positions)):
            room = max([shown[place].cell_len for _, shown in lines] + [len(word) for word in head.split()], default=1)
            # Broken here, because a long head would otherwise widen its column.
            drawn.add_column(Text("\n".join(wrap(head, room))), justify="right", overflow="fold")
        for (labels, shown), rule in zip(lines, _rules(self.table), strict=True):
            if rule:
                drawn.add_section()
            drawn.add_row(*map(Text, labels), *shown)
        return drawn


@dataclass(frozen=True)
class _Shown:
    """A cell as every form shows it: the figure, perhaps bold, what follows it, and the mark of the verdict."""

    figure: str = ""
    bold: bool = False
    tail: str = ""
    verdict: Verdict | None = None


def _heads(table: Table, positions: Iterable[int] | None = None) -> Iterator[str]:
    """The heads over the figures: of each column ours and, where it has any, the paper's."""
    for position in _all_of(table) if positions is None else positions:
        title = table.columns[position].title
        yield from (title, PAPER) if _is_printed(table, position) else (title,)


def _all_of(table: Table) -> range:
    return range(len(table.columns))


def _is_printed(table: Table, position: int) -> bool:
    return any(cell is not None and cell.printed is not None for cell in _column(table, position))


def _column(table: Table, position: int) -> list[Cell | None]:
    return [row.cells[position] for row in table.rows]


def _lines(table: Table, positions: Iterable[int] | None = None) -> Iterator[tuple[list[str], list[_Shown]]]:
    """Row by row the labels, blank where they repeat those above, and what is shown under every head."""
    columns = [_shown_column(table, position) for position in (_all_of(table) if positions is None else positions)]
    above: tuple[str, ...] = ()
    for number, row in enumerate(table.rows):
        labels = [
            "" if above[: depth + 1] == row.labels[: depth + 1] else display(label)
            for depth, label in enumerate(row.labels)
        ]
        yield labels, [shown for column in columns for shown in column[number]]
        above = row.labels


def _shown_column(table: Table, position: int) -> list[list[_Shown]]:
    """Of each row our cell and, where the column has any, the paper's."""
    column = table.columns[position]
    printed = _is_printed(table, position)
    shown = []
    for cell, rivals in zip(_column(table, position), _rivals(table, position), strict=True):
        mine = _merit(cell, column)
        if cell is None:
            ours = _Shown(SENSELESS)
        else:
            figure = cell.figure(column.unit)
            bold = mine is not None and len(rivals) > 1 and mine == max(rivals)
            ours = _Shown(figure, bold, cell.text(column.unit).removeprefix(figure).strip(), cell.verdict)
        theirs = printed_text(cell.printed, column.unit) if cell and cell.printed else ""
        shown.append([ours, _Shown(theirs)] if printed else [ours])
    return shown


def _rivals(table: Table, position: int) -> list[Sequence[float]]:
    """For each row the merits in one column of its group, its own among them; only of cells that ran."""
    groups: dict[tuple[str, ...], list[float]] = {}
    for row in table.rows:
        group = groups.setdefault(row.labels[:-1], [])
        merit = _merit(row.cells[position], table.columns[position])
        if merit is not None:
            group.append(merit)
    return [groups[row.labels[:-1]] for row in table.rows]


def _merit(cell: Cell | None, column: Column) -> float | None:
    """What is larger the better; None for what was not run or is not compared."""
    value = cell.rounded(column.unit) if cell is not None else None
    if value is None or column.better is None:
        return None
    return value if column.better == "high" else -value


def _rules(table: Table) -> Iterator[str]:
    """What LaTeX draws before each row: a rule where the widest label changes, a gap between other groups."""
    if table.rows:
        yield ""
    for above, row in pairwise(table.rows):
        same = above.labels[:-1] == row.labels[:-1]
        yield "" if same else r"\addlinespace" if above.labels[0] == row.labels[0] else r"\midrule"


def _same_count(table: Table) -> int | None:
    """How many seeds all cells have that ran; None where that differs."""
    counts = {cell.count for row in table.rows for cell in row.cells if cell is not None and cell.values}
    return counts.pop() if len(counts) == 1 else None


def _below(table: Table, seeds: int | None = None) -> list[str]:
    """The legend of what occurs in the table, and its notes; `seeds` where no cell says how many it has."""
    cells = [(column, cell) for row in table.rows for column, cell in zip(table.columns, row.cells, strict=True)]
    judged = [cell for _, cell in cells if cell is not None and cell.verdict]
    shown = [one for _, line in _lines(table) for one in line]
    legend = []
    if any(cell is not None and cell.values and column.unit != "place" for column, cell in cells):
        over = "(seeds)" if seeds is None else f"over {seeds} seeds"
        legend.append("One seed." if seeds == 1 else f"Mean ± standard deviation {over}.")
    if any(one.bold for one in shown):
        group = f" among rows that differ in {table.stub[-1]} only" if len(table.stub) > 1 else ""
        legend.append(f"Bold: the best of a column{group}.")
    if judged:
        meaning = ", ".join(f"{mark} {verdict}" for verdict, mark in MARKS.items())
        text = f"{meaning} the paper's mean ± two of its standard deviations"
        if any(cell.printed is not None and cell.printed.std is None for cell in judged):
            text += " (where it prints none: its number as printed)"
        legend.append(f"{text}.")
    return ([" ".join(legend)] if legend else []) + list(table.notes)


def _in_markdown(shown: _Shown) -> str:
    return _joined(f"**{shown.figure}**" if shown.bold else shown.figure, shown, MARKS)


def _in_latex(shown: _Shown, *, counted: bool) -> str:
    figure = for_latex(shown.figure)
    told = shown if counted else replace(shown, tail="")
    return _joined(rf"\textbf{{{figure}}}" if shown.bold else figure, told, _LATEX_MARKS)


def _in_terminal(shown: _Shown) -> Text:
    text = Text(_joined(shown.figure, shown, MARKS))
    if shown.bold:
        text.stylize("bold", 0, len(shown.figure))
    return text


def _joined(figure: str, shown: _Shown, marks: Mapping[Verdict, str]) -> str:
    return " ".join(filter(None, (figure, shown.tail, marks[shown.verdict] if shown.verdict else "")))
