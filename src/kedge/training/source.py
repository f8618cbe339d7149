"""From "these pictures" to overrides: what `kedge train photos/` and `kedge.train(dataset)` mean."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from kedge.config.compose import compose, quoted
from kedge.datasets.external import is_external, keep_external
from kedge.encoders import fetch_weights, pretrained_cfg
from kedge.encoders.transformers import HF
from kedge.errors import ConfigError, DataError, WeightsError

__all__ = ["overrides_for"]

_console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)

_SIDE = 224
_OF_THE_DATASET = ("dataset.size", "dataset.image", "dataset.label")
"""What says how a dataset is decoded, before there is a run."""


def overrides_for(source: Any, overrides: Sequence[str] = ()) -> list[str]:
    """The overrides that train on `source`, those of the user last.

    A folder, an .npz file, or a dataset of PyTorch or Hugging Face. Pictures of a folder or a dataset go through a
    frozen pretrained encoder, if its weights can be had; otherwise an encoder is trained from scratch, and a line says
    so. What the user names is left alone, and so are sweeps.
    """
    if is_external(source):
        return _of_given(source, overrides)
    if not isinstance(source, (str, Path)):
        found = type(source).__name__
        raise DataError(
            f"source must be a folder, an .npz file, or a map-style dataset of PyTorch or Hugging Face; found {found}."
        )
    path = Path(source)
    if path.suffix == ".npz" and path.is_file():
        return ["dataset=arrays", f"dataset.path={quoted(path)}", *overrides]
    if not path.is_dir():
        raise DataError(f"{source} is neither a folder of pictures nor an .npz file.")
    given = ["dataset=folder", f"dataset.path={quoted(path)}"]
    return [*given, *_how_to_train(given, overrides), *overrides]


def _of_given(source: Any, overrides: Sequence[str]) -> list[str]:
    """A dataset is decoded first and the run told where, so that it can be resumed and measured without the object."""
    size, image, label = (_value(overrides, name) for name in _OF_THE_DATASET)
    if size is not None and not size.isdecimal():
        raise ConfigError(f"dataset.size must be a whole number of pixels, found {size!r}.")
    own = _without(overrides, _OF_THE_DATASET)
    how = _how_to_train(["dataset=stored", "dataset.path=later"], own)
    most = int(_value(how, "dataset.size") or _SIDE)
    path = keep_external(source, size=None if size is None else int(size), most=most, image=image, label=label)
    return ["dataset=stored", f"dataset.path={quoted(path)}", *_without(how, _OF_THE_DATASET), *own]


def _how_to_train(given: Sequence[str], overrides: Sequence[str]) -> list[str]:
    settled = any(_value(overrides, name) is not None for name in ("recipe", "experiment"))
    if settled or any(override.startswith("-") for override in overrides):
        return []
    weights = _value(overrides, "encoder.weights")
    name = str(compose([*given, *overrides]).encoder.name)
    if weights is None:
        try:
            fetch_weights(name)
        except WeightsError as error:
            if name.startswith(HF):  # without its folder not even the architecture is known
                raise
            _console.print(f"{error} Training from scratch.")
            weights = "null"
        else:
            return _frozen(name, {"recipe": "head", "encoder.weights": "default"}, overrides)
    if weights != "null":
        return _frozen(name, {"recipe": "head"}, overrides)
    small = {} if torch.cuda.is_available() else {"encoder": "resnet10", "dataset.size": "128"}
    scratch = {**small, "encoder.weights": "null", "recipe": "kedge"}
    gentle = {"recipe.batch_size": "64", "recipe.optimizer.lr": "0.1"}
    return _unsaid({**scratch, **gentle}, overrides)


def _frozen(name: str, chosen: dict[str, str], overrides: Sequence[str]) -> list[str]:
    """With pictures of the size that the weights were trained with, where they say so."""
    side = pretrained_cfg(name).get("input_size", (3, _SIDE, _SIDE))[-1]
    sizes = {"dataset.size": str(side), "recipe.size": str(side)} if side != _SIDE else {}
    return _unsaid({**chosen, **sizes}, overrides)


def _unsaid(chosen: dict[str, str], overrides: Sequence[str]) -> list[str]:
    """What was chosen, but for what the user has chosen otherwise."""
    return [f"{name}={value}" for name, value in chosen.items() if _value(overrides, name) is None]


def _value(overrides: Sequence[str], key: str) -> str | None:
    """What the user gave for `key`, if anything."""
    return next((value for name, value in map(_parts, overrides) if name == key), None)


def _without(overrides: Sequence[str], keys: Sequence[str]) -> list[str]:
    return [override for override in overrides if _parts(override)[0] not in keys]


def _parts(override: str) -> tuple[str, str]:
    name, _, value = override.lstrip("+").partition("=")
    return name, value
