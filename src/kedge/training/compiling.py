"""The training step compiled for a GPU, or as it is where that fails."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from kedge.training.step import Draws, Outcome, Step

__all__ = ["AUTO", "Fast", "compiled"]

AUTO = "reduce-overhead"
"""One launch for a whole graph: small pictures leave a GPU waiting for the host that launches kernel by kernel."""

Forward = Callable[[Tensor, Tensor, Draws], Outcome]


class Fast(NamedTuple):
    """What training calls, and the seconds it took to make."""

    forward: Forward
    seconds: float


def compiled(step: Step, batch: tuple[Tensor, Tensor, Draws], mode: str, *, autocast: torch.dtype | None) -> Fast:
    """The step, compiled and tried forward and backward on a batch like those to come.

    A loss that waits for the device in the middle of its work stays outside. What cannot be compiled trains as it
    is, with a warning. Weights, statistics and chance are left as they were.
    """
    started = time.monotonic()
    device = batch[0].device
    before = copy.deepcopy(step.state_dict())
    chance = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    whole = step.loss.compiles
    fast: Any = torch.compile(step if whole else step.embed, mode=None if mode == "default" else mode, dynamic=False)

    def forward(inputs: Tensor, labels: Tensor, draws: Draws) -> Outcome:
        # Its outputs live in memory of the graph, which the next step may use again.
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        if whole:
            outcome: Outcome = fast(inputs, labels, draws)
            return outcome
        return step.compare(fast(inputs, draws), labels)

    used: Forward = forward
    step.train()
    try:
        for _ in range(3):
            with torch.autocast(device.type, autocast or torch.bfloat16, enabled=autocast is not None):
                loss = forward(*batch).loss
            loss.backward()  # type: ignore[no-untyped-call]
            step.zero_grad(set_to_none=True)
    except Exception as error:  # whatever a compiler, its cache or a missing tool may raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        rank_zero_warn(f"The step could not be compiled and trains as it is, more slowly: {reason}")
        used = step
    step.zero_grad(set_to_none=True)
    step.load_state_dict(before)
    torch.set_rng_state(chance[0])
    if chance[1] is not None:
        torch.cuda.set_rng_state(chance[1], device)
    return Fast(used, time.monotonic() - started)
