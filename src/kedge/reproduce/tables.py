"""Tables of our results beside the paper's: as Markdown, LaTeX, CSV and in the terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pandas as pd
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape as for_rich
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from kedge.errors import DataError
from kedge.io import atomic_write
from kedge.reproduce.paper import PaperValue, display
from kedge.reproduce.results import DECIMALS, Cell, Column, Verdict, format_value

__all__ = ["MARKS", "Rows", "Table", "for_latex", "for_markdown", "write_table"]

Rows = dict[tuple[str, ...], tuple[Cell | None, ...]]
"""Cells by the labels of their row."""

MARKS: dict[Verdict, str] = {"above": "↑", "within": "=", "below": "↓"}
_LONG = 50
"""Rows that fit on a page."""
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
        ranks = self._scores().groupby(self._groups()).rank(method="min", ascending=False).to_numpy()
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
        heads = [for_markdown(head) for head in (*self.labels, *self._heads())]
        rules = ["---"] * len(self.labels) + ["---:"] * (len(heads) - len(self.labels))
        texts = self._texts(lambda text: f"**{text}**", lambda text: text)
        body = [[*map(for_markdown, labels), *cells] for labels, cells in texts]
        drawn = "\n".join(f"| {' | '.join(line)} |" for line in (heads, rules, *body))
        notes = "\n".join(f"- {for_markdown(note)}" for note in self._notes())
        return f"### {for_markdown(self.title)}\n\n{drawn}\n" + (f"\n{notes}\n" if notes else "")

    def latex(self) -> str:
        """The table for a document that loads the packages named in its first lines.

        It is scaled to its page or, where it has more rows than fit on one, goes over several in landscape.
        """
        heads = [for_latex(head).replace(", ", r",\\") for head in (*self.labels, *self._heads())]
        stacks = [rf"\shortstack[r]{{{head}}}" for head in heads]  # long heads widen no column
        top = [r"\toprule", rf"{' & '.join(stacks)} \\", r"\midrule"]
        body = []
        texts = self._texts(r"\textbf{{{}}}".format, for_latex)
        for (above, row), (labels, cells) in zip(pairwise([(), *self.rows]), texts, strict=True):
            if above and above[:-1] != row[:-1]:
                body.append(r"\addlinespace" if above[0] == row[0] else r"\midrule")
            body.append(rf"{' & '.join([*map(for_latex, labels), *cells])} \\")
        caption = [rf"\caption{{{for_latex(self.title)}}}", rf"\label{{tab:{self.name}}}"]
        notes = [rf"\par\smallskip{{\footnotesize\raggedright {for_latex(note)}\par}}" for note in self._notes()]
        align = "l" * len(self.labels) + "r" * (len(heads) - len(self.labels))
        if len(self.rows) > _LONG:
            packages = ["booktabs", "longtable", "pdflscape"]
            first = [*caption, r"\\", *top, r"\endfirsthead", *top, r"\endhead", r"\bottomrule", r"\endfoot"]
            table = [rf"\begin{{longtable}}{{{align}}}", *first, *body, r"\end{longtable}"]
            setup = [r"\scriptsize", r"\setlength{\tabcolsep}{2pt}", r"\setlength{\LTcapwidth}{\linewidth}"]
            drawn = [r"\begin{landscape}", *setup, *table, *notes, r"\end{landscape}"]
        else:
            packages = ["booktabs", "adjustbox"]
            table = [rf"\begin{{tabular}}{{{align}}}", *top, *body, r"\bottomrule", r"\end{tabular}"]
            scaled = r"\begin{adjustbox}{max width=\linewidth, max totalheight=0.8\textheight}"
            boxed = [scaled, *table, r"\end{adjustbox}"]
            drawn = [r"\begin{table}", r"\centering", *caption, r"\par\smallskip", *boxed, *notes, r"\end{table}"]
        return "\n".join([*(rf"% \usepackage{{{package}}}" for package in packages), *drawn]) + "\n"

    def csv(self) -> str:
        """A line for each cell, by Kedge's names and at full precision; what was not run has 0 seeds."""
        records = []
        for labels, column, cell in self.cells():
            paper = cell.paper or PaperValue(math.nan)
            values = (cell.mean, cell.std, len(cell.values), paper.mean, paper.std, cell.verdict)
            records.append((*labels, column.title, *values))
        names = ["column", "mean", "std", "seeds", "printed_mean", "printed_std", "verdict"]
        frame = pd.DataFrame(records, columns=[*self.labels, *names])
        return str(frame.to_csv(index=False, lineterminator="\n"))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """In the terminal; columns for which there is no room follow below, under the same labels."""
        heads = [head.replace(", ", ",\n") for head in self._heads()]
        lines = list(self._texts("[bold]{}[/bold]".format, for_rich))

        def draw(places: list[int]) -> RichTable:
            table = RichTable(*self.labels, box=box.SIMPLE_HEAD)
            for place in places:
                table.add_column(Text(heads[place]), justify="right")
            for labels, cells in lines:
                table.add_row(*map(Text, labels), *(cells[place] for place in places))
            return table

        blocks: list[list[int]] = [[]]
        for place in range(len(heads)):
            width = Measurement.get(console, options.update(width=10_000), draw([*blocks[-1], place])).maximum
            if blocks[-1] and width > options.max_width:
                blocks.append([])
            blocks[-1].append(place)
        yield Text(self.title, style="table.title")
        yield from map(draw, blocks)
        yield from (Text(note, style="table.caption") for note in self._notes())

    # ------------------------------------------------------------------ what the formats share

    def cells(self) -> Iterator[tuple[tuple[str, ...], Column, Cell]]:
        """Row by row every cell that makes sense, with the labels of its row and its column."""
        for labels, cells in self.rows.items():
            for column, cell in zip(self.columns, cells, strict=True):
                if cell is not None:
                    yield labels, column, cell

    def _groups(self) -> pd.Series:
        """The group of each row."""
        return pd.Series(pd.factorize(pd.Series([row[:-1] for row in self.rows], dtype=object))[0], dtype=int)

    def _scores(self) -> pd.DataFrame:
        """Means as they are shown, larger the better; NaN for what was not run or is not compared."""

        def score(cell: Cell | None, column: Column) -> float:
            if cell is None or cell.mean is None or column.better is None:
                return math.nan
            value = round(cell.mean, DECIMALS[column.unit])
            return value if column.better == "high" else -value

        scores = [[*map(score, cells, self.columns)] for cells in self.rows.values()]
        return pd.DataFrame(scores, columns=range(len(self.columns)))

    def _best(self) -> list[list[bool]]:
        """Which cells are the best of several in their column and group."""
        scores = self._scores()
        groups = scores.groupby(self._groups())
        best: list[list[bool]] = ((scores == groups.transform("max")) & (groups.transform("count") > 1)).values.tolist()
        return best

    def _in_paper(self) -> list[bool]:
        """Which columns have a value of the paper's."""
        printed = {column for _, column, cell in self.cells() if cell.paper}
        return [column in printed for column in self.columns]

    def _heads(self) -> list[str]:
        """The heads over the numbers: of each column ours and, where it has any, the paper's."""
        pairs = zip(self.columns, self._in_paper(), strict=True)
        return [
            head for column, in_paper in pairs for head in ((column.title, "paper") if in_paper else [column.title])
        ]

    def _texts(self, bold: Callable[[str], str], escape: Callable[[str], str]) -> Iterator[tuple[list[str], list[str]]]:
        """Row by row the labels, blank where they repeat those above, and the text under every head."""
        above: tuple[str, ...] = ()
        for (labels, cells), best in zip(self.rows.items(), self._best(), strict=True):
            texts: list[str] = []
            for column, cell, is_best, in_paper in zip(self.columns, cells, best, self._in_paper(), strict=True):
                if cell is None:
                    texts.append(escape("–"))
                else:
                    number = escape(cell.text(column.unit))
                    count = f"({len(cell.values)})" if cell.values and column.unit != "rank" else ""
                    mark = escape(MARKS[cell.verdict]) if cell.verdict else ""
                    texts.append(" ".join(filter(None, (bold(number) if is_best else number, count, mark))))
                if in_paper:
                    paper = cell and cell.paper
                    texts.append(
                        escape(format_value(paper.mean, paper.std, column.unit, paper.digits)) if paper else ""
                    )
            blank = [above[: depth + 1] == labels[: depth + 1] for depth in range(len(labels))]
            yield ["" if same else display(label) for label, same in zip(labels, blank, strict=True)], texts
            above = labels

    def _notes(self) -> list[str]:
        """The legend of what occurs in the table, and its notes."""
        legend = []
        if any(cell.values and column.unit != "rank" for _, column, cell in self.cells()):
            legend.append("Mean ± standard deviation (seeds).")
        if any(map(any, self._best())):
            group = f" among rows that differ in {self.labels[-1]} only" if len(self.labels) > 1 else ""
            legend.append(f"Bold: the best of a column{group}.")
        if judged := [cell.paper for *_, cell in self.cells() if cell.paper and cell.verdict]:
            meaning = ", ".join(f"{mark} {verdict}" for verdict, mark in MARKS.items())
            exact = any(value.std is None for value in judged)
            exactly = " (where it prints none: its number as printed)" if exact else ""
            legend.append(f"{meaning} the paper's mean ± two of its standard deviations{exactly}.")
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
