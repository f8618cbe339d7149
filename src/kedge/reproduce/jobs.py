"""One training run of an experiment: its overrides, its configuration, its key, and the lines of its results."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from filelock import FileLock
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kedge.config.compose import build_dataset, compose, quoted
from kedge.datasets import Dataset
from kedge.datasets.download import without_downloads
from kedge.errors import ConfigError, DataError, KedgeError
from kedge.reproduce.paper import PaperValue
from kedge.reproduce.tables import Cell, Column

__all__ = [
    "CONFIGS",
    "WHOLE_RUN",
    "DataFiles",
    "Job",
    "ResultLine",
    "ResultStore",
    "Results",
    "build_named",
    "dataset_info",
    "load_dataset",
    "parse_data_files",
    "value_at",
]

KEY_VERSION = 6
"""Raise it when a configuration key is added or renamed and runs stay what they were: result lines with an older
version are then identified by the job that they describe."""
CONFIGS = "KEDGE_CONFIGS"
"""The environment variable that names a folder with the user's own configurations: loss/mine.yaml and the like."""
WHOLE_RUN = ("scores", "unseen", "open_set")
"""The measures whose lines hold the time of the training; those of all others hold that of the measuring."""
DataFiles = Mapping[str, Path]
"""Dataset name → .npz file with its images, or the folder of a dataset that has one; others are loaded by name."""

_CURVE_POINTS = 20
"""Epochs of a run that `curve` measures, about."""
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
        if path is not None and path.is_dir():
            dataset += [f"dataset.path={quoted(path)}"]
        elif path is not None:
            dataset = ["dataset=arrays", f"dataset.path={quoted(path)}"]
            dataset += ["dataset.flip=false"] if self.dataset in _NO_FLIP else []
        kept = [f"trainer.keep_every={self.keep_every}"] if self.keep_every else []
        return [*dataset, *self._choices, *self.changes, *kept, f"seed={self.seed}"]

    @property
    def _choices(self) -> tuple[str, ...]:
        """All overrides but those of dataset, seed and experiment."""
        groups = (f"encoder={self.encoder}", f"loss={self.loss}", f"recipe={self.recipe}")
        adapted = _loss_overlay(self.recipe, self.loss, os.environ.get(CONFIGS))
        return (*groups, *adapted, *_FULL_SET.get(self.recipe, ()), *self.settings)

    @property
    def keep_every(self) -> int:
        """Epochs between weights that are kept for `curve`, about twenty in a run; 0 where that is not measured."""
        return max(1, int(self.config.recipe.epochs) // _CURVE_POINTS) if "curve" in self.measures else 0

    @property
    def config(self) -> DictConfig:
        """The configuration without its dataset and seed: composed once for all jobs that share it."""
        return _composed(self._choices, os.environ.get(CONFIGS), self.changes)

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
        settings = _settings(self._choices, os.environ.get(CONFIGS), self.changes)
        identity = settings | {"dataset": self.dataset, "seed": self.seed}
        return hashlib.sha256(json.dumps([KEY_VERSION, identity], sort_keys=True).encode()).hexdigest()[:12]

    @property
    def name(self) -> str:
        """For people, and for the run's folder."""
        extra = [change.rpartition(".")[2].replace("=", "") for change in self.changes]
        parts = [self.dataset, self.encoder, self.loss, self.recipe, *extra, f"seed{self.seed}"]
        return "-".join([*parts, self.key[:6]])

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Job:
        """The job whose fields (`dataclasses.asdict`) are among these, after a journey through JSON."""
        values: dict[str, Any] = {field.name: content[field.name] for field in fields(cls)}
        return cls(**values | {name: tuple(values[name]) for name in ("changes", "settings", "measures")})


@dataclass(frozen=True)
class ResultLine:
    """One measurement of one run."""

    key: str
    measure: str
    dataset: str
    encoder: str
    loss: str
    recipe: str
    seed: int
    changes: list[str]
    settings: list[str]
    values: Any
    command: str
    config_hash: str
    dataset_hash: str
    seconds: float
    """Of the training, in this and in earlier sessions (`WHOLE_RUN`), or of the measuring."""
    machine: dict[str, Any] = field(default_factory=dict)
    key_version: int = 1

    @classmethod
    def of(cls, job: Job, measure: str, **rest: Any) -> ResultLine:
        """The line of a job."""
        description = asdict(job) | {"changes": list(job.changes), "settings": list(job.settings)}
        del description["measures"]
        return cls(key=job.key, key_version=KEY_VERSION, measure=measure, **description, **rest)

    @property
    def job(self) -> Job:
        """The run it was measured of."""
        return Job.from_json(vars(self) | {"measures": [self.measure]})


class ResultStore:
    """The file of result lines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, line: ResultLine) -> None:
        """Add a line, whole or not at all, whichever processes write at the same time."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(line), ensure_ascii=False) + "\n"
        with FileLock(f"{self.path}.lock"), self.path.open("a+b") as stream:
            # A kill or a full disk may have left half a line: the next one must not become part of it.
            if stream.tell():
                stream.seek(-1, os.SEEK_END)
                if stream.read(1) != b"\n":
                    stream.write(b"\n")
            stream.write(text.encode())
            stream.flush()
            os.fsync(stream.fileno())

    def lines(self) -> list[ResultLine]:
        """All lines; the last of those with one key and measure. Incomplete lines are left out."""
        return list({(line.key, line.measure): line for line in self._read()}.values())

    def missing(self, jobs: Iterable[Job]) -> list[Job]:
        """The jobs with a measure that has no line yet, each once and reduced to such measures."""
        measured = {(line.key, line.measure) for line in self._read()}
        left = (replace(job, measures=tuple(m for m in job.measures if (job.key, m) not in measured)) for job in jobs)
        return list({job.key: job for job in left if job.measures}.values())

    def _read(self) -> Iterator[ResultLine]:
        if not self.path.exists():
            return
        try:
            raw = self.path.read_bytes().splitlines()
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror}.") from error
        for text in raw:
            try:
                yield _with_current_key(ResultLine(**json.loads(text)))
            except (ValueError, TypeError):
                continue


