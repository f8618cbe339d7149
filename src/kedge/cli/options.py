"""Arguments, checks and output that several verbs share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kedge.console import stdout
from kedge.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["AddressOption", "GalleryArgument", "ListsOption", "PrecisionOption", "check_runner", "line_console"]

GalleryArgument = Annotated[str, typer.Argument(help="The gallery's folder or URL (s3://…).")]
ListsOption = Annotated[
    str | None,
    typer.Option(help="The list that holds an item: that of its 'label' (default) or of its nearest 'anchor'."),
]
AddressOption = Annotated[
    str | None,
    typer.Option(help="Address of a Ray cluster, such as ray-head:6379; default: start one on this machine."),
]


def _warn_precision(value: str | None) -> None:
    """Accept --precision for one release."""
    if value is not None:
        typer.echo("kedge: --precision no longer has any effect; lists are float32.", err=True)


PrecisionOption = Annotated[str | None, typer.Option(hidden=True, callback=_warn_precision)]


def check_runner(runner: str, **options: object) -> None:
    """Refuse an unknown runner, and options that the local one does not have."""
    if runner not in ("local", "ray"):
        raise ConfigError(f"--runner must be local or ray, found {runner}.")
    for name, value in options.items():
        if runner == "local" and value is not None:
            raise ConfigError(f"--{name} needs --runner ray.")


def line_console() -> Console:
    """The console for results; one line per row where the output is read by a program."""
    from rich.console import Console

    return stdout() if stdout().is_terminal else Console(width=10_000)
