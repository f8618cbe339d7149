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
    source: Annotated[
        str | None,
        typer.Argument(metavar="SOURCE", help="A folder with one folder of images per class, or an .npz file."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="SETTING=VALUE", help="Settings, such as those above.")
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Where the run goes; by default below runs/.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Resume an interrupted run: its folder.")] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="With --resume: allow classes in the run's settings that are not Kedge's.")
    ] = False,
) -> None:
    """Train an encoder around class anchors.

    \bExamples:
    kedge train photos/                           images in class folders
    kedge train photos/ recipe.epochs=20 --folder runs/photos
    kedge train dataset=cifar100 encoder=resnet18 recipe=kedge
    kedge train photos/ loss=cam,arcface -m       a sweep: one run for each value
    kedge train --resume runs/photos              continue after an interruption

    \bCommon settings:
    recipe.epochs=20             how long to train
    recipe.batch_size=64         images per step
    recipe.optimizer.lr=0.01     learning rate
    recipe=head                  head (frozen encoder), kedge, kedge-long, paper
    encoder=resnet50             resnet10, resnet18, resnet50, resnet101, swin_t
    encoder=timm encoder.name=timm:convnext_tiny        any encoder of timm
    encoder.weights=null         random weights instead of pretrained ones
    loss=arcface                 cam, contrastive, cross_entropy, triplet, …
    dataset=cifar100             a dataset by name, in place of SOURCE
    dataset.size=128             side of the images in pixels
    split.holdout=0.2            share of the images held out to measure on
    seed=1                       another random start
    trainer.devices=4            processes, one per GPU; also under torchrun
    logger=wandb                 tensorboard, wandb, mlflow, csv, none

    All settings with their values: kedge train SOURCE --cfg job
    """
    from kedge.distributed import raise_on_rank_zero
    from kedge.training import Interrupted, resume_run

    # Options that typer does not know are among them, where they stood.
    arguments = [*([] if source is None else [source]), *(settings or ()), *context.args]
    try:
        with raise_on_rank_zero():
            if resume is None and trust:
                raise ConfigError("--trust only applies to --resume; leave it out.")
            if resume is None:
                _start(arguments, folder, [name for option in context.command.params for name in option.opts])
            elif folder:
                raise ConfigError("--resume already names the run's folder; leave out --folder.")
            else:
                resume_run(resume, arguments, trust=trust)
                _print_next_step(resume)
    except Interrupted as stopped:
        typer.echo(f"kedge: {stopped}", err=True)
        sys.exit(130)


def _start(arguments: list[str], folder: Path | None, options: list[str]) -> None:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import DictConfig

    from kedge.config.compose import quoted, rename_overrides
    from kedge.distributed import is_rank_zero, record_failure
    from kedge.training import Interrupted, check_new_folder, overrides_for, start_run

    overrides, flags = _split(arguments, options)
    sweep = [flag for flag in flags if flag in _SWEEP]
    sources = [argument for argument in overrides if "=" not in argument and not argument.startswith("~")]
    overrides = rename_overrides([argument for argument in overrides if argument not in sources])
    if len(sources) > 1:
        raise ConfigError(f"kedge train takes one source, found {' and '.join(sources)}; settings look like seed=1.")
    if folder is not None:
        if not sweep:
            check_new_folder(folder)
        overrides.append(f"hydra.{'sweep' if sweep else 'run'}.dir={quoted(folder)}")
    if sources:
        overrides = [item for item in overrides_for(sources[0], [*overrides, *sweep]) if item not in _SWEEP]
    if not {*flags} - _SWEEP:
        _check(overrides, bool(sweep))
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

    # Hydra wants its overrides together, and flags behind them.
    sys.argv = ["kedge train", *overrides, *flags]
    hydra.main(version_base="1.3", config_path="pkg://kedge.config", config_name="train")(task)()
    failed = failure_marker.exists()
    shutil.rmtree(failure_marker.parent, ignore_errors=True)
    if failed:
        sys.exit(2)


def _split(arguments: list[str], options: list[str]) -> tuple[list[str], list[str]]:
    """Source and overrides, and the flags of Hydra with their values; any other flag is refused."""
    import difflib

    from hydra._internal.utils import get_args_parser

    from kedge.config.compose import unknown_setting

    known = {name: action.nargs is None for action in get_args_parser()._actions for name in action.option_strings}
    overrides, flags, rest = [], [], iter(arguments)
    for argument in rest:
        name, sign, value = argument.partition("=")
        if not name.startswith("-"):
            overrides.append(argument)
        elif name in known:
            flags += [argument] if sign or not known[name] else [argument, next(rest, "")]
        elif near := difflib.get_close_matches(name, [*options, *_SWEEP], n=1, cutoff=0.8):
            raise ConfigError(f"Unknown option {name!r}. Did you mean {near[0]}?")
        else:
            value = value if sign else next(rest, "")
            raise unknown_setting(name, "" if value.startswith("-") else value, overrides)
    return overrides, flags


def _check(overrides: list[str], sweep: bool) -> None:
    """Compose everything beforehand, for one-sentence errors: Hydra's own are several lines long."""
    from kedge.config.compose import compose, expand

    for job in expand(overrides) if sweep else [overrides]:
        compose(job)


def _print_next_step(folder: Path) -> None:
    from kedge.distributed import is_rank_zero

    # Of several machines, rank 0's has the run.
    if is_rank_zero() and (folder / "model").exists():
        typer.echo(f"Model in {folder / 'model'}. Measure it with: kedge evaluate {folder}")
