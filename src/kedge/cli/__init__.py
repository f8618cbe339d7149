"""The `kedge` command: a small function per verb; everything heavy is imported inside the verb."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys

import typer

import kedge
from kedge.cli import demo, evaluate, exchange, gallery, index, reproduce, search, serve, train
from kedge.console import plain_warnings
from kedge.errors import KedgeError

__all__ = ["app", "main", "run"]

app = typer.Typer(
    name="kedge",
    help="Image retrieval with learnable class anchors: train an encoder, measure it, search images.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(train.train)
for verb in (
    evaluate.evaluate,
    index.index,
    search.search,
    gallery.remove,
    gallery.info,
    gallery.versions,
    gallery.restore,
    gallery.calibrate,
    gallery.optimize,
    gallery.audit,
    serve.serve,
    exchange.export,
    exchange.import_,
    reproduce.reproduce,
    demo.demo,
    demo.sample,
):
    app.command(verb.__name__.rstrip("_"))(verb)


@app.callback(invoke_without_command=True)
def _options(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    if version:
        typer.echo(f"kedge {kedge.__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command; an error of the user's is one sentence on stderr and exit status 2."""
    gc.set_threshold(50_000)  # imports make so many objects that looking for garbage is a tenth of a start
    plain_warnings()
    try:
        app()
    except KedgeError as error:
        typer.echo(f"kedge: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        typer.echo("kedge: stopped.", err=True)
        sys.exit(130)


def run() -> None:
    """Run the command as a process of its own, which ends without taking torch apart: that takes longer than many do.

    Threads have ended and all other exit handlers have run by then; an exception with a traceback ends as ever.
    """
    status: list[int] = []
    atexit.register(_exit, status)  # before any other: it is called last
    try:
        main()
    except SystemExit as exit_:
        status.append(exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None))
        raise


def _exit(status: list[int]) -> None:
    if status:
        with contextlib.suppress(OSError):  # nobody reads any more
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status[0])
