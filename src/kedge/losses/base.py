"""What every loss offers to training, whatever its formula."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kedge.errors import ConfigError

__all__ = ["RetrievalLoss", "check_count", "check_labels", "check_number", "check_switch", "in_full_precision"]


class RetrievalLoss(nn.Module):
    """A loss over embeddings and labels, with or without parameters of its own.

    Training registers it as a submodule beside the encoder, so its parameters are moved, optimised (in a group
    of their own), saved and resumed with everything else.
    """

    name: str
    """What models and tables call it."""
    heads: tuple[str, ...] = ("linear", "bounded", "none")
    """The encoder heads it can train; the first is taken where the user names none."""
    probe: ClassVar[dict[str, int] | None] = None
    """Where `heads` depend on the settings: sizes of a small loss that is built to see them, before the encoder."""
    uses_other_samples: ClassVar[bool] = True
    """Whether an image's loss depends on other samples of the batch; embeddings are then all-gathered under DDP.

    Otherwise the loss is a mean over images, plus parts that know none: means over parts of a batch can be averaged.
    """

    normalize: bool = False
    """Whether a model trained with it should divide its embeddings by their length."""
    lr_mult: float = 1.0
    """The learning rate of its own parameters under SGD, as a multiple of what the recipe says."""
    encoder_scale: float = 1.0
    """What the encoder sees of the loss's gradient under SGD; the loss's own parameters see all of it."""
    compiles: bool = False
    """Whether torch.compile gets through it in one piece: no value-dependent shapes, no random numbers."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "compares" in vars(cls):
            warnings.warn(
                f"{cls.__name__}.compares is now called uses_other_samples.", DeprecationWarning, stacklevel=2
            )
            cls.uses_other_samples = vars(cls)["compares"]

    def components(self, embeddings: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The parts of the loss by name; their sum is the loss."""
        raise NotImplementedError

    def mixed_components(
        self, embeddings: Tensor, labels: Tensor, others: Tensor, weights: Tensor
    ) -> dict[str, Tensor]:
        """The parts for mixed images: each a share `weights` of class `labels`, the rest of class `others`."""
        del embeddings, labels, others, weights
        raise ConfigError(f"The loss {self.name} takes no mixed images: set recipe.mixing.cutmix and .mixup to 0.")

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss, a scalar."""
        return functools.reduce(torch.add, self.components(embeddings, labels).values())

    def embed(self, outputs: Tensor) -> Tensor:
        """The embeddings that a model makes of the encoder's outputs: for most losses the outputs themselves."""
        return outputs

    def predict(self, embeddings: Tensor) -> Tensor | None:
        """The class of each embedding, or None where the loss knows no classes."""
        del embeddings
        return None

    @property
    def predicts_classes(self) -> bool:
        """Whether `predict` knows classes; validation then measures accuracy, otherwise 1-NN accuracy."""
        return type(self).predict is not RetrievalLoss.predict

    def extra_repr(self) -> str:
        """The settings, for printing."""
        names = inspect.signature(type(self)).parameters
        return ", ".join(f"{name}={vars(self)[name]!r}" for name in names if name in vars(self))


def in_full_precision(embeddings: Tensor) -> Tensor:
    """The embeddings in float32, or float64 where they are that already."""
    return embeddings if embeddings.dtype == torch.float64 else embeddings.float()


def check_number(name: str, value: Any, *, least: float = 0.0, above: bool = False, below: float = math.inf) -> None:
    """Refuse what is no number of at least (or, with `above`, more than) `least` and less than `below`."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and (value > least if above else value >= least) and value < below:
        return
    limit = f"{'above' if above else 'of at least'} {least:g}{f' and below {below:g}' if below < math.inf else ''}"
    raise ConfigError(f"{name} must be a number {limit}, found {value!r}.")


def check_count(name: str, value: Any, *, least: int = 1, otherwise: str = "") -> None:
    """Refuse what is no whole number of at least `least`; `otherwise` says what else would do."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return
    also = f", or {otherwise}" if otherwise else ""
    raise ConfigError(f"{name} must be a whole number of at least {least}{also}, found {value!r}.")


def check_switch(name: str, value: Any) -> None:
    """Refuse what is neither true nor false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, found {value!r}.")


def check_labels(labels: Tensor, num_classes: int) -> None:
    """Refuse labels outside 0 … num_classes - 1 on the CPU; on a GPU, looking would mean to wait for it."""
    if labels.is_floating_point():
        raise ConfigError(f"labels must be integers, found {labels.dtype}.")
    if torch.compiler.is_compiling() or labels.device.type != "cpu" or labels.numel() == 0:
        return
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= num_classes:
        raise ConfigError(
            f"labels must lie in 0 … {num_classes - 1}, found {low if low < 0 else high}: "
            "check the labels, or raise num_classes."
        )
