"""`kedge reproduce`: the paper's experiments, our figures beside the printed ones."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kedge.reproduce.experiments import Choice, Experiment
    from kedge.reproduce.jobs import Job

__all__ = ["register"]

Names = Annotated[str | None, typer.Option(metavar="NAME,…")]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("reproduce")(reproduce)


def reproduce(
    experiment: Annotated[str, typer.Argument(help="An experiment; list shows them, report writes up all results.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Overrides for every run, such as recipe.epochs=10.")
    ] = None,
    dataset: Names = None,
    encoder: Names = None,
    loss: Names = None,
    recipe: Annotated[str, typer.Option(metavar="NAME,…", help="paper, kedge, kedge-long.")] = "paper",
    seeds: Annotated[str, typer.Option(help="0-4, or 0,1,2.")] = "0-4",
    at: Annotated[str | None, typer.Option(metavar="NUMBER,…", help="Only these dimensions or shots.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FILE", help="A dataset's pictures as .npz, in place of a download."),
    ] = None,
    configs: Annotated[
        Path | None, typer.Option(help="A folder with configurations of yours, such as loss/mine.yaml.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where runs, results, tables and figures go.")] = Path("reproduction"),
    jobs: Annotated[int, typer.Option(min=1, help="Runs side by side.")] = 1,
    launcher: Annotated[str | None, typer.Option(help="A Hydra launcher that starts the runs.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Say what would run and how long, and start nothing.")] = False,
    no_run: Annotated[bool, typer.Option("--no-run", help="Only tables and figures of what is there.")] = False,
) -> None:
    """Run the paper's experiments, whole or in part.

    A finished run is never repeated, an interrupted one goes on.

    kedge reproduce list

    kedge reproduce table1 --dataset cifar100 --encoder resnet18 --seeds 0-2 --plan

    kedge reproduce report --out reproduction
    """
    from kedge.errors import ConfigError
    from kedge.reproduce.experiments import EXPERIMENTS, Choice
    from kedge.reproduce.experiments import experiment as find
    from kedge.reproduce.jobs import CONFIGS, sources_of

    if experiment == "list":
        for one in EXPERIMENTS.values():
            parts = (one.datasets, one.encoders, one.losses)
            typer.echo(f"{one.name:15} {one.title}: " + " × ".join(",".join(part) for part in parts))
        return
    sources = sources_of(data or [])
    if configs is not None:
        if not configs.is_dir():
            raise ConfigError(f"--configs: there is no folder {configs}.")
        os.environ[CONFIGS] = str(configs.resolve())  # for the processes of the runs, too
    if experiment == "report":
        _report(out, sources)
        return
    found = find(experiment)
    choice = Choice(
        datasets=_names(dataset),
        encoders=_names(encoder),
        losses=_names(loss),
        recipes=_names(recipe) or ("paper",),
        seeds=_numbers("--seeds", seeds),
        at=_numbers("--at", at) if at else None,
        settings=tuple(overrides or ()),
        sources=sources,
    )
    wanted = found.jobs(choice)
    for job in wanted:
        job.config(sources)  # what is wrong is said before anything starts
    if plan:
        _plan(wanted, out, choice, jobs)
        return
    failed = [] if no_run else _run(wanted, out, choice, jobs, launcher)
    _write(found, choice, out)
    if failed:
        typer.echo(
            f"kedge: {len(failed)} of {len(wanted)} runs failed; the others are kept. Start again to retry.", err=True
        )
        sys.exit(2)


def _run(wanted: list[Job], out: Path, choice: Choice, at_once: int, launcher: str | None) -> list[Job]:
    from kedge.reproduce.running import launch, run
    from kedge.reproduce.store import Store

    waiting = Store(out / "results.jsonl").missing(wanted)
    finished = len({job.key for job in wanted}) - len({job.key for job in waiting})
    typer.echo(f"{len({job.key for job in waiting})} runs to do, {finished} finished before.", err=True)
    if launcher:
        return launch(wanted, out, choice.sources, launcher)
    return run(wanted, out, choice.sources, at_once=at_once, say=lambda text: typer.echo(text, err=True))


def _plan(wanted: list[Job], out: Path, choice: Choice, at_once: int) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table

    from kedge.reproduce.planning import Estimates, duration
    from kedge.reproduce.store import Store

    store = Store(out / "results.jsonl")
    waiting = {job.key for job in store.missing(wanted)}
    estimates = Estimates(store.lines(), choice.sources)
    table = Table(Column("run", overflow="fold"), "state", "training", "estimated from", box=box.SIMPLE_HEAD)
    spent = 0.0
    for job in {job.key: job for job in wanted}.values():
        if job.key in waiting:
            seconds, basis = estimates.seconds(job)
            spent += seconds
            table.add_row(job.name, "to do", duration(seconds), basis)
        else:
            table.add_row(job.name, "finished", "", "")
    console = Console()
    console.print(table)
    console.print(
        f"{len(waiting)} runs to do, about {duration(spent / at_once)} with {at_once} at a time.", highlight=False
    )


def _write(experiment: Experiment, choice: Choice, out: Path) -> None:
    from rich.console import Console

    from kedge.reproduce.experiments import Results
    from kedge.reproduce.output import write_all
    from kedge.reproduce.store import Store
    from kedge.reproduce.tables import show

    tables, paths = write_all(experiment, Results(Store(out / "results.jsonl").lines()), choice, out)
    console = Console()
    for table in tables:
        console.print(show(table))
    typer.echo("Written: " + ", ".join(str(path) for path in paths))


def _report(out: Path, sources: dict[str, Path]) -> None:
    from kedge.errors import DataError
    from kedge.reproduce.report import write_report
    from kedge.reproduce.store import Store

    lines = Store(out / "results.jsonl").lines()
    if not lines:
        raise DataError(f"{out / 'results.jsonl'} holds no results: run an experiment first (kedge reproduce list).")
    typer.echo(f"Written: {write_report(lines, out, sources)}")


def _names(given: str | None) -> tuple[str, ...] | None:
    return tuple(name.strip() for name in given.split(",") if name.strip()) if given else None


def _numbers(option: str, given: str) -> tuple[int, ...]:
    from kedge.errors import ConfigError

    found: list[int] = []
    try:
        for part in given.split(","):
            first, _, last = part.partition("-")
            found += range(int(first), int(last or first) + 1)
    except ValueError:
        raise ConfigError(f"{option} takes numbers such as 0-4 or 0,1,2, found {given!r}.") from None
    if not found:
        raise ConfigError(f"{option} is empty.")
    return tuple(dict.fromkeys(found))
