"""LaTeX tables that fit their page: in a smaller font, in landscape or over several pages where they must."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from textwrap import wrap

__all__ = ["for_latex", "typeset"]

PAGE = (345, 550)
"""Width and height of the text of an article in LaTeX's standard class, in points; most others have more room."""
FONTS = (("small", 4.75, 11, 3), ("footnotesize", 4.4, 9.5, 3), ("scriptsize", 4.1, 8, 2))
"""Font sizes: name, average width of a letter, height of a line, space on each side of a column, in points."""

_ESCAPES = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "{}$&#%_"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    # A star or a bracket after the end of a row would be taken for its argument.
    **{sign: f"{{{sign}}}" for sign in "*[]"},
    "±": r"$\pm$",
    "×": r"$\times$",
    "·": r"$\cdot$",
    "−": "$-$",
    "–": "--",
    "—": "---",
    "…": r"\ldots{}",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "°": r"$^\circ$",
    "→": r"$\to$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "✓": r"$\surd$",
}


def for_latex(text: str) -> str:
    """The text on one line, so that LaTeX sets it as it is, with no package but what it always loads.

    >>> print(for_latex("50% of tiny_imagenet"))
    50\\% of tiny\\_imagenet
    """
    return "".join(_ESCAPES.get(letter, letter) for letter in " ".join(text.split()))


def typeset(
    name: str,
    title: str,
    heads: Sequence[str],
    align: str,
    rows: Sequence[tuple[str, Sequence[str]]],
    notes: Sequence[str] = (),
) -> str:
    r"""A float, or a ``longtable`` where the rows do not fit on a page; its first lines say which packages it needs.

    Of each row, what is drawn before it, if anything, and its cells. Cells are LaTeX, all else is plain text. Heads
    are wrapped, so that they widen no column.
    """
    cells = [max([0, *(_letters(row[place]) for _, row in rows)]) for place in range(len(heads))]
    wrapped = [wrap(head, max([1, width, *map(len, head.split())])) for head, width in zip(heads, cells, strict=True)]
    height = max(map(len, wrapped))
    lines = zip(*([""] * (height - len(head)) + head for head in wrapped), strict=True)
    top = [r"\toprule", *(_row(map(for_latex, line)) for line in lines), r"\midrule"]
    body = [line for rule, row in rows for line in (rule, _row(row)) if line]

    letters = sum(max([width, *map(len, head)]) for width, head in zip(cells, wrapped, strict=True))
    # The largest font in which the columns fit beside one another, if need be in landscape.
    choices = [(landscape, *font) for landscape in (False, True) for font in FONTS]
    fits = [
        (landscape, name, letter, line, gap)
        for landscape, name, letter, line, gap in choices
        if letters * letter + 2 * gap * len(heads) <= PAGE[landscape]
    ]
    landscape, font, _, line_height, gap = (fits or choices[-1:])[0]
    gaps = sum(bool(rule) for rule, _ in rows)
    long = line_height * (len(rows) + height + gaps / 2) + 30 * (1 + len(notes)) > PAGE[0 if landscape else 1]

    setup = [rf"\{font}", rf"\setlength{{\tabcolsep}}{{{gap}pt}}"]
    caption = [rf"\caption{{{for_latex(title)}}}", rf"\label{{tab:{name}}}"]
    below = [rf"\par\smallskip{{\footnotesize\raggedright {for_latex(note)}\par}}" for note in notes]
    if long:
        first = [*caption, r"\\", *top, r"\endfirsthead", *top, r"\endhead", r"\bottomrule", r"\endfoot"]
        table = [rf"\begin{{longtable}}{{{align}}}", *first, *body, r"\end{longtable}"]
        setup.append(r"\setlength{\LTcapwidth}{\linewidth}")
        drawn = [r"\begingroup", *setup, *table, *below, r"\endgroup"]
    else:
        table = [rf"\begin{{tabular}}{{{align}}}", *top, *body, r"\bottomrule", r"\end{tabular}"]
        setup.append(r"\setlength{\belowcaptionskip}{5pt}")
        drawn = [r"\begin{table}", r"\centering", *setup, *caption, *table, *below, r"\end{table}"]
    if landscape:
        drawn = [r"\begin{landscape}", *drawn, r"\end{landscape}"]
    packages = ["booktabs", *["longtable"] * long, *["pdflscape"] * landscape]
    return "\n".join([*(rf"% \usepackage{{{package}}}" for package in packages), *drawn]) + "\n"


def _letters(cell: str) -> int:
    r"""How long a cell looks.

    >>> _letters(r"\textbf{.700 $\pm$ .000} $\uparrow$"), _letters(r"90\% of tiny\_imagenet")
    (13, 20)
    """
    shown = re.sub(r"\\textbf\{", "", cell)
    return len(re.sub(r"[${}]", "", re.sub(r"\\(?:[A-Za-z]+|.)", "x", shown)))


def _row(cells: Iterable[str]) -> str:
    return rf"{' & '.join(cells)} \\"
