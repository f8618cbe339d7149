"""One training run of an experiment: its overrides, its configuration, and the key that identifies its results."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from omegaconf import DictConfig, OmegaConf

from kedge.config.compose import build_dataset, compose, quoted
from kedge.datasets import Dataset
from kedge.datasets.download import without_downloads
from kedge.errors import ConfigError, DataError, KedgeError

__all__ = ["CONFIGS", "KEY_VERSION", "DataFiles", "Job", "dataset_info", "load_dataset", "parse_data_files"]

KEY_VERSION = 4
"""Raise it when a configuration key is added or renamed and runs stay what they were: result lines with an older
version are then identified by the job that they describe."""
CONFIGS = "KEDGE_CONFIGS"
"""The environment variable that names a folder with the user's own configurations: loss/mine.yaml and the like."""
DataFiles = Mapping[str, Path]
"""Dataset name → .npz file with its images; other datasets are loaded by name."""

_FULL_SET = {"kedge": ("split.holdout=0",), "kedge-long": ("split.holdout=0",)}
"""Recipes whose schedule needs no held-out images train on all of them."""
_NO_FLIP = ("svhn",)
"""Datasets whose images may not be flipped: digits."""


@dataclass(frozen=True)
class Job:
    """A training run and what is measured of it."""

    dataset: str
    encoder: str
    loss: str
    recipe: str
    seed: int
    changes: tuple[str, ...] = ()
    """Overrides that belong to the experiment, such as `encoder.dim=32`."""
    settings: tuple[str, ...] = ()
    """Overrides of the user's for all runs, such as `recipe.epochs=10`."""
    measures: tuple[str, ...] = ("scores",)

    def overrides(self, data_files: DataFiles | None = None) -> list[str]:
        """The arguments of `kedge train`."""
        path = (data_files or {}).get(self.dataset)
        dataset = [f"dataset={self.dataset}"]
        if path is not None:
            dataset = ["dataset=arrays", f"dataset.path={quoted(path)}"]
            dataset += ["dataset.flip=false"] if self.dataset in _NO_FLIP else []
        return [*dataset, *self._choices, f"seed={self.seed}"]

    @property
    def _choices(self) -> tuple[str, ...]:
        """All overrides but those of dataset and seed."""
        groups = (f"encoder={self.encoder}", f"loss={self.loss}", f"recipe={self.recipe}")
        adapted = _loss_overlay(self.recipe, self.loss, os.environ.get(CONFIGS))
        return (*groups, *adapted, *_FULL_SET.get(self.recipe, ()), *self.settings, *self.changes)

    @property
    def config(self) -> DictConfig:
        """The configuration without its dataset and seed: composed once for all jobs that share it."""
        return _composed(self._choices, os.environ.get(CONFIGS))

    def full_config(self, data_files: DataFiles | None = None) -> DictConfig:
        """The whole configuration of the run."""
        return compose([*self.overrides(data_files), *_searchpath(os.environ.get(CONFIGS))])

    def check(self, data_files: DataFiles) -> None:
        """Raise ConfigError where the run could not be composed."""
        _ = self.config
        if self.dataset not in data_files:
            _composed((f"dataset={self.dataset}",), os.environ.get(CONFIGS))

    @cached_property
    def key(self) -> str:
        """A hash of the configuration, wherever its data lie and whatever device it is trained on."""
        content: dict[str, Any] = OmegaConf.to_container(self.config, resolve=False)  # type: ignore[assignment]
        identity = {name: content[name] for name in ("encoder", "loss", "recipe", "split")}
        identity |= {"keep_every": content["trainer"]["keep_every"], "dataset": self.dataset, "seed": self.seed}
        return hashlib.sha256(json.dumps([KEY_VERSION, identity], sort_keys=True).encode()).hexdigest()[:12]

    @property
    def name(self) -> str:
        """For people, and for the run's folder."""
        extra = [change.rpartition(".")[2].replace("=", "") for change in self.changes]
        parts = [self.dataset, self.encoder, self.loss, self.recipe, *extra, f"seed{self.seed}"]
        return "-".join([*parts, self.key[:6]])

    def to_json(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Job:
        """The job that :meth:`to_json` wrote."""
        values: dict[str, Any] = {field.name: content[field.name] for field in fields(cls)}
        lists = {name: tuple(values[name]) for name in ("changes", "settings", "measures")}
        return cls(**values | lists)


def parse_data_files(arguments: Sequence[str]) -> dict[str, Path]:
    """`cifar100=path.npz` and the like, as given on the command line."""
    files = {}
    for argument in arguments:
        name, sign, path = argument.partition("=")
        if not (name and sign and path):
            raise ConfigError(f"--data takes NAME=FILE.npz, found {argument!r}.")
        files[name] = Path(path).expanduser().resolve()
        if not files[name].exists():
            raise ConfigError(f"--data {argument}: there is no {path}.")
    return files


def load_dataset(name: str, data_files: DataFiles, *, download: bool = True) -> Dataset | None:
    """The dataset with this name, or None where it cannot be loaded."""
    job = Job(name, "resnet18", "cam", "paper", 0)
    try:
        with nullcontext() if download else without_downloads():
            dataset: Dataset = build_dataset(job.full_config(data_files).dataset)
    except KedgeError:
        return None
    return dataset


class DatasetInfo(NamedTuple):
    """The size of a training set: its images, classes, pixels of the shorter side, images of the largest class."""

    images: int
    classes: int
    side: int
    largest_class: int


_PAPER_DATASETS = {
    "cifar100": DatasetInfo(50_000, 100, 32, 500),
    "food101": DatasetInfo(75_750, 101, 224, 750),
    "svhn": DatasetInfo(73_257, 10, 32, 13_861),
    "tiny_imagenet": DatasetInfo(100_000, 200, 64, 500),
}
"""So that a plan needs no download."""


def dataset_info(name: str, data_files: DataFiles) -> DatasetInfo:
    """The size of a dataset, which is loaded if it is not one of the paper's."""
    if name in _PAPER_DATASETS:
        return _PAPER_DATASETS[name]
    dataset = load_dataset(name, data_files)
    if dataset is None:
        raise DataError(f"The dataset {name} cannot be loaded, so that its size is unknown.")
    train = dataset.train
    return DatasetInfo(len(train), len(dataset.classes), min(train.size), int(np.bincount(train.labels).max()))


def _searchpath(folder: str | None) -> list[str]:
    return [f"hydra.searchpath=[{quoted(Path(folder))}]"] if folder else []


@cache
def _composed(overrides: tuple[str, ...], folder: str | None) -> DictConfig:
    """Hydra takes a third of a second for this, and an experiment has hundreds of jobs."""
    config = compose([*overrides, *_searchpath(folder)])
    OmegaConf.set_readonly(config, True)
    return config


@cache
def _loss_overlay(recipe: str, loss: str, folder: str | None) -> tuple[str, ...]:
    """Adapts the recipe to pairs for a loss of pytorch-metric-learning whose own file names no `recipe/loss`."""
    config = _composed((f"loss={loss}",), folder)
    is_adapted = config.hydra.runtime.choices["recipe/loss@recipe"] is not None
    if is_adapted or config.loss.get("_target_") != "kedge.losses.MetricLearningLoss":
        return ()
    return (f"recipe/loss@recipe={recipe}_pairs",)
