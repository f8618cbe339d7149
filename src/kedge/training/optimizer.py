"""Optimizer with three parameter groups (backbone, head, loss), and the learning-rate schedule."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from kedge.losses import RetrievalLoss
from kedge.training.config import Recipe, Schedule

__all__ = ["Scheduler", "build_optimizer", "build_scheduler"]

Scheduler = OneCycleLR | ReduceLROnPlateau | None

_START, _MIN_FINAL = 1 / 25, 4e-6
"""First and smallest last rate of one cycle, as shares of the highest: OneCycleLR divides by the last rate."""


def build_optimizer(
    network: nn.Module, head: nn.Module, loss: RetrievalLoss, recipe: Recipe, *, bounded: bool, backbone_lr_mult: float
) -> torch.optim.Optimizer:
    """The recipe's optimizer; the loss's own parameters have no weight decay.

    The loss is multiplied by `backbone_lr_mult`; the rates of those who should not see that are divided by it.
    """
    options = recipe.optimizer
    in_head = {id(parameter) for parameter in head.parameters()}
    backbone = [p for p in network.parameters() if id(p) not in in_head and p.requires_grad]
    loss_lr = options.lr * options.anchor_lr * (loss.lr_mult if options.name == "sgd" else 1.0) / backbone_lr_mult
    groups: list[dict[str, Any]] = [
        {"name": "backbone", "params": backbone, "lr": options.lr},
        {"name": "head", "params": list(head.parameters()), "lr": options.lr / (backbone_lr_mult if bounded else 1.0)},
        {"name": "loss", "params": list(loss.parameters()), "lr": loss_lr, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    common: dict[str, Any] = {"lr": options.lr, "weight_decay": options.weight_decay}
    common["fused"] = groups[0]["params"][0].device.type == "cuda"
    if options.name == "sgd":
        return torch.optim.SGD(groups, momentum=options.momentum, nesterov=options.momentum > 0, **common)
    return (torch.optim.AdamW if options.name == "adamw" else torch.optim.Adam)(groups, **common)


def build_scheduler(
    optimizer: torch.optim.Optimizer, schedule: Schedule, *, total_steps: int, maximize: bool, few_shot: bool
) -> Scheduler:
    """One cycle is stepped after every optimizer step, a plateau schedule with each epoch's target metric."""
    if schedule.name == "one_cycle":
        total_steps = max(2, total_steps)
        # torch divides by zero where the warm-up is exactly one step.
        warmup = schedule.warmup / 2 if schedule.warmup * total_steps == 1 else schedule.warmup
        return OneCycleLR(
            optimizer,
            [group["lr"] for group in optimizer.param_groups],
            total_steps=total_steps,
            pct_start=warmup,
            cycle_momentum=False,
            div_factor=1 / _START,
            final_div_factor=_START / max(schedule.final, _MIN_FINAL),
        )
    if schedule.name == "plateau":
        patience = schedule.patience_few_shot if few_shot else schedule.patience
        mode: Literal["min", "max"] = "max" if maximize else "min"
        return ReduceLROnPlateau(optimizer, mode=mode, factor=schedule.factor, patience=patience)
    return None
