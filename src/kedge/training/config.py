"""Configuration of a run as checked dataclasses: everything that is neither data, encoder nor loss."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, TypeVar, get_args, get_type_hints

from omegaconf import OmegaConf

from kedge.errors import ConfigError
from kedge.images import Augmentation, Mixing

__all__ = [
    "COMPILE_MODES",
    "CSV",
    "Loggers",
    "MLflow",
    "Optimizer",
    "Recipe",
    "Schedule",
    "Settings",
    "Sharpness",
    "Split",
    "TensorBoard",
    "Trainer",
    "WandB",
]

T = TypeVar("T")

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune")
"""Modes of `torch.compile`."""

_MIN_VALIDATIONS = 15
"""Of a run, where it has so many epochs."""
_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", type(None): "null"}


@dataclass(frozen=True)
class Optimizer:
    """SGD with Nesterov momentum, Adam, or AdamW (decoupled weight decay)."""

    name: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    anchor_lr: float = 1.0

    def __post_init__(self) -> None:
        _one_of("recipe.optimizer.name", self.name, ("sgd", "adam", "adamw"))
        _within("recipe.optimizer.lr", self.lr, above=0)
        _within("recipe.optimizer.momentum", self.momentum, least=0, below=1)
        _within("recipe.optimizer.weight_decay", self.weight_decay, least=0)
        _within("recipe.optimizer.anchor_lr", self.anchor_lr, least=0)


@dataclass(frozen=True)
class Schedule:
    """How the learning rate moves: one cycle per run, halved on a plateau of the target metric, or constant."""

    name: str = "one_cycle"
    warmup: float = 0.2
    final: float = 0.0
    factor: float = 0.5
    patience: int = 6
    patience_few_shot: int = 9

    def __post_init__(self) -> None:
        _one_of("recipe.schedule.name", self.name, ("one_cycle", "plateau", "constant"))
        _within("recipe.schedule.warmup", self.warmup, above=0, below=1)
        _within("recipe.schedule.final", self.final, least=0, below=1)
        _within("recipe.schedule.factor", self.factor, above=0, below=1)
        _within("recipe.schedule.patience", self.patience, least=0)
        _within("recipe.schedule.patience_few_shot", self.patience_few_shot, least=0)


@dataclass(frozen=True)
class Sharpness:
    """Sharpness-aware minimisation (SAM): radius of the perturbation, and the share of the run at which it starts."""

    radius: float = 0.0
    start: float = 0.5

    def __post_init__(self) -> None:
        _within("recipe.sharpness.radius", self.radius, least=0)
        _within("recipe.sharpness.start", self.start, least=0, below=1)


@dataclass(frozen=True)
class Recipe:
    """Epochs, batches, optimiser, schedule and augmentation of one run."""

    name: str = "kedge"
    epochs: int = 100
    batch_size: int = 512
    freeze: bool = False
    optimizer: Optimizer = field(default_factory=Optimizer)
    loss_scale: float = 1.0
    schedule: Schedule = field(default_factory=Schedule)
    augmentation: Augmentation = field(default_factory=Augmentation)
    mixing: Mixing = field(default_factory=Mixing)
    averaging: float = 0.0
    sharpness: Sharpness = field(default_factory=Sharpness)
    standardise: bool = False
    mirror: bool = False
    size: int | None = None

    def __post_init__(self) -> None:
        _within("recipe.epochs", self.epochs, least=1)
        # Batch normalisation has no statistics of a single image.
        _within("recipe.batch_size", self.batch_size, least=2)
        _within("recipe.loss_scale", self.loss_scale, above=0)
        _within("recipe.averaging", self.averaging, least=0, below=1)
        if self.size is not None:
            _within("recipe.size", self.size, least=1)


@dataclass(frozen=True)
class Split:
    """Which training images are trained on."""

    holdout: float = 0.1
    shots: int | None = None
    seed: int = 0
    validate_every: int | None = None

    def __post_init__(self) -> None:
        _within("split.holdout", self.holdout, least=0, below=1)
        _within("split.seed", self.seed, least=0)
        if self.shots is not None:
            _within("split.shots", self.shots, least=1)
        if self.validate_every is not None:
            _within("split.validate_every", self.validate_every, least=1)


@dataclass(frozen=True)
class Trainer:
    """Hardware, precision, compilation and parallelism."""

    accelerator: str = "auto"
    precision: str = "auto"
    deterministic: bool = False
    data: str = "auto"
    compile: str = "auto"
    keep_every: int = 0
    devices: int | str = 1
    num_nodes: int = 1
    accumulate: int = 1
    sync_batchnorm: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.devices, str):
            _one_of("trainer.devices", self.devices, ("auto",))
        else:
            _within("trainer.devices", self.devices, least=1)
        _within("trainer.num_nodes", self.num_nodes, least=1)
        _within("trainer.accumulate", self.accumulate, least=1)
        _within("trainer.keep_every", self.keep_every, least=0)
        _one_of("trainer.data", self.data, ("auto", "device", "host"))
        if self.compile == "graph":
            message = "trainer.compile=graph is now called reduce-overhead; the old name goes with the next release."
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            object.__setattr__(self, "compile", "reduce-overhead")
        _one_of("trainer.compile", self.compile, ("auto", "off", *COMPILE_MODES))
        _one_of("trainer.accelerator", self.accelerator, ("auto", "cpu", "gpu"))
        _one_of("trainer.precision", self.precision, ("auto", "32-true", "64-true", "bf16-mixed", "16-mixed"))


@dataclass(frozen=True)
class TensorBoard:
    """Event files in the run's folder; without `needed`, only where TensorBoard is installed."""

    needed: bool = True


