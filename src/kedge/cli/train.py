"""`kedge train`: a folder of pictures, or a dataset by name, becomes a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("train", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(train)


def train(
    context: typer.Context,
    folder: Annotated[Path | None, typer.Option(help="Where the run goes; by default below runs/.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with an interrupted run: its folder.")] = None,
) -> None:
    """Train an encoder around class anchors.

    kedge train photos/                                pictures in class folders

    kedge train dataset=cifar100 loss=cam recipe=kedge a dataset by name

    kedge train recipe.epochs=20 seed=1,2,3 -m         overrides and sweeps (Hydra)
    """
    from kedge.errors import ConfigError
    from kedge.training import Interrupted, resume_run

    arguments = list(context.args)
    try:
        if resume is None:
            _start(arguments, folder)
        elif arguments or folder:
            raise ConfigError("--resume takes the run's own settings: leave out overrides and --folder.")
        else:
            resume_run(resume)
            _say_next(resume)
    except Interrupted as stopped:
        typer.echo(f"kedge: {stopped}", err=True)
        sys.exit(130)


def _start(arguments: list[str], folder: Path | None) -> None:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import DictConfig

    from kedge.errors import KedgeError
    from kedge.training import Interrupted, compose, overrides_for, quoted, start_run

    if arguments and "=" not in arguments[0] and not arguments[0].startswith("-"):
        arguments = overrides_for(arguments[0], arguments[1:])
    if folder is not None:
        arguments.append(f"hydra.run.dir={quoted(folder)}")
    if not any(argument.startswith("-") for argument in arguments):
        compose(arguments)  # for its one-sentence errors; Hydra's own are several lines long

    def task(config: DictConfig) -> None:
        folder = Path(HydraConfig.get().runtime.output_dir)
        if folder.is_relative_to(Path.cwd()):
            folder = folder.relative_to(Path.cwd())
        try:
            start_run(config, folder)
        except KedgeError as error:
            # Hydra would wrap the error in a traceback of its own.
            typer.echo(f"kedge: {error}", err=True)
            sys.exit(130 if isinstance(error, Interrupted) else 2)
        _say_next(folder)

    # Hydra wants its overrides together: a sweep's flag may stand anywhere among them.
    arguments.sort(key=lambda argument: argument in {"-m", "--multirun"})
    sys.argv = ["kedge train", *arguments]
    hydra.main(version_base="1.3", config_path="pkg://kedge.config", config_name="train")(task)()


def _say_next(folder: Path) -> None:
    typer.echo(f"Model in {folder / 'model'}. Measure it with: kedge evaluate {folder}")
