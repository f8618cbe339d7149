"""`kedge train`: a folder of images, or a dataset by name, becomes a model."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from kedge.errors import ConfigError, KedgeError

_SWEEP = {"-m", "--multirun"}


def train(
    context: typer.Context,
    folder: Annotated[Path | None, typer.Option(help="Where the run goes; by default below runs/.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Resume an interrupted run: its folder.")] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="With --resume: run whatever classes the run names, Kedge's own or not.")
    ] = False,
) -> None:
    """Train an encoder around class anchors.

    kedge train photos/                                 images in class folders

    kedge train dataset=cifar100 loss=cam recipe=kedge  a dataset by name

    kedge train recipe.epochs=20 seed=1,2,3 -m          overrides and sweeps (Hydra)

    kedge train trainer.devices=4                      four processes; also under torchrun
    """
    from kedge.distributed import raise_on_rank_zero
    from kedge.training import Interrupted, resume_run

    arguments = list(context.args)
    try:
        with raise_on_rank_zero():
            if resume is None and trust:
                raise ConfigError("--trust is for --resume: what you name yourself needs none, leave it out.")
            if resume is None:
                _start(arguments, folder)
            elif folder:
                raise ConfigError("--resume names the run's folder: leave out --folder.")
            else:
                resume_run(resume, arguments, trust=trust)
                _print_next_step(resume)
    except Interrupted as stopped:
        typer.echo(f"kedge: {stopped}", err=True)
        sys.exit(130)


def _start(arguments: list[str], folder: Path | None) -> None:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import DictConfig

    from kedge.config.compose import quoted, rename_overrides
    from kedge.distributed import is_rank_zero, record_failure
    from kedge.training import Interrupted, overrides_for, start_run

    if arguments and "=" not in arguments[0] and not arguments[0].startswith("-"):
        arguments = overrides_for(arguments[0], arguments[1:])
    if folder is not None:
        arguments.append(f"hydra.{'sweep' if _SWEEP & {*arguments} else 'run'}.dir={quoted(folder)}")
    arguments = rename_overrides(arguments)
    _check(arguments)
    # A file, not a variable: a launcher may run the jobs of a sweep in other processes.
    failure_marker = Path(tempfile.mkdtemp(prefix="kedge-"), "failed")

    def task(config: DictConfig) -> None:
        run = Path(HydraConfig.get().runtime.output_dir)
        run = run.relative_to(Path.cwd()) if run.is_relative_to(Path.cwd()) else run
        try:
            start_run(config, run)
        except KedgeError as error:
            # Hydra would wrap it in a traceback of its own.
            if is_rank_zero():
                typer.echo(f"kedge: {error}", err=True)
            record_failure(error)
            if isinstance(error, Interrupted):
                sys.exit(130)
            with contextlib.suppress(OSError):
                failure_marker.touch()  # the other jobs of a sweep go on
        else:
            _print_next_step(run)

    # Hydra wants its overrides together: a sweep's flag may stand anywhere among them.
    arguments.sort(key=lambda argument: argument in _SWEEP)
    sys.argv = ["kedge train", *arguments]
    hydra.main(version_base="1.3", config_path="pkg://kedge.config", config_name="train")(task)()
    failed = failure_marker.exists()
    shutil.rmtree(failure_marker.parent, ignore_errors=True)
    if failed:
        sys.exit(2)


def _check(arguments: list[str]) -> None:
    """Compose everything beforehand, for one-sentence errors: Hydra's own are several lines long."""
    from kedge.config.compose import compose, expand

    flags = {argument for argument in arguments if argument.startswith("-")}
    if flags <= _SWEEP:
        overrides = [argument for argument in arguments if argument not in flags]
        for job in expand(overrides) if flags else [overrides]:
            compose(job)


def _print_next_step(folder: Path) -> None:
    from kedge.distributed import is_rank_zero

    # Of several machines, rank 0's has the run.
    if is_rank_zero() and (folder / "model").exists():
        typer.echo(f"Model in {folder / 'model'}. Measure it with: kedge evaluate {folder}")
