"""Training of a small head and class anchors on vectors, with plain torch on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from kedge.encoders.heads import BoundedHead
from kedge.errors import ConfigError
from kedge.losses import CAMLoss
from kedge.losses.base import check_count, check_number

__all__ = ["Fitted", "Head", "fit_head"]

Head = Literal["hidden", "linear", "identity"]


@dataclass(frozen=True)
class Fitted:
    """Head and anchors in double precision, so that a result does not depend on the batch it is computed in."""

    network: nn.Module
    anchors: np.ndarray

    @torch.no_grad()
    def embed(self, vectors: np.ndarray) -> np.ndarray:
        """The embeddings of vectors."""
        return np.asarray(self.network(torch.from_numpy(np.array(vectors, dtype=np.float64))))


class _Standardize(nn.Module):
    """Features with mean 0 and variance 1, as the training data has them; those that never change become 0."""

    mean: Tensor
    scale: Tensor

    def __init__(self, features: Tensor) -> None:
        super().__init__()
        deviation = features.std(dim=0, correction=0)
        constant = deviation <= 1e-12 * features.abs().amax(dim=0)
        self.register_buffer("mean", features.mean(dim=0))
        self.register_buffer("scale", torch.where(constant, 0, 1 / deviation.masked_fill(constant, 1)))

    def forward(self, features: Tensor) -> Tensor:
        """Standardise."""
        return (features - self.mean) * self.scale


def fit_head(
    vectors: np.ndarray,
    labels: np.ndarray,
    num_classes: int,
    *,
    head: Head,
    dim: int | None,
    hidden: int,
    margin: float,
    min_norm: float,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    weight_decay: float,
    seed: int,
) -> Fitted:
    """Train with the class anchor margin loss: SGD with momentum, its rate rising and falling once."""
    if head not in get_args(Head):
        raise ConfigError(f"head must be one of {', '.join(get_args(Head))}, found {head!r}.")
    for name, count in {"hidden": hidden, "epochs": epochs, "batch_size": batch_size}.items():
        check_count(name, count)
    check_number("learning_rate", learning_rate, above=True)
    check_number("weight_decay", weight_decay)
    width = vectors.shape[1]
    if dim is not None:
        check_count("dim", dim, otherwise="None")
        if head == "identity" and dim != width:
            raise ConfigError(f"With head='identity' dim must be the number of features, {width}, found {dim}.")
    dim = dim or (width if head == "identity" else num_classes)
    items, targets = torch.from_numpy(np.array(vectors, dtype=np.float64)), torch.from_numpy(np.array(labels))
    with _single_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = _network(head, items, dim, hidden).double()
        loss = CAMLoss(num_classes, dim, margin, min_norm).double()
        if head == "identity":
            # The vectors do not move, so the anchors start at their class means.
            with torch.no_grad():
                loss.anchors.copy_(
                    torch.stack([network(items[targets == label]).mean(0) for label in range(num_classes)])
                )
        _sgd(network, loss, items, targets, epochs, batch_size, learning_rate, weight_decay)
    network.eval().requires_grad_(False)
    return Fitted(network, loss.anchors.detach().numpy())


@contextmanager
def _single_thread() -> Iterator[None]:
    """For so little work one thread is faster, and the result is the same on every machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _network(head: Head, items: Tensor, dim: int, hidden: int) -> nn.Module:
    width = items.shape[1]
    layers: list[nn.Module] = [_Standardize(items)]
    if head == "hidden":
        layers += [nn.Linear(width, hidden), nn.ReLU(), BoundedHead(hidden, dim)]
    elif head == "linear":
        layers += [BoundedHead(width, dim)]
    return nn.Sequential(*layers)


def _sgd(
    network: nn.Module,
    loss: CAMLoss,
    items: Tensor,
    targets: Tensor,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    weight_decay: float,
) -> None:
    groups: list[dict[str, Any]] = [{"params": [loss.anchors]}]
    if weights := list(network.parameters()):
        groups.append({"params": weights, "weight_decay": weight_decay})
    optimizer = torch.optim.SGD(groups, lr=learning_rate, momentum=0.9)
    steps = epochs * -(-len(items) // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps + 1, pct_start=0.2)
    network.train()
    for _ in range(epochs):
        for rows in torch.split(torch.randperm(len(items)), batch_size):
            optimizer.zero_grad()
            loss(network(items[rows]), targets[rows]).backward()
            optimizer.step()
            schedule.step()
