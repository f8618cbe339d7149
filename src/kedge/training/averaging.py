"""A running average of the weights, which is validated and kept in their place."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

__all__ = ["Averaging"]


class Averaging(Callback):
    """Averages weights and statistics over the last steps, the latest most: so many as `share` of the run."""

    def __init__(self, share: float) -> None:
        self.share = share
        self._own: dict[str, Tensor] = {}
        self._average: dict[str, Tensor] = {}
        self._spare: list[Tensor] = []
        self._steps = 0
        self._most = 1.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take hold of what is averaged."""
        self._most = max(1.0, self.share * float(trainer.estimated_stepping_batches))
        self._own = {name: value for name, value in pl_module.state_dict().items() if value.is_floating_point()}
        begun = self._average or self._own
        self._average = {name: begun[name].to(own.device, copy=True) for name, own in self._own.items()}

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move the average towards the weights, where they have moved."""
        del pl_module, outputs, batch
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        self._steps += 1
        # Early on the average is one of few steps.
        span = min(self._steps, self._most)
        torch._foreach_lerp_(list(self._average.values()), list(self._own.values()), 1 / span)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Look at the average."""
        del trainer, pl_module
        self._swap()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Go on with the weights."""
        del trainer, pl_module
        self._swap()

    def _swap(self) -> None:
        """Exchange the values, not the memory, which a compiled step knows by its place."""
        own, average = list(self._own.values()), list(self._average.values())
        self._spare = self._spare or [torch.empty_like(value) for value in own]
        torch._foreach_copy_(self._spare, own)
        torch._foreach_copy_(own, average)
        torch._foreach_copy_(average, self._spare)

    @property
    def weights(self) -> dict[str, Tensor]:
        """The average, by the names of the weights."""
        return self._average

    def state_dict(self) -> dict[str, Any]:
        """The average so far."""
        return {"average": self._average, "steps": self._steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self._average, self._steps = state_dict["average"], state_dict["steps"]
