"""Rows set as a LaTeX table that fits its page: in smaller print, on its side or over several pages where it must."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import NamedTuple

from kedge.reproduce.escaping import for_latex

__all__ = ["typeset"]

PAGE = (345, 550)
"""Width and height of the text of an article in LaTeX's standard class, in points; most others have more room."""
Rows = Sequence[tuple[str, Sequence[str]]]
"""What is drawn before each row, if anything, and its cells."""


class Print(NamedTuple):
    """A size of LaTeX's own font, in points."""

    name: str
    letter: float
    """The width of a digit, and of other letters on average."""
    line: float
    gap: int
    """Left and right of each column."""


PRINTS = (Print("small", 4.75, 11, 3), Print("footnotesize", 4.4, 9.5, 3), Print("scriptsize", 4.1, 8, 2))


def typeset(name: str, title: str, heads: Sequence[str], align: str, rows: Rows, notes: Sequence[str] = ()) -> str:
    r"""A float, or a ``longtable`` where the rows do not fit on a page; its first lines say which packages it needs.

    Cells are LaTeX, all else is plain text. Heads are broken into lines, so that they widen no column.
    """
    cells = [max([0, *(_letters(row[place]) for _, row in rows)]) for place in range(len(heads))]
    broken = [wrap(head, max([1, width, *map(len, head.split())])) for head, width in zip(heads, cells, strict=True)]
    deep = max(map(len, broken))
    lines = zip(*([""] * (deep - len(head)) + head for head in broken), strict=True)
    top = [r"\toprule", *(_row(map(for_latex, line)) for line in lines), r"\midrule"]
    body = [line for rule, row in rows for line in (rule, _row(row)) if line]

    letters = sum(max([width, *map(len, head)]) for width, head in zip(cells, broken, strict=True))
    sideways, chosen = _print_for(letters, len(heads))
    gaps = sum(bool(rule) for rule, _ in rows)
    long = chosen.line * (len(rows) + deep + gaps / 2) + 30 * (1 + len(notes)) > PAGE[0 if sideways else 1]

    look = [rf"\{chosen.name}", rf"\setlength{{\tabcolsep}}{{{chosen.gap}pt}}"]
    caption = [rf"\caption{{{for_latex(title)}}}", rf"\label{{tab:{name}}}"]
    below = [rf"\par\smallskip{{\footnotesize\raggedright {for_latex(note)}\par}}" for note in notes]
    if long:
        first = [*caption, r"\\", *top, r"\endfirsthead", *top, r"\endhead", r"\bottomrule", r"\endfoot"]
        table = [rf"\begin{{longtable}}{{{align}}}", *first, *body, r"\end{longtable}"]
        look.append(r"\setlength{\LTcapwidth}{\linewidth}")
        drawn = [r"\begingroup", *look, *table, *below, r"\endgroup"]
    else:
        table = [rf"\begin{{tabular}}{{{align}}}", *top, *body, r"\bottomrule", r"\end{tabular}"]
        look.append(r"\setlength{\belowcaptionskip}{5pt}")
        drawn = [r"\begin{table}", r"\centering", *look, *caption, *table, *below, r"\end{table}"]
    if sideways:
        drawn = [r"\begin{landscape}", *drawn, r"\end{landscape}"]
    packages = ["booktabs", *["longtable"] * long, *["pdflscape"] * sideways]
    return "\n".join([*(rf"% \usepackage{{{package}}}" for package in packages), *drawn]) + "\n"


def _print_for(letters: int, columns: int) -> tuple[bool, Print]:
    """The largest print in which so many letters fit beside one another, if need be on a page on its side."""
    for sideways in (False, True):
        for one in PRINTS:
            if letters * one.letter + 2 * one.gap * columns <= PAGE[sideways]:
                return sideways, one
    return True, PRINTS[-1]


def _letters(cell: str) -> int:
    r"""How long a cell looks.

    >>> _letters(r"\textbf{.700 $\pm$ .000} $\uparrow$"), _letters(r"90\% of tiny\_imagenet")
    (13, 20)
    """
    shown = re.sub(r"\\textbf\{", "", cell)
    return len(re.sub(r"[${}]", "", re.sub(r"\\(?:[A-Za-z]+|.)", "x", shown)))


def _row(cells: Iterable[str]) -> str:
    return rf"{' & '.join(cells)} \\"
