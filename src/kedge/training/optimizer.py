"""Optimizer with three parameter groups (backbone, head, loss), learning-rate schedule, SAM and EMA."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from kedge.losses import RetrievalLoss
from kedge.training.config import Recipe, Schedule

__all__ = ["EMA", "SAM", "Scheduler", "build_optimizer", "build_scheduler"]

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
    common["fused"] = groups[0]["params"][0].device.type == "cuda" or options.name == "adamw"
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


class SAM:
    """Moves a network's weights up their gradient, where the step's gradient is taken, and back again.

    Foret et al., Sharpness-Aware Minimization for Efficiently Improving Generalization (https://arxiv.org/abs/2010.01412).
    """

    def __init__(self, network: nn.Module, radius: float) -> None:
        self.network, self.radius = network, radius
        self.perturbed = False
        """Whether the weights are away from their place."""
        self._live: list[Tensor] = []
        self._saved: list[Tensor] = []

    @property
    def weights(self) -> list[Tensor]:
        """The weights that are perturbed."""
        return [parameter for parameter in self.network.parameters() if parameter.requires_grad]

    @torch.no_grad()
    def perturb(self, gradients: Sequence[Tensor | None]) -> None:
        """Move all weights together by `radius` in the direction of `gradients`."""
        pairs = [(weight, grad) for weight, grad in zip(self.weights, gradients, strict=True) if grad is not None]
        if not pairs:
            return
        if not self._saved:
            # Batch statistics too: the second forward of the same batch must not count twice. Collected only now,
            # since moving a network to a device replaces its buffers.
            self._live = [*self.weights, *(value for value in self.network.buffers() if value.is_floating_point())]
            self._saved = [torch.empty_like(value) for value in self._live]
        torch._foreach_copy_(self._saved, self._live)
        self.perturbed = True
        weights, grads = (list(part) for part in zip(*pairs, strict=True))
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        torch._foreach_add_(weights, list(torch._foreach_mul(grads, self.radius / (norm + 1e-12))))

    @torch.no_grad()
    def restore(self) -> None:
        """Put weights and statistics back, where they were moved."""
        if self.perturbed:
            torch._foreach_copy_(self._live, self._saved)
            self.perturbed = False


class EMA:
    """Exponential moving average of a module's weights and statistics, over about `horizon` steps."""

    def __init__(self, module: nn.Module, horizon: float) -> None:
        self.horizon = max(1.0, horizon)
        self.updates = 0
        self._live = {name: value for name, value in module.state_dict().items() if value.is_floating_point()}
        self.average = {name: value.clone() for name, value in self._live.items()}
        """The averaged weights by name."""
        self._spare: list[Tensor] = []

    def update(self) -> None:
        """Take in the weights of one more step."""
        self.updates += 1
        # At first a plain mean of the few steps that there are.
        weight = 1 / min(self.updates, self.horizon)
        torch._foreach_lerp_(list(self.average.values()), list(self._live.values()), weight)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The module has the averaged weights inside the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        """Exchange values, not memory, whose addresses a compiled step has recorded."""
        live, average = list(self._live.values()), list(self.average.values())
        self._spare = self._spare or [torch.empty_like(value) for value in live]
        torch._foreach_copy_(self._spare, live)
        torch._foreach_copy_(live, average)
        torch._foreach_copy_(average, self._spare)

    def state_dict(self) -> dict[str, Any]:
        """The average and the number of its updates."""
        return {"average": self.average, "steps": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.updates = state["steps"]
        for name, value in self.average.items():
            value.copy_(state["average"][name])
