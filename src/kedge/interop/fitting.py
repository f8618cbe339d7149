"""Training of a small head and class anchors on vectors, with plain torch on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from kedge.encoders.heads import BoundedHead
from kedge.errors import ConfigError
from kedge.losses import CAMLoss
from kedge.losses.base import check_count, check_number

__all__ = ["Head", "HeadOptions", "fit_head"]

Head = Literal["hidden", "linear", "identity"]


@dataclass(kw_only=True, eq=False, repr=False)
class HeadOptions:
    """How a head and anchors are trained; the estimators' parameters."""

    head: Head = "hidden"
    dim: int | None = None
    hidden: int = 128
    margin: float = 2.0
    min_norm: float = 1.0
    epochs: int = 60
    batch_size: int = 128
    learning_rate: float = 0.1
    weight_decay: float = 5e-4


def fit_head(
    options: HeadOptions, vectors: np.ndarray, labels: np.ndarray, num_classes: int, seed: int
) -> tuple[nn.Module, np.ndarray]:
    """Head and anchors after training with CAMLoss: SGD with momentum, its rate rising and falling once.

    `vectors` are standardised. In double precision, so that a result does not depend on the batch it is computed in.
    """
    width = vectors.shape[1]
    _check(options, width)
    dim = options.dim or (width if options.head == "identity" else num_classes)
    items, targets = torch.from_numpy(vectors), torch.from_numpy(np.array(labels))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        if options.head == "hidden":
            layers = [nn.Linear(width, options.hidden), nn.ReLU(), BoundedHead(options.hidden, dim)]
        elif options.head == "linear":
            layers = [BoundedHead(width, dim)]
        network = nn.Sequential(*layers).double()
        loss = CAMLoss(num_classes, dim, options.margin, options.min_norm).double()
        if options.head == "identity":
            # The vectors do not move, so the anchors start at their class means.
            means = [items[targets == label].mean(0) for label in range(num_classes)]
            loss.anchors.data.copy_(torch.stack(means))
        _sgd(options, network, loss, items, targets)
    return network.eval().requires_grad_(False), loss.anchors.detach().numpy()


def _check(options: HeadOptions, width: int) -> None:
    if options.head not in get_args(Head):
        raise ConfigError(f"head must be one of {', '.join(get_args(Head))}, found {options.head!r}.")
    for name in ("hidden", "epochs", "batch_size"):
        check_count(name, getattr(options, name))
    check_number("learning_rate", options.learning_rate, above=True)
    check_number("weight_decay", options.weight_decay)
    if options.dim is not None:
        check_count("dim", options.dim, otherwise="None")
        if options.head == "identity" and options.dim != width:
            raise ConfigError(f"With head='identity' dim must be the number of features, {width}, found {options.dim}.")


def _sgd(options: HeadOptions, network: nn.Module, loss: CAMLoss, items: Tensor, targets: Tensor) -> None:
    groups: list[dict[str, Any]] = [{"params": [loss.anchors]}]
    if weights := list(network.parameters()):
        groups.append({"params": weights, "weight_decay": options.weight_decay})
    rate = options.learning_rate
    optimizer = torch.optim.SGD(groups, lr=rate, momentum=0.9)
    steps = options.epochs * -(-len(items) // options.batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps + 1, pct_start=0.2)
    network.train()
    for _ in range(options.epochs):
        for rows in torch.split(torch.randperm(len(items)), options.batch_size):
            optimizer.zero_grad()
            loss(network(items[rows]), targets[rows]).backward()
            optimizer.step()
            schedule.step()
