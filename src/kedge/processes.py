"""The processes that train or evaluate together, where there are several: who we are, and what all must know."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from kedge.errors import KedgeError

__all__ = [
    "agreed",
    "average_over_processes_",
    "gather_rows",
    "gather_with_gradient",
    "join_processes",
    "leader_first",
    "leads",
    "one_voice",
    "own_share",
    "process_count",
    "process_rank",
    "record_failure",
    "started_together",
]

T = TypeVar("T")

_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""What torchrun says to those that it starts."""
_PATIENCE = timedelta(days=7)
"""So long others wait for what the leader does alone, such as decoding a dataset."""


def started_together() -> bool:
    """Whether torchrun, or something like it, started this process as one of several."""
    return all(name in os.environ for name in _NAMES) and int(os.environ["WORLD_SIZE"]) > 1


def join_processes(device: str) -> None:
    """Meet the others, if this process was started as one of several; on GPUs, take the one that is ours."""
    if not started_together() or dist.is_initialized():
        return
    if device == "cuda":
        own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(own)
        dist.init_process_group("nccl", device_id=own)
    else:
        dist.init_process_group("gloo")


def process_count() -> int:
    """How many processes work together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def process_rank() -> int:
    """Our number among them, from 0."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ["RANK"]) if started_together() else 0


def leads() -> bool:
    """Whether this is the process that writes and speaks for all."""
    return process_rank() == 0


def own_share(size: int, *, whole: int = 1) -> range:
    """Our rows of so many: in the order of ranks, cut at multiples of `whole` where there are enough of them."""
    unit = whole if -(-size // whole) >= process_count() else 1
    units = -(-size // unit)
    start, stop = (min(size, unit * (units * one // process_count())) for one in (process_rank(), process_rank() + 1))
    return range(start, stop)


def gather_rows(values: Tensor) -> Tensor:
    """The rows of all processes, which may have different numbers of them, in the order of ranks."""
    if process_count() == 1:
        return values
    own = torch.tensor([len(values)], device=values.device)
    sizes = [torch.zeros_like(own) for _ in range(process_count())]
    dist.all_gather(sizes, own)
    lengths = [int(size) for size in sizes]
    padded = values.new_zeros(max(lengths), *values.shape[1:])
    padded[: len(values)] = values
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])


def gather_with_gradient(values: Tensor) -> Tensor:
    """The rows of all processes, as many from each; a gradient finds its way back, summed over the processes."""
    import torch.distributed.nn.functional as collective

    return torch.cat(collective.all_gather(values))  # type: ignore[no-untyped-call]


@torch.no_grad()
def average_over_processes_(values: Sequence[Tensor]) -> None:
    """Put the mean over all processes in the place of each value."""
    if process_count() == 1 or not values:
        return
    together = torch.cat([value.reshape(-1) for value in values])
    dist.all_reduce(together)
    together /= process_count()
    means = torch.split(together, [value.numel() for value in values])
    torch._foreach_copy_(list(values), [mean.view_as(value) for mean, value in zip(means, values, strict=True)])


def agreed(value: T) -> T:
    """What the leader says."""
    if process_count() == 1:
        return value
    said = [value]
    dist.broadcast_object_list(said, src=0, group=_patient(dist.group.WORLD))
    return said[0]


@contextmanager
def leader_first() -> Iterator[None]:
    """The leader goes through the block first, so that the others find what it downloads or writes."""
    if not leads():
        _wait()
    try:
        yield
    finally:
        if leads():  # also where it fails: the others then meet the same
            _wait()


@contextmanager
def one_voice() -> Iterator[None]:
    """What all processes refuse is told once: the leader raises, from the others only torchrun hears."""
    try:
        yield
    except KedgeError as error:
        if leads():
            raise
        record_failure(error)
        raise SystemExit(2) from None


def record_failure(error: BaseException) -> None:
    """Tell whoever started this process why it ends."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        get_error_handler().record_exception(error)


def _wait() -> None:
    if process_count() > 1:
        dist.barrier(group=_patient(dist.group.WORLD))


@functools.lru_cache(maxsize=1)
def _patient(world: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The same processes, on the CPU, where waiting may last."""
    del world
    return dist.new_group(backend="gloo", timeout=_PATIENCE)  # type: ignore[return-value]
