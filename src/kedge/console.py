"""The two Rich consoles: standard output for results, standard error for progress and messages."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["plain_warnings", "printable", "short_path", "stderr", "stdout"]


@cache
def stdout() -> Console:
    """Console for results."""
    from rich.console import Console

    return Console()


@cache
def stderr() -> Console:
    """Console for progress and messages, which prints text as it is."""
    from rich.console import Console

    return Console(stderr=True, markup=False, highlight=False, soft_wrap=True)


def printable(text: str) -> str:
    """Control characters escaped, which would steer the terminal.

    >>> printable("a\\x1b[2J")
    'a\\\\x1b[2J'
    """
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def short_path(path: str) -> str:
    """The path from the current folder where the file is below it: absolute paths break the lines of a table."""
    return str(Path(path).relative_to(Path.cwd())) if Path(path).is_relative_to(Path.cwd()) else path


def plain_warnings() -> None:
    """Show warnings without file names and line numbers, for commands."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        stderr().print(f"Warning: {message}")

    warnings.showwarning = show
