"""A recipe: everything about a training run that is neither data, encoder nor loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, TypeVar, get_args, get_type_hints

from omegaconf import OmegaConf

from kedge.errors import ConfigError
from kedge.images import Augmentation

__all__ = ["Optimizer", "Recipe", "Schedule", "Split"]

T = TypeVar("T")

WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", type(None): "null"}


@dataclass(frozen=True)
class Optimizer:
    """SGD with Nesterov momentum, or Adam."""

    name: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    anchor_lr: float = 1.0

    def __post_init__(self) -> None:
        _one_of("recipe.optimizer.name", self.name, ("sgd", "adam"))
        _positive("recipe.optimizer.lr", self.lr)


@dataclass(frozen=True)
class Schedule:
    """How the learning rate moves: one cycle per run, halved on a plateau of the target metric, or constant."""

    name: str = "one_cycle"
    warmup: float = 0.2
    factor: float = 0.5
    patience: int = 6
    patience_few_shot: int = 9

    def __post_init__(self) -> None:
        _one_of("recipe.schedule.name", self.name, ("one_cycle", "plateau", "constant"))
        if not 0 < self.warmup < 1:
            raise ConfigError(f"recipe.schedule.warmup must lie between 0 and 1, found {self.warmup}.")


@dataclass(frozen=True)
class Recipe:
    """Epochs, batches, optimiser, schedule and augmentation of one run."""

    name: str = "kedge"
    epochs: int = 60
    batch_size: int = 512
    freeze: bool = False
    optimizer: Optimizer = field(default_factory=Optimizer)
    loss_scale: float = 1.0
    schedule: Schedule = field(default_factory=Schedule)
    augmentation: Augmentation = field(default_factory=Augmentation)
    standardise: bool = False
    size: int | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "loss_scale"):
            _positive(f"recipe.{name}", getattr(self, name))

    @classmethod
    def from_config(cls, node: Any) -> Recipe:
        """The recipe a configuration describes, checked."""
        return _checked(cls, node, "recipe")


@dataclass(frozen=True)
class Split:
    """Which training images are trained on."""

    holdout: float = 0.1
    shots: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.holdout < 1:
            raise ConfigError(f"split.holdout must be 0 or a share below 1, found {self.holdout}.")
        if self.shots is not None:
            _positive("split.shots", self.shots)

    @classmethod
    def from_config(cls, node: Any) -> Split:
        """The split a configuration describes, checked."""
        return _checked(cls, node, "split")


def _checked(kind: type[T], node: Any, name: str) -> T:
    """`kind` made of the node's values; a wrong name or type is one sentence that says where."""
    values: Any = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    if not isinstance(values, dict):
        raise ConfigError(f"{name} must be a group of values, found {values!r}.")
    types = get_type_hints(kind)
    for unknown in values.keys() - types.keys():
        raise ConfigError(f"There is no {name}.{unknown}; {name} has {', '.join(types)}.")
    return kind(**{key: _typed(types[key], value, f"{name}.{key}") for key, value in values.items()})


def _typed(kind: Any, value: Any, name: str) -> Any:
    if is_dataclass(kind):
        return _checked(kind, value, name)  # type: ignore[arg-type]
    allowed = get_args(kind) or (kind,)
    if float in allowed and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        wanted = " or ".join(WORDS.get(one, one.__name__) for one in allowed)
        raise ConfigError(f"{name} must be {wanted}, found {value!r}.")
    return value


def _one_of(name: str, value: str, valid: Sequence[str]) -> None:
    if value not in valid:
        raise ConfigError(f"{name} must be one of {', '.join(valid)}, found {value!r}.")


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{name} must be positive, found {value}.")
