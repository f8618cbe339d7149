"""Configuration of a run as checked dataclasses: everything that is neither data, encoder nor loss."""

from __future__ import annotations

import operator
import warnings
from dataclasses import dataclass, field, is_dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf

from kedge.errors import ConfigError
from kedge.images import Augmentation, Mixing

__all__ = [
    "CSV",
    "Loggers",
    "MLflow",
    "Optimizer",
    "Recipe",
    "Sam",
    "Schedule",
    "Settings",
    "Split",
    "TensorBoard",
    "Trainer",
    "WandB",
]

T = TypeVar("T")

_MIN_VALIDATIONS = 15
"""Of a run, where it has so many epochs."""
_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", type(None): "null"}


_LIMITS = {"at least": operator.ge, "above": operator.gt, "below": operator.lt}
"""What the limits of a number in `Annotated` are called."""

Positive = Annotated[float, ("above", 0)]
NonNegative = Annotated[float, ("at least", 0)]
Share = Annotated[float, ("at least", 0), ("below", 1)]
InnerShare = Annotated[float, ("above", 0), ("below", 1)]
Count = Annotated[int, ("at least", 1)]
Index = Annotated[int, ("at least", 0)]


@dataclass(frozen=True)
class Optimizer:
    """SGD with Nesterov momentum, Adam, or AdamW (decoupled weight decay)."""

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: Positive = 0.1
    momentum: Share = 0.9
    weight_decay: NonNegative = 5e-4
    anchor_lr: NonNegative = 1.0
    clip: NonNegative = 0.0


@dataclass(frozen=True)
class Schedule:
    """How the learning rate moves: one cycle per run, halved on a plateau of the target metric, or constant."""

    name: Literal["one_cycle", "plateau", "constant"] = "one_cycle"
    warmup: InnerShare = 0.2
    final: Share = 0.0
    factor: InnerShare = 0.5
    patience: Index = 6
    patience_few_shot: Index = 9


@dataclass(frozen=True)
class Sam:
    """Sharpness-aware minimisation (SAM): radius of the perturbation, and the share of the run at which it starts."""

    radius: NonNegative = 0.0
    start: Share = 0.5


@dataclass(frozen=True)
class Recipe:
    """Epochs, batches, optimiser, schedule and augmentation of one run."""

    name: str = "kedge"
    epochs: Count = 100
    batch_size: Annotated[int, ("at least", 2)] = 512  # batch normalisation has no statistics of a single image
    per_class: Count | None = None
    views: Count = 1
    freeze: bool = False
    optimizer: Optimizer = field(default_factory=Optimizer)
    backbone_lr_mult: Positive = 1.0
    schedule: Schedule = field(default_factory=Schedule)
    augmentation: Augmentation = field(default_factory=Augmentation)
    mixing: Mixing = field(default_factory=Mixing)
    ema: Share = 0.0
    sam: Sam = field(default_factory=Sam)
    normalize: bool = False
    flip_tta: bool = False
    size: Count | None = None


@dataclass(frozen=True)
class Split:
    """Which training images are trained on."""

    holdout: Share = 0.1
    unseen: Share = 0.0
    shots: Count | None = None
    seed: Index = 0
    validate_every: Count | None = None


@dataclass(frozen=True)
class Trainer:
    """Hardware, precision, compilation and parallelism."""

    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    precision: Literal["auto", "32-true", "64-true", "bf16-mixed", "16-mixed"] = "auto"
    deterministic: bool = False
    data: Literal["auto", "device", "host"] = "auto"
    compile: Literal["auto", "off", "default", "reduce-overhead", "max-autotune", "graph"] = "auto"
    keep_every: Index = 0
    devices: Count | Literal["auto"] = 1
    num_nodes: Count = 1
    accumulate: Count = 1
    sync_batchnorm: bool = True

    def __post_init__(self) -> None:
        if self.compile == "graph":
            message = "trainer.compile=graph is now called reduce-overhead; the next release drops the old name."
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            object.__setattr__(self, "compile", "reduce-overhead")


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
    mode: Literal["online", "offline"] | None = None


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

    seed: Annotated[int, ("at least", 0), ("below", 2**32)] = 0
    recipe: Recipe = field(default_factory=Recipe)
    split: Split = field(default_factory=Split)
    trainer: Trainer = field(default_factory=Trainer)
    logger: Loggers = field(default_factory=lambda: Loggers(tensorboard=TensorBoard(needed=False)))

    def __post_init__(self) -> None:
        if self.trainer.precision == "16-mixed" and self.recipe.sam.radius:
            raise ConfigError("recipe.sam does not work with 16-mixed; use trainer.precision=bf16-mixed.")
        if self.trainer.accumulate > 1 and self.recipe.sam.radius:
            raise ConfigError("recipe.sam needs the whole batch at once; use trainer.accumulate=1.")
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
    types = get_type_hints(kind, include_extras=True)
    inside = f"{name}." if name else ""
    for unknown in values.keys() - types.keys():
        raise ConfigError(f"Unknown setting {inside + unknown!r}; {name} has {', '.join(types)}.")
    return kind(**{key: _typed(types[key], value, f"{inside}{key}") for key, value in values.items()})


def _typed(kind: Any, value: Any, name: str) -> Any:
    """`value`, if it is of the annotated type (or of one of several), one of its literals and within its bounds."""
    options = get_args(kind) if get_origin(kind) not in (None, Annotated, Literal) else (kind,)
    if is_dataclass(options[0]):
        return None if value is None and type(None) in options else _checked(options[0], value, name)  # type: ignore[arg-type]
    # The plain type behind `Annotated` or `Literal`.
    by_type = {
        str if get_origin(option) is Literal else get_args(option)[0] if get_args(option) else option: option
        for option in options
    }
    if type(value) is int and float in by_type:
        value = float(value)
    if type(value) not in by_type:
        raise ConfigError(f"{name} must be {' or '.join(_TYPE_NAMES[option] for option in by_type)}, found {value!r}.")
    option = by_type[type(value)]
    if get_origin(option) is Literal and value not in get_args(option):
        raise ConfigError(f"{name} must be one of {', '.join(get_args(option))}, found {value!r}.")
    limits = option.__metadata__ if get_origin(option) is Annotated else ()
    if not all(_LIMITS[word](value, bound) for word, bound in limits):  # also where it is NaN
        raise ConfigError(
            f"{name} must be {' and '.join(f'{word} {bound:g}' for word, bound in limits)}, found {value}."
        )
    return value
