"""Pretrained weights: read a file of them and fit it into a backbone."""

from __future__ import annotations

import json
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from kedge.encoders.backbones import Backbone
from kedge.encoders.huggingface import HuggingFaceNetwork
from kedge.encoders.published import fetch_weights
from kedge.errors import WeightsError

__all__ = ["fit_weights", "load_weights", "read_weights", "stem_of"]

_SHOWN = 3
_OF_A_MODEL = "encoder.backbone."
"""How the tensors of a backbone are called in a model's file."""


def load_weights(name: str, backbone: Backbone, weights: str | Path) -> None:
    """Load pretrained weights, published ones by name, a local file or a model of Kedge's, into ``backbone``."""
    path = _inside_a_model(Path(weights).expanduser())
    if isinstance(backbone.network, HuggingFaceNetwork) and not path.is_file():
        backbone.network.load(path if path.is_dir() else fetch_weights(name, str(weights)))
        return
    if isinstance(weights, str) and not path.suffix and not path.is_file():
        path = fetch_weights(name, weights)
    fit_weights(name, backbone, read_weights(path), path)


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors in a state-dict file; no code in it is run."""
    if not path.is_file():
        raise WeightsError(f"there is no weights file {path}: check encoder.weights.")
    try:
        if path.suffix == ".safetensors":
            state = safetensors.torch.load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files make torch, pickle and zipfile raise errors of many kinds
        raise WeightsError(
            f"weights file {path} cannot be read ({type(error).__name__}): it is damaged or holds more than "
            "plain tensors; fetch it again (delete it first if it is a cached download)."
        ) from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise WeightsError(f"weights file {path} does not hold a state dict (names and their tensors).")
    of_a_model = {key.removeprefix(_OF_A_MODEL): value for key, value in state.items() if key.startswith(_OF_A_MODEL)}
    return of_a_model or state


def _inside_a_model(path: Path) -> Path:
    """The weights of a model's folder, or of the one that a run left; any other path as it is."""
    inside = (folder / "weights.safetensors" for folder in (path, path / "model") if (folder / "model.json").is_file())
    return next(inside, path)


def stem_of(weights: str | Path) -> str:
    """The stem that a model of Kedge's was trained with; of all other weights, the usual one."""
    about = _inside_a_model(Path(weights).expanduser()).with_name("model.json")
    try:
        return str(json.loads(about.read_bytes())["encoder"]["stem"])
    except (OSError, ValueError, KeyError, TypeError):
        return "imagenet"


def fit_weights(name: str, backbone: Backbone, state: dict[str, Tensor], source: Path) -> None:
    """Copy ``state`` into the backbone; its classifier is left out, everything else must fit."""
    wanted = backbone.network.state_dict()
    prefixes = tuple(classifier + "." for classifier in backbone.classifier)
    given = {key: value for key, value in state.items() if not key.startswith(prefixes)}
    if backbone.stem != "imagenet" and "conv1.weight" in given and _differ(given, wanted, "conv1.weight"):
        # Pretrained stems are 7 x 7: a 3 x 3 one has no counterpart in the file and starts at random.
        given["conv1.weight"] = wanted["conv1.weight"]
    # Files from before torch counted batches lack these counters, which nothing here uses.
    missing = [key for key in wanted if key not in given and not key.endswith("num_batches_tracked")]
    unexpected = [key for key in given if key not in wanted]
    misshapen = [key for key in wanted if key in given and _differ(given, wanted, key)]
    problems = [
        f"{what} {_first(keys)}"
        for what, keys in (
            ("lacks", missing),
            ("also holds", unexpected),
            ("has other shapes for", misshapen),
        )
        if keys
    ]
    if problems:
        raise WeightsError(
            f"weights file {source} does not fit encoder {name}: it {', '.join(problems)}; "
            f"pass a file that was saved from {name}."
        )
    backbone.network.load_state_dict(given, strict=False)


def _differ(given: dict[str, Tensor], wanted: dict[str, Tensor], key: str) -> bool:
    return given[key].shape != wanted[key].shape


def _first(keys: list[str]) -> str:
    shown = ", ".join(keys[:_SHOWN])
    return f"{shown} and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else shown
