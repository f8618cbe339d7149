"""`kedge reproduce`: the paper's experiments, our figures beside the printed ones."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kedge.console import stdout
from kedge.errors import ConfigError, DataError

if TYPE_CHECKING:
    from kedge.reproduce.jobs import Job
    from kedge.reproduce.machine import Estimates

Names = Annotated[str | None, typer.Option(metavar="NAME,…", help="Only these, by name.")]


def reproduce(
    experiment: Annotated[
        str,
        typer.Argument(
            metavar="NAME,…",
            help="Experiments, or all of the paper's; 'list' shows them, 'report' writes up all results.",
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings for every run, such as recipe.epochs=10.")
    ] = None,
    dataset: Names = None,
    encoder: Names = None,
    loss: Names = None,
    recipe: Annotated[str, typer.Option(metavar="NAME,…", help="Recipes: paper, kedge, kedge-long.")] = "paper",
    seeds: Annotated[str, typer.Option(help="Seeds, such as 0-4 or 0,1,2.")] = "0-4",
    at: Annotated[str | None, typer.Option(metavar="NUMBER,…", help="Only these dimensions or shots.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="A dataset's images as an .npz file or its folder; no download."),
    ] = None,
    configs: Annotated[
        Path | None, typer.Option(help="A folder with your own configurations, such as loss/mine.yaml.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where runs, results, tables and figures go.")] = Path("reproduction"),
    jobs: Annotated[int, typer.Option(min=1, help="Number of runs in parallel.")] = 1,
    launcher: Annotated[str | None, typer.Option(help="A Hydra launcher that starts the runs.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Show what would run and for how long; start nothing.")] = False,
    no_run: Annotated[
        bool, typer.Option("--no-run", help="Only write tables and figures of the results so far.")
    ] = False,
) -> None:
    """Run the paper's experiments, whole or in part.

    Finished runs are not repeated, interrupted ones continue.

    kedge reproduce list

    kedge reproduce table1 --dataset cifar100 --encoder resnet18 --seeds 0-2 --plan

    kedge reproduce all --dataset cifar100,svhn --jobs 4

    kedge reproduce report --out reproduction
    """
    from kedge.reproduce.experiments import EXPERIMENTS, select

    if experiment == "list":
        for listed in EXPERIMENTS.values():
            groups = (listed.datasets, listed.encoders, listed.losses)
            typer.echo(f"{listed.name:15} {listed.title}: " + " × ".join(map(",".join, groups)))
        return

    from kedge.reproduce.experiment import Selection
    from kedge.reproduce.jobs import CONFIGS, Results, ResultStore, parse_data_files
    from kedge.reproduce.machine import Estimates
    from kedge.reproduce.report import write_report
    from kedge.reproduce.runner import launch, run

    store = ResultStore(out / "results.jsonl")
    data_files = parse_data_files(data or [])
    if configs is not None:
        if not configs.is_dir():
            raise ConfigError(f"--configs: folder {configs} does not exist.")
        os.environ[CONFIGS] = str(configs.resolve())  # for the worker processes, too
    if experiment == "report":
        if not (lines := store.lines()):
            raise DataError(
                f"{store.path} holds no results; run an experiment first (kedge reproduce list shows them)."
            )
        typer.echo(f"Written: {write_report(lines, out, data_files)}")
        return
    selection = Selection(
        datasets=_names(dataset),
        encoders=_names(encoder),
        losses=_names(loss),
        seeds=_numbers("--seeds", seeds),
        sweep=_numbers("--at", at) if at else None,
        settings=tuple(overrides or ()),
        data_files=data_files,
    )
    recipes = _names(recipe) or ("paper",)
    parts = [(each, replace(part, recipe=name)) for each, part in select(experiment, selection) for name in recipes]
    # A run that several experiments share is trained once, and measured for all of them.
    by_key: dict[str, Job] = {}
    for job in (job for each, part in parts for job in each.jobs(part)):
        known = by_key.get(job.key, job)
        by_key[job.key] = replace(known, measures=tuple(dict.fromkeys([*known.measures, *job.measures])))
    all_jobs = list(by_key.values())
    for job in all_jobs:
        job.check(data_files)  # what is wrong is said before anything starts
    pending = [] if no_run else store.missing(all_jobs)
    if plan:
        _print_plan(all_jobs, pending, Estimates(store.lines(), data_files), jobs)
        return
    if not no_run:
        typer.echo(f"{len(pending)} runs to do, {len(all_jobs) - len(pending)} already finished.", err=True)
    if launcher:
        failed = launch(pending, out, data_files, launcher)
    else:
        failed = run(pending, out, data_files, max_workers=jobs, report=lambda text: typer.echo(text, err=True))
    results, written = Results(store.lines()), []
    for each, part in parts:
        tables, paths = each.write(results, part, out)
        written += paths
        for table in tables:
            stdout().print(table)
    typer.echo("Written: " + ", ".join(map(str, written)))
    if failed:
        typer.echo(
            f"kedge: {len(failed)} of {len(all_jobs)} runs failed; the others are kept; run it again to retry.",
            err=True,
        )
        sys.exit(2)


def _print_plan(jobs: list[Job], pending: list[Job], estimates: Estimates, max_workers: int) -> None:
    from rich import box
    from rich.table import Column, Table

    table = Table(Column("run", overflow="fold"), "state", "training", "estimated from", box=box.SIMPLE_HEAD)
    missing, total = {job.key for job in pending}, 0.0
    for job in jobs:
        if job.key in missing:
            seconds, basis = estimates.seconds(job)
            total += seconds
            table.add_row(job.name, "to do", _duration(seconds), basis)
        else:
            table.add_row(job.name, "finished", "", "")
    stdout().print(table)
    typer.echo(f"{len(pending)} runs to do, about {_duration(total / max_workers)} with {max_workers} at a time.")


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=math.ceil(seconds)))


def _names(text: str | None) -> tuple[str, ...] | None:
    return tuple(name.strip() for name in text.split(",") if name.strip()) if text else None


def _numbers(option: str, text: str) -> tuple[int, ...]:
    numbers: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            numbers += range(int(first), int(last or first) + 1)
    except ValueError:
        raise ConfigError(f"{option} takes numbers such as 0-4 or 0,1,2, found {text!r}.") from None
    if not numbers:
        raise ConfigError(f"{option} is empty; pass numbers such as 0-4.")
    return tuple(dict.fromkeys(numbers))
