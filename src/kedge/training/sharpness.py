"""Sharpness-aware minimisation (SAM): each step follows the gradient from where the loss nearby is highest."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["Climb"]


class Climb:
    """Moves a network's weights up their gradient, and back again."""

    def __init__(self, network: nn.Module, radius: float) -> None:
        self.radius = radius
        self.up = False
        """Whether the weights are away from their place."""
        self.weights: list[Tensor] = [parameter for parameter in network.parameters() if parameter.requires_grad]
        # Statistics too: a second look at the same batch must not count twice.
        self._changing = [*self.weights, *(value for value in network.buffers() if value.is_floating_point())]
        self._kept: list[Tensor] = []

    @torch.no_grad()
    def ascend(self, gradients: Sequence[Tensor]) -> None:
        """Move by `radius`, all weights together, in the direction of `gradients`."""
        self._kept = self._kept or [torch.empty_like(value) for value in self._changing]
        torch._foreach_copy_(self._kept, self._changing)
        self.up = True
        length = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients))))
        steps = torch._foreach_mul(list(gradients), self.radius / (length + 1e-12))
        torch._foreach_add_(self.weights, list(steps))

    @torch.no_grad()
    def descend(self) -> None:
        """Back to where the weights were."""
        torch._foreach_copy_(self._changing, self._kept)
        self.up = False
