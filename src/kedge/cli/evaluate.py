"""`kedge evaluate`: how well a trained model retrieves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import kedge
from kedge.console import stdout
from kedge.errors import ConfigError


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run's folder, as kedge train left it.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Another dataset: dataset=svhn, or dataset.path=…")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where metrics.json goes; by default into the run.")] = None,
    held_out: Annotated[
        bool,
        typer.Option("--held-out", help="Use the held-out images as queries instead of the test images."),
    ] = False,
    trust: Annotated[
        bool,
        typer.Option("--trust", help="Run whatever loads the data of the run, Kedge's own or not."),
    ] = False,
) -> None:
    """Search the training images with the test images, and write metrics.json.

    torchrun --nproc-per-node 2 -m kedge evaluate RUN       the same in several processes
    """
    import torch

    from kedge.config.compose import dataset_of, held_out_of
    from kedge.distributed import exit_together, init_process_group, is_rank_zero, raise_on_rank_zero, rank_zero_first

    with raise_on_rank_zero():
        if held_out and overrides:
            raise ConfigError("The held-out images are those of the run's own dataset: leave out the overrides.")
        init_process_group("cuda" if torch.cuda.is_available() else "cpu")
        model = kedge.Model.load(run)
        with rank_zero_first():
            dataset = held_out_of(run, trust=trust) if held_out else dataset_of(run, overrides or [], trust=trust)
        report = kedge.evaluate(model, dataset)
    path = out or run / ("held_out.json" if held_out else "metrics.json")
    if is_rank_zero():
        report.save(path)
        stdout().print(report)
        typer.echo(f"Written to {path}.")
    exit_together()