class Results:
    """Result lines by run and measure."""

    def __init__(self, lines: Iterable[ResultLine]) -> None:
        self._lines = {(line.key, line.measure): line for line in lines}

    def lines(self, jobs: Iterable[Job], measure: str) -> list[ResultLine]:
        """The lines of those jobs that ran."""
        return [self._lines[job.key, measure] for job in jobs if (job.key, measure) in self._lines]

    def cell(self, jobs: Iterable[Job], column: Column, paper: PaperValue | None = None) -> Cell:
        """One value of each run, and the paper's."""
        values = [value_at(line.values, column.metric) for line in self.lines(jobs, column.measure)]
        return Cell(tuple(value for value in values if value is not None), paper)


def value_at(values: Any, metric: str) -> float | None:
    """The number that the values of a run have for a metric such as `brute_force.mAP`; None where it is not finite.

    `a/b` is the ratio of two of them.

    >>> value_at({"brute_force": {"mAP": 0.5}}, "brute_force.mAP"), value_at({"accuracy": math.nan}, "accuracy")
    (0.5, None)
    >>> value_at({"slow_ms": 6.0, "fast_ms": 2.0}, "slow_ms/fast_ms")
    3.0
    """
    if "/" in metric:
        above, below = (value_at(values, part) for part in metric.split("/"))
        return above / below if above is not None and below else None
    for name in metric.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values if isinstance(values, float | int) and math.isfinite(values) else None


def _with_current_key(line: ResultLine) -> ResultLine:
    """A line of an earlier key version is identified by the job it describes, if that still exists."""
    if line.key_version == KEY_VERSION:
        return line
    try:
        return replace(line, key=line.job.key, key_version=KEY_VERSION)
    except ConfigError:
        return line


def parse_data_files(arguments: Sequence[str]) -> dict[str, Path]:
    """`cifar100=path.npz` and the like, as given on the command line."""
    files = {}
    for argument in arguments:
        name, sign, path = argument.partition("=")
        if not (name and sign and path):
            raise ConfigError(f"--data takes NAME=FILE.npz or NAME=FOLDER, found {argument!r}.")
        files[name] = Path(path).expanduser().resolve()
        if not files[name].exists():
            raise ConfigError(f"--data {argument}: file {path} does not exist.")
    return files


def load_dataset(name: str, data_files: DataFiles, *, download: bool = True) -> Dataset | None:
    """The dataset with this name, or None where it cannot be loaded."""
    try:
        with nullcontext() if download else without_downloads():
            return build_named(name, data_files)
    except KedgeError:
        return None


def build_named(name: str, data_files: DataFiles) -> Dataset:
    """The dataset with this name."""
    dataset: Dataset = build_dataset(Job(name, "resnet18", "cam", "paper", 0).full_config(data_files).dataset)
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
        raise DataError(f"The dataset {name} cannot be loaded, so its size is unknown; pass its images with --data.")
    train = dataset.train
    return DatasetInfo(len(train), len(dataset.classes), min(train.size), int(np.bincount(train.labels).max()))


def _searchpath(folder: str | None) -> list[str]:
    return [f"hydra.searchpath=[{quoted(Path(folder))}]"] if folder else []


@cache
def _composed(overrides: tuple[str, ...], folder: str | None, changes: tuple[str, ...] = ()) -> DictConfig:
    """Hydra takes a third of a second, and an experiment has hundreds of jobs: changes of values do without it."""
    if changes:
        config = _composed(overrides, folder)
        try:
            return cast("DictConfig", OmegaConf.merge(config, OmegaConf.from_dotlist(list(changes))))
        except OmegaConfBaseException as error:
            raise ConfigError(f"{' '.join(changes)}: {str(error).splitlines()[0]}") from error
    config = compose([*overrides, *_searchpath(folder)])
    OmegaConf.set_readonly(config, True)
    return config


@cache
def _settings(overrides: tuple[str, ...], folder: str | None, changes: tuple[str, ...]) -> dict[str, Any]:
    """What runs that differ in more than dataset and seed differ in."""
    content: dict[str, Any] = OmegaConf.to_container(_composed(overrides, folder, changes), resolve=False)  # type: ignore
    return {name: content[name] for name in ("encoder", "loss", "recipe", "split")}


@cache
def _loss_overlay(recipe: str, loss: str, folder: str | None) -> tuple[str, ...]:
    """Adapts the recipe to pairs for a loss of pytorch-metric-learning whose own file names no `recipe/loss`."""
    config = _composed((f"loss={loss}",), folder)
    is_adapted = config.hydra.runtime.choices["recipe/loss@recipe"] is not None
    if is_adapted or config.loss.get("_target_") != "kedge.losses.MetricLearningLoss":
        return ()
    return (f"recipe/loss@recipe={recipe}_pairs",)
