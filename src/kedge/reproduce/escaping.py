"""Plain text made safe for Markdown and LaTeX."""

from __future__ import annotations

import re

__all__ = ["for_latex", "for_markdown"]

# An underscore after a letter or a digit opens no emphasis: names stay readable in the raw text.
_MARKDOWN = re.compile(r"[\\`*\[\]<>|~$&#]|(?<![^\W_])_")
# What would start a list or draw a line.
_MARKDOWN_OPENING = re.compile(r"^(?:(?=[-+](?:\s|$)|--)|(\d+)(?=[.)](?:\s|$)))")

_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    # A star or a bracket after the end of a row would be taken for its argument.
    "*": "{*}",
    "[": "{[}",
    "]": "{]}",
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


def for_markdown(text: str) -> str:
    """The text on one line, so that Markdown shows it as it is, also in a table.

    >>> print(for_markdown("a|b tiny_imagenet 2*3"))
    a\\|b tiny_imagenet 2\\*3
    """
    line = _MARKDOWN.sub(lambda found: "\\" + found[0], " ".join(text.split()))
    return _MARKDOWN_OPENING.sub(lambda found: (found[1] or "") + "\\", line)


def for_latex(text: str) -> str:
    """The text on one line, so that LaTeX sets it as it is, with no package but what it always loads.

    >>> print(for_latex("50% of tiny_imagenet"))
    50\\% of tiny\\_imagenet
    """
    return "".join(_LATEX.get(letter, letter) for letter in " ".join(text.split()))
