"""From "a folder of pictures" to overrides: what `kedge train photos/` means."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from kedge.encoders import fetch_weights
from kedge.errors import DataError, WeightsError

__all__ = ["overrides_for", "quoted"]

_console = Console(stderr=True)


def overrides_for(source: str | Path, overrides: Sequence[str] = ()) -> list[str]:
    """The overrides that train on `source`, those of the user last.

    A folder or an .npz file. Pictures in a folder go through a frozen pretrained encoder, if its weights can be
    had; otherwise an encoder is trained from scratch, and a line says so. What the user names is left alone.
    """
    path = Path(source)
    if path.suffix == ".npz" and path.is_file():
        return ["dataset=arrays", f"dataset.path={quoted(path)}", *overrides]
    if not path.is_dir():
        raise DataError(f"{source} is neither a folder of pictures nor an .npz file.")
    given = ["dataset=folder", f"dataset.path={quoted(path)}"]
    if _value(overrides, "recipe") is None and _value(overrides, "experiment") is None:
        given += _how_to_train(overrides)
    return [*given, *overrides]


def _how_to_train(overrides: Sequence[str]) -> list[str]:
    weights = _value(overrides, "encoder.weights")
    if weights is None:
        try:
            fetch_weights(_value(overrides, "encoder") or "resnet18")
        except WeightsError as error:
            _console.print(f"{error} Training from scratch.", highlight=False, soft_wrap=True)
            weights = "null"
    if weights != "null":
        return ["recipe=head"] if weights else ["recipe=head", "encoder.weights=default"]
    small = [] if torch.cuda.is_available() else ["encoder=resnet10", "dataset.size=128"]
    chosen = [o for o in small if _value(overrides, o.partition("=")[0]) is None]
    return [*chosen, "recipe=kedge", "recipe.batch_size=64", "recipe.optimizer.lr=0.1"]


def _value(overrides: Sequence[str], key: str) -> str | None:
    """What the user gave for `key`, if anything."""
    pairs = (override.lstrip("+").partition("=") for override in overrides)
    return next((value for name, _, value in pairs if name == key), None)


def quoted(path: Path) -> str:
    """A path as the value of an override, whatever characters it holds."""
    text = str(path.resolve()).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"
