"""Where the numbers come from."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["uniform"]


def uniform(rows: int, count: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Rows of ``count`` numbers from [0, 1), drawn where the generator lives, without waiting for the device."""
    travels = device.type == "cuda" and generator.device.type == "cpu"
    draws = torch.rand(rows, count, generator=generator, device=generator.device, pin_memory=travels)
    return draws.to(device, non_blocking=True)
