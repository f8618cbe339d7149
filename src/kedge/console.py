"""The two Rich consoles: standard output for results, standard error for progress and messages."""

from __future__ import annotations

import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["plain_warnings", "stderr", "stdout"]


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


def plain_warnings() -> None:
    """Show warnings without file names and line numbers, for commands."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        stderr().print(f"Warning: {message}")

    warnings.showwarning = show
