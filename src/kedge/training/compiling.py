"""The training step compiled for a GPU, or as it is where that fails."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from kedge.training.step import Draws, Outcome, Step

__all__ = ["AUTO", "Fast", "Forward", "compiled", "use_repeatable_kernels"]

AUTO = "graph"
Forward = Callable[[Tensor, Tensor, Draws], Outcome]
TrainingBatch = tuple[Tensor, Tensor, Draws]

_MODES = {"default": None, "graph": None, "max-autotune": "max-autotune-no-cudagraphs"}
"""What torch calls them; a CUDA graph is recorded here, over forward and backward in one."""
_RECORDED = ("graph", "max-autotune")
_RECORDS = ("cuda",)


class Fast(NamedTuple):
    """What training calls, whether that leaves the gradients as well, and the seconds it took to make."""

    forward: Forward
    with_gradients: bool
    seconds: float


def use_repeatable_kernels() -> None:
    """Ask cuDNN for kernels that always add in one order, and not to search for others: one seed, one result."""
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def compiled(
    step: Step, batch: TrainingBatch, mode: str, *, scale: float, autocast: torch.dtype | None, record: bool = True
) -> Fast:
    """The step, compiled and tried forward and backward on a batch like those to come.

    Small pictures leave a GPU waiting for the host that launches kernel by kernel, so that on a GPU forward and
    backward become one graph and one launch; the gradients of `scale` times the loss then always lie in the same
    place, and must be neither cleared nor computed again. Without `record` they are left to autograd, as they must
    be where gradients are added up or exchanged with other processes. A loss that looks at values in the middle of its
    work stays outside of what is compiled. What cannot be compiled trains as it is, with a warning. Weights, statistics
    and chance are left as they were.
    """
    started = time.monotonic()
    device = batch[0].device
    before = copy.deepcopy(step.state_dict())
    chance = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    # As the trainer has it: another setting would mean to compile again.
    cast = torch.autocast(device.type, autocast or torch.bfloat16, enabled=autocast is not None, cache_enabled=False)
    # In a sweep, each run's step is one more variant of the same code, of which torch compiles eight.
    torch.compiler.reset()
    step.train()
    make = functools.partial(_tried, step, _MODES[mode], batch, cast)
    forward, recorded = _unless_it_fails(make, "be compiled and trains as it is"), None
    recordable = (
        record and mode in _RECORDED and device.type in _RECORDS and step.loss.compiles and autocast != torch.float16
    )
    if forward is not None and recordable:
        make = functools.partial(_record, step, forward, batch, scale, cast)
        recorded = _unless_it_fails(make, "be recorded and is launched kernel by kernel")
    if recorded is None:
        step.zero_grad(set_to_none=True)
    step.load_state_dict(before)
    torch.set_rng_state(chance[0])
    if chance[1] is not None:
        torch.cuda.set_rng_state(chance[1], device)
    used = next(one for one in (recorded, forward, step) if one is not None)
    return Fast(used, recorded is not None, time.monotonic() - started)


def _compile(step: Step, mode: str | None) -> Forward:
    if step.loss.compiles and not step.gathers:
        whole: Any = torch.compile(step, mode=mode, dynamic=False)
        return whole  # type: ignore[no-any-return]
    embed: Any = torch.compile(step.embed, mode=mode, dynamic=False)
    return lambda inputs, labels, draws: step.compare(step.by_own_chance(embed, inputs, draws), labels)


def _unless_it_fails(make: Callable[[], Forward], consequence: str) -> Forward | None:
    try:
        return make()
    except Exception as error:  # whatever a compiler, its cache or a missing tool may raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        rank_zero_warn(f"The step could not {consequence}, more slowly: {reason}")
        return None


def _tried(step: Step, mode: str | None, batch: TrainingBatch, cast: AbstractContextManager[Any]) -> Forward:
    forward = _compile(step, mode)
    _try(step, forward, batch, cast)
    return forward


def _try(step: Step, forward: Forward, batch: TrainingBatch, cast: AbstractContextManager[Any]) -> None:
    for _ in range(3):
        with cast:
            loss = forward(*batch).loss
        loss.backward()  # type: ignore[no-untyped-call]
        step.zero_grad(set_to_none=True)


class _Recorded:
    """Forward and backward in one launch, which reads from and writes to places that never change."""

    def __init__(self, step: Step, batch: TrainingBatch, launch: Callable[[], None], outcome: Outcome) -> None:
        self.batch, self.launch, self.outcome = batch, launch, outcome
        self.gradients = [(one, one.grad) for one in step.parameters() if one.grad is not None]

    def __call__(self, inputs: Tensor, labels: Tensor, draws: Draws) -> Outcome:
        places, new = _tensors(self.batch), _tensors((inputs, labels, draws))
        for place, values in zip(places, new, strict=True):
            place.copy_(values, non_blocking=True)
        self.launch()
        # Whoever cleared the gradients meanwhile (the trainer does, before training and around validation) has let
        # go of the places that were written to.
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        return self.outcome


def _record(
    step: Step, forward: Forward, batch: TrainingBatch, scale: float, cast: AbstractContextManager[Any]
) -> Forward:
    inputs, labels, draws = batch
    own = inputs.clone(), labels.clone(), Draws(*(part.clone() for part in draws))
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _try(step, forward, own, cast)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with cast:
            outcome = forward(*own)
        (outcome.loss * scale).backward()  # type: ignore[no-untyped-call]
    return _Recorded(step, own, graph.replay, Outcome(outcome.loss.detach(), outcome.counted, outcome.names))


def _tensors(batch: TrainingBatch) -> list[Tensor]:
    inputs, labels, draws = batch
    return [inputs, labels, *draws]
