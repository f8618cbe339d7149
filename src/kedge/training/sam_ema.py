"""Sharpness-aware minimisation (SAM) and an exponential moving average (EMA) of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["EMA", "SAM"]


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
