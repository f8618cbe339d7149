"""The network and the change of its images compiled for a GPU, or as they are where that fails."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

__all__ = ["AUTO", "Fast", "compiled"]

AUTO = "default"
Change = Callable[[Tensor, Tensor], Tensor]


class Fast(NamedTuple):
    """What training calls, and the seconds it took to make."""

    network: Callable[[Tensor], Tensor]
    change: Change
    seconds: float


def compiled(
    network: nn.Module, change: Change, batch: tuple[Tensor, Tensor], mode: str, *, autocast: torch.dtype | None
) -> Fast:
    """`network` behind `change`, compiled and tried forward and backward on a batch like those to come.

    What cannot be compiled trains as it is, with a warning. Weights, statistics and chance are left as they were.
    """
    started = time.monotonic()
    device = batch[0].device
    before = copy.deepcopy(network.state_dict())
    chance = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    fast: Any = torch.compile(network, mode=None if mode == "default" else mode, dynamic=False)
    faster: Any = torch.compile(change, mode=None, dynamic=False)
    network.train()
    try:
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            with torch.autocast(device.type, autocast or torch.bfloat16, enabled=autocast is not None):
                fast(faster(*batch)).float().square().mean().backward()
    except Exception as error:  # whatever a compiler, its cache or a missing tool may raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        rank_zero_warn(f"The network could not be compiled and trains as it is, more slowly: {reason}")
        fast, faster = network, change
    network.zero_grad(set_to_none=True)
    network.load_state_dict(before)
    torch.set_rng_state(chance[0])
    if chance[1] is not None:
        torch.cuda.set_rng_state(chance[1], device)
    return Fast(fast, faster, time.monotonic() - started)
