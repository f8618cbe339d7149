"""From "a folder of pictures" to overrides: what `kedge train photos/` means."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from kedge.config.compose import compose
from kedge.encoders import fetch_weights
from kedge.errors import DataError, WeightsError

__all__ = ["overrides_for", "quoted"]

_console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)


def overrides_for(source: str | Path, overrides: Sequence[str] = ()) -> list[str]:
    """The overrides that train on `source`, those of the user last.

    A folder or an .npz file. Pictures in a folder go through a frozen pretrained encoder, if its weights can be
    had; otherwise an encoder is trained from scratch, and a line says so. What the user names is left alone, and
    so are sweeps.
    """
    path = Path(source)
    if path.suffix == ".npz" and path.is_file():
        return ["dataset=arrays", f"dataset.path={quoted(path)}", *overrides]
    if not path.is_dir():
        raise DataError(f"{source} is neither a folder of pictures nor an .npz file.")
    given = ["dataset=folder", f"dataset.path={quoted(path)}"]
    settled = any(_value(overrides, name) is not None for name in ("recipe", "experiment"))
    if not settled and not any(override.startswith("-") for override in overrides):
        given += _how_to_train(given, overrides)
    return [*given, *overrides]


def _how_to_train(given: Sequence[str], overrides: Sequence[str]) -> list[str]:
    weights = _value(overrides, "encoder.weights")
    if weights is None:
        try:
            fetch_weights(compose([*given, *overrides]).encoder.name)
        except WeightsError as error:
            _console.print(f"{error} Training from scratch.")
            weights = "null"
        else:
            return ["recipe=head", "encoder.weights=default"]
    if weights != "null":
        return ["recipe=head"]
    small = {} if torch.cuda.is_available() else {"encoder": "resnet10", "dataset.size": "128"}
    scratch = {**small, "encoder.weights": "null", "recipe": "kedge"}
    gentle = {"recipe.batch_size": "64", "recipe.optimizer.lr": "0.1"}
    return [f"{name}={value}" for name, value in {**scratch, **gentle}.items() if _value(overrides, name) is None]


def _value(overrides: Sequence[str], key: str) -> str | None:
    """What the user gave for `key`, if anything."""
    pairs = (override.lstrip("+").partition("=") for override in overrides)
    return next((value for name, _, value in pairs if name == key), None)


def quoted(path: Path) -> str:
    """A path as the value of an override, whatever characters it holds."""
    text = str(path.resolve()).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"
