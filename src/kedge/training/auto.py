"""`kedge.train`, and the settings that are chosen where the user names none: `kedge train photos/`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from kedge.config.compose import compose, quoted
from kedge.console import stderr
from kedge.datasets.cache import keep
from kedge.datasets.external import is_external, train_and_test
from kedge.encoders import DEFAULT_ENCODER, fetch_weights, pretrained_preprocessing
from kedge.encoders.pretrained import default_encoder_note
from kedge.encoders.transformers import HF
from kedge.errors import ConfigError, DataError, WeightsError
from kedge.model import Model
from kedge.training.run import check_new_folder, start_run

__all__ = ["overrides_for", "train"]

_DEFAULT_SIZE = 224
_ENCODER_KEYS = {"encoder", "encoder.name", "encoder.weights"}
"""Who names one of these has chosen an encoder."""
_DATASET_KEYS = ("dataset.size", "dataset.image", "dataset.label")
"""How an object of the user's is decoded, before there is a run."""


def train(source: Any = None, *, overrides: Sequence[str] = (), folder: str | Path | None = None) -> Model:
    """Train on labelled images, and return the model.

    Args:
        source: a folder of class folders, an .npz file, a map-style PyTorch dataset of (PIL image or uint8, label), a
            Hugging Face `Dataset` or `DatasetDict`, or a dictionary of such datasets with `train` and `test`; None
            where `overrides` name a dataset, such as `dataset=cifar100`.
        overrides: Hydra overrides of the configuration, such as `["recipe.epochs=20", "loss=cross_entropy"]`.
        folder: where the run is kept; by default a new folder below `runs/`.
    """
    if folder is not None:
        check_new_folder(Path(folder))
    config = compose(overrides if source is None else overrides_for(source, overrides))
    if folder is None:
        choices = config.hydra.runtime.choices
        name = f"{choices.dataset}-{choices.encoder}-{choices.loss}"
        folder = Path("runs", name, f"{datetime.now():%Y-%m-%d_%H-%M-%S}")
    return start_run(config, Path(folder))


def overrides_for(source: Any, overrides: Sequence[str] = ()) -> list[str]:
    """The overrides that train on `source`, those of the user last.

    A folder, an .npz file, or a dataset of PyTorch or Hugging Face. Images of a folder or a dataset go through a
    frozen pretrained encoder, if its weights can be had; otherwise an encoder is trained from scratch, and a line says
    so. What the user names is left alone, and so are sweeps.
    """
    if is_external(source):
        return _dataset_overrides(source, overrides)
    if not isinstance(source, (str, Path)):
        raise DataError(
            "source must be a folder, an .npz file, or a map-style dataset of PyTorch or Hugging Face; "
            f"found {type(source).__name__}."
        )
    path = Path(source)
    if path.suffix == ".npz" and path.is_file():
        return ["dataset=arrays", f"dataset.path={quoted(path)}", *overrides]
    if not path.is_dir():
        raise DataError(f"{source} is neither a folder of images nor an .npz file.")
    dataset = ["dataset=folder", f"dataset.path={quoted(path)}"]
    return [*dataset, *_joined(_choose(dataset, overrides)), *overrides]


def _dataset_overrides(source: Any, overrides: Sequence[str]) -> list[str]:
    """A dataset is decoded into a file first, so that the run can be resumed and measured without the object."""
    named = _by_key(overrides)
    size, image, label = (named.get(key) for key in _DATASET_KEYS)
    if size is not None and not size.isdecimal():
        raise ConfigError(f"dataset.size must be a whole number of pixels, found {size!r}.")
    rest = [override for override in overrides if _by_key([override]).keys().isdisjoint(_DATASET_KEYS)]
    chosen = _choose(["dataset=stored", "dataset.path=later"], rest)
    options: dict[str, Any] = {"most": int(chosen.pop("dataset.size", _DEFAULT_SIZE))}
    options["crop_pct"] = float(chosen.pop("dataset.crop_pct", 1.0))
    options["interpolation"] = chosen.pop("dataset.interpolation", "bilinear")
    path = keep(*train_and_test(source, image, label), size=None if size is None else int(size), **options)
    return ["dataset=stored", f"dataset.path={quoted(path)}", *_joined(chosen), *rest]


def _choose(dataset: Sequence[str], overrides: Sequence[str]) -> dict[str, str]:
    """Recipe and encoder: a frozen encoder where there are weights for it, or one trained from scratch."""
    named = _by_key(overrides)
    if any(override.startswith("-") for override in overrides):
        return {}
    config = compose([*dataset, *overrides])  # a mistake is reported before anything is fetched
    if named.keys() & {"recipe", "experiment"}:
        return {}
    weights = named.get("encoder.weights")
    chosen = {"recipe": "head"}
    if named.keys().isdisjoint(_ENCODER_KEYS):
        name = DEFAULT_ENCODER
        chosen |= {"encoder": "timm", "encoder.name": name}
    else:
        name = str(config.encoder.name)
    missing: WeightsError | None = None
    if weights is None:
        try:
            fetch_weights(name)
            if "encoder.name" in chosen:
                stderr().print(default_encoder_note("encoder=timm encoder.name=timm:MODEL"))
            chosen["encoder.weights"] = "default"
        except WeightsError as error:
            if name.startswith(HF):  # without its folder not even the architecture is known
                raise
            missing, weights = error, "null"
    if weights != "null":
        # Images as the weights were trained with, where they say so.
        preprocessing = pretrained_preprocessing(name, weights)
        if preprocessing.size not in (None, _DEFAULT_SIZE):
            chosen |= {"dataset.size": str(preprocessing.size), "recipe.size": str(preprocessing.size)}
        if preprocessing.crop_pct != 1:
            chosen["dataset.crop_pct"] = str(preprocessing.crop_pct)
        if preprocessing.interpolation != "bilinear":
            chosen["dataset.interpolation"] = preprocessing.interpolation
    else:
        chosen = {} if torch.cuda.is_available() else {"encoder": "resnet10", "dataset.size": "128"}
        chosen |= {"encoder.weights": "null", "recipe": "kedge"}
        chosen |= {"recipe.batch_size": "64", "recipe.optimizer.lr": "0.1"}
    chosen = {key: value for key, value in chosen.items() if key not in named}
    if missing is not None:
        used = chosen.get("encoder") or config.encoder.name
        stderr().print(f"Training {used} from scratch, since no pretrained weights are available.\n{missing}")
    return chosen


def _by_key(overrides: Sequence[str]) -> dict[str, str]:
    parts = (override.lstrip("+").partition("=") for override in overrides)
    return {key: value for key, _, value in parts}


def _joined(chosen: dict[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in chosen.items()]
