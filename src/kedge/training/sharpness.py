"""Sharpness-aware minimisation (SAM): each step follows the gradient from where the loss nearby is highest."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["Climb"]


class Climb:
    """Moves a network's weights up their gradient, and back again."""

    def __init__(self, network: nn.Module, radius: float) -> None:
        self.network, self.radius = network, radius
        self.up = False
        """Whether the weights are away from their place."""
        self._changing: list[Tensor] = []
        self._kept: list[Tensor] = []

    @property
    def weights(self) -> list[Tensor]:
        """What moves."""
        return [parameter for parameter in self.network.parameters() if parameter.requires_grad]

    @torch.no_grad()
    def ascend(self, gradients: Sequence[Tensor | None]) -> None:
        """Move by `radius`, all weights together, in the direction of `gradients`."""
        pairs = [(weight, slope) for weight, slope in zip(self.weights, gradients, strict=True) if slope is not None]
        if not pairs:
            return
        if not self._kept:
            # Statistics too: a second look at the same batch must not count twice. Only now: a network that is moved
            # to a device gets new ones.
            statistics = (value for value in self.network.buffers() if value.is_floating_point())
            self._changing = [*self.weights, *statistics]
            self._kept = [torch.empty_like(value) for value in self._changing]
        torch._foreach_copy_(self._kept, self._changing)
        self.up = True
        weights, slopes = (list(part) for part in zip(*pairs, strict=True))
        length = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(slopes)))
        torch._foreach_add_(weights, list(torch._foreach_mul(slopes, self.radius / (length + 1e-12))))

    @torch.no_grad()
    def descend(self) -> None:
        """Back to where the weights were."""
        torch._foreach_copy_(self._changing, self._kept)
        self.up = False