@dataclass(frozen=True)
class WandB:
    """A run of Weights & Biases."""

    project: str = "kedge"
    name: str | None = None
    entity: str | None = None
    group: str | None = None
    mode: str | None = None

    def __post_init__(self) -> None:
        if self.mode is not None:
            _one_of("logger.wandb.mode", self.mode, ("online", "offline"))


@dataclass(frozen=True)
class MLflow:
    """A run of MLflow."""

    experiment: str = "kedge"
    name: str | None = None
    tracking_uri: str | None = None


@dataclass(frozen=True)
class CSV:
    """A table in the run's folder."""


@dataclass(frozen=True)
class Loggers:
    """Loggers of metrics besides history.csv."""

    tensorboard: TensorBoard | None = None
    wandb: WandB | None = None
    mlflow: MLflow | None = None
    csv: CSV | None = None


@dataclass(frozen=True)
class Settings:
    """The whole configuration but dataset, encoder and loss."""

    seed: int = 0
    recipe: Recipe = field(default_factory=Recipe)
    split: Split = field(default_factory=Split)
    trainer: Trainer = field(default_factory=Trainer)
    logger: Loggers = field(default_factory=lambda: Loggers(tensorboard=TensorBoard(needed=False)))

    def __post_init__(self) -> None:
        _within("seed", self.seed, least=0, below=2**32)
        if self.trainer.precision == "16-mixed" and self.recipe.sharpness.radius:
            raise ConfigError("recipe.sharpness needs gradients of the full range: use trainer.precision=bf16-mixed.")
        if self.trainer.accumulate > 1 and self.recipe.sharpness.radius:
            raise ConfigError("recipe.sharpness needs the whole batch at once: use trainer.accumulate=1.")
        every = self.validate_every
        if self.recipe.epochs % every:
            raise ConfigError(
                f"recipe.epochs ({self.recipe.epochs}) must be a multiple of split.validate_every ({every})."
            )
        if every > 1 and self.recipe.schedule.name == "plateau":
            raise ConfigError(f"The plateau schedule needs split.validate_every=1, found {every}.")

    @property
    def validate_every(self) -> int:
        """Epochs between two validations: as configured, or so few that there are enough of them."""
        if self.split.holdout == 0:
            return 1
        if self.split.validate_every is not None:
            return self.split.validate_every
        if self.recipe.schedule.name == "plateau":
            return 1
        epochs = self.recipe.epochs
        # Divisors, so that the last epoch is validated.
        divisors = (every for every in range(1, epochs + 1) if epochs % every == 0)
        return max(every for every in divisors if epochs // every >= min(epochs, _MIN_VALIDATIONS))

    @classmethod
    def from_config(cls, config: Any) -> Settings:
        """The settings in a configuration."""
        values = {name: config.get(name) for name in get_type_hints(cls)}
        if values["logger"] is None:  # a run from before loggers could be chosen
            del values["logger"]
        return _checked(cls, values, "")


def _checked(kind: type[T], node: Any, name: str) -> T:
    """An instance of `kind` from a configuration node; a wrong key or type is an error of one sentence."""
    values: Any = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    if not isinstance(values, dict):
        raise ConfigError(f"{name} must be a group of values, found {values!r}.")
    types = get_type_hints(kind)
    inside = f"{name}." if name else ""
    for unknown in values.keys() - types.keys():
        raise ConfigError(f"There is no {inside}{unknown}; {name} has {', '.join(types)}.")
    return kind(**{key: _typed(types[key], value, f"{inside}{key}") for key, value in values.items()})


def _typed(kind: Any, value: Any, name: str) -> Any:
    if is_dataclass(kind):
        return _checked(kind, value, name)  # type: ignore[arg-type]
    allowed = get_args(kind) or (kind,)
    if is_dataclass(allowed[0]):
        return None if value is None else _checked(allowed[0], value, name)  # type: ignore[arg-type]
    if float in allowed and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        expected = " or ".join(_TYPE_NAMES[option] for option in allowed)
        raise ConfigError(f"{name} must be {expected}, found {value!r}.")
    return value


def _one_of(name: str, value: str, valid: Sequence[str]) -> None:
    if value not in valid:
        raise ConfigError(f"{name} must be one of {', '.join(valid)}, found {value!r}.")


def _within(
    name: str, value: float, *, least: float = -math.inf, above: float = -math.inf, below: float = math.inf
) -> None:
    if least <= value < below and value > above:
        return
    limits = (("at least", least), ("above", above), ("below", below))
    bounds = [f"{word} {bound:g}" for word, bound in limits if math.isfinite(bound)]
    raise ConfigError(f"{name} must be {' and '.join(bounds) or 'finite'}, found {value}.")
