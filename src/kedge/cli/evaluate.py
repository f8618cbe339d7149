"""`kedge evaluate`: how well a trained model retrieves, or a gallery is searched."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import kedge
from kedge.console import stdout
from kedge.errors import ConfigError
from kedge.io import is_url

if TYPE_CHECKING:
    from kedge.evaluation.report import BaseReport

_SHOWN = 5
"""Images that were left out and are named."""


def evaluate(
    path: Annotated[
        str, typer.Argument(metavar="RUN|GALLERY", help="A run's folder, as kedge train left it, or a gallery.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Of a run: another dataset, such as dataset=svhn or dataset.path=…")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="Use the images of this folder, one folder for each class, as queries."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use only this many queries, spread evenly; by default all.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where metrics.json goes; by default into the folder of the run or gallery.")
    ] = None,
    held_out: Annotated[
        bool,
        typer.Option("--held-out", help="Use the run's held-out images as queries instead of the test images."),
    ] = False,
    unknown: Annotated[
        str | None,
        typer.Option(metavar="DATASET", help="Of a run: how well this dataset's test images are detected as unknown."),
    ] = None,
    trust: Annotated[
        bool,
        typer.Option("--trust", help="Load the run's dataset even if it is not one of Kedge's own classes."),
    ] = False,
) -> None:
    """Measure how well searches find images of the same class, and write metrics.json.

    For a run, the training images are searched with its test images, or with the images of a folder (--against).
    For a gallery, its labelled items are searched with each of them in turn, or with the images of a folder.
    Scores of each class go to classes.csv, the confusion matrix to confusion.csv and confusion.png.

    kedge evaluate RUN --against queries/       other images than the test images

    kedge evaluate RUN --unknown svhn           are these detected as unknown? A dataset, or an .npz file

    torchrun --nproc-per-node 2 -m kedge evaluate RUN       the same in several processes
    """
    from kedge.distributed import exit_together, is_rank_zero, raise_on_rank_zero

    report: BaseReport
    name = "held_out.json" if held_out else "metrics.json" if against is None else "against.json"
    with raise_on_rank_zero():
        if against is not None and held_out:
            raise ConfigError("--against and --held-out both choose the queries: pass only one of them.")
        if is_url(str(path)) or Path(path, "gallery.json").is_file():
            if overrides or held_out or unknown or trust:
                raise ConfigError(
                    f"{path} is a gallery: overrides, --held-out, --unknown and --trust are for runs only."
                )
            if is_url(str(path)) and out is None:
                raise ConfigError(f"{path} is not a local folder: pass --out FILE to say where metrics.json goes.")
            report = kedge.evaluate(kedge.Gallery.open(path), against=against, limit=limit)
        else:
            if unknown and against is not None:
                raise ConfigError("--unknown compares with the test images; leave out --against.")
            report = _evaluate_run(
                Path(path), overrides or [], against, limit, held_out=held_out, unknown=unknown, trust=trust
            )
    if is_rank_zero():
        _show(report, out or Path(path, name))
    exit_together()


def _evaluate_run(
    run: Path,
    overrides: list[str],
    against: Path | None,
    limit: int | None,
    *,
    held_out: bool,
    unknown: str | None,
    trust: bool,
) -> kedge.Report:
    import torch

    from kedge.config.compose import build_dataset, compose, dataset_of, held_out_of, quoted
    from kedge.distributed import init_process_group, rank_zero_first

    if held_out and overrides:
        raise ConfigError("The held-out images are those of the run's own dataset: leave out the overrides.")
    init_process_group("cuda" if torch.cuda.is_available() else "cpu")
    model = kedge.Model.load(run, lazy=True)
    with rank_zero_first():
        dataset = held_out_of(run, trust=trust) if held_out else dataset_of(run, overrides, trust=trust)
        others = None
        if unknown is not None:
            source = ["dataset=arrays", f"dataset.path={quoted(Path(unknown))}"]
            others = build_dataset(compose(source if unknown.endswith(".npz") else [f"dataset={unknown}"]).dataset)
    return kedge.evaluate(model, dataset, against=against, limit=limit, unknown=others)


def _show(report: BaseReport, path: Path) -> None:
    """Save a report as `path` and beside it, and print it."""
    report.save(path)
    files = [path]
    stdout().print(report)
    if report.classes is not None:
        files += report.classes.save(path.parent, "" if path.stem == "metrics" else f"{path.stem}_")
        stdout().print("", report.classes, sep="\n")
    skipped = report.meta.get("skipped", [])
    for file, reason in skipped[:_SHOWN]:
        typer.echo(f"Left out: {file} {reason}", err=True)
    if len(skipped) > _SHOWN:
        typer.echo(f"{len(skipped) - _SHOWN:,} more images were left out; {path} lists them.", err=True)
    typer.echo(f"Written to {path.parent}: {', '.join(file.name for file in files)}.")
