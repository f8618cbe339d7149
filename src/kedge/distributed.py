"""torch.distributed helpers: rank and world size, gathering rows, and what rank 0 does first or alone."""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from kedge.errors import KedgeError

__all__ = [
    "all_gather_rows",
    "all_gather_with_grad",
    "all_reduce_mean_",
    "broadcast_object",
    "exit_together",
    "global_rank",
    "init_process_group",
    "is_rank_zero",
    "is_torchrun",
    "raise_on_rank_zero",
    "rank_zero_first",
    "record_failure",
    "shard_range",
    "world_size",
]

T = TypeVar("T")

_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_TIMEOUT = timedelta(days=7)
"""So long others wait for what rank 0 does alone, such as decoding a dataset."""


def is_torchrun() -> bool:
    """Whether torchrun, or something like it, started this process as one of several."""
    return all(name in os.environ for name in _TORCHRUN) and int(os.environ["WORLD_SIZE"]) > 1


def init_process_group(device: str) -> None:
    """Join the process group, if torchrun started this process; on GPUs, take the one of our local rank."""
    if not is_torchrun() or dist.is_initialized():
        return
    if device == "cuda":
        own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(own)
        dist.init_process_group("nccl", device_id=own)
    else:
        dist.init_process_group("gloo")
        # Its threads must end before the interpreter does, or the process may abort after its work is done.
        atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)


def exit_together() -> None:
    """End this process, and the others with it, where several work on CPUs; call it when all work is done.

    At once: gloo's threads may abort an interpreter that takes its time to end.
    """
    if world_size() > 1 and dist.get_backend() == "gloo":
        dist.barrier()
        dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def world_size() -> int:
    """How many processes work together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def global_rank() -> int:
    """Our number among them, from 0; known before the process group is there."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ["RANK"]) if is_torchrun() else 0


def is_rank_zero() -> bool:
    """Whether this is the process that writes and speaks for all."""
    return global_rank() == 0


def shard_range(size: int, *, whole: int = 1) -> range:
    """Our rows of so many: in the order of ranks, cut at multiples of `whole` where there are enough of them."""
    unit = whole if -(-size // whole) >= world_size() else 1
    units = -(-size // unit)
    start, stop = (min(size, unit * (units * rank // world_size())) for rank in (global_rank(), global_rank() + 1))
    return range(start, stop)


def all_gather_rows(values: Tensor) -> Tensor:
    """The rows of all processes, which may have different numbers of them, in the order of ranks."""
    if world_size() == 1:
        return values
    own = torch.tensor([len(values)], device=values.device)
    sizes = [torch.zeros_like(own) for _ in range(world_size())]
    dist.all_gather(sizes, own)
    lengths = [int(size) for size in sizes]
    padded = values.new_zeros(max(lengths), *values.shape[1:])
    padded[: len(values)] = values
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])


def all_gather_with_grad(values: Tensor) -> Tensor:
    """The rows of all processes, as many from each; a gradient finds its way back, summed over the processes."""
    import torch.distributed.nn.functional as collective

    return torch.cat(collective.all_gather(values))  # type: ignore[no-untyped-call]


@torch.no_grad()
def all_reduce_mean_(values: Sequence[Tensor]) -> None:
    """Put the mean over all processes in the place of each value."""
    if world_size() == 1 or not values:
        return
    flat = torch.cat([value.reshape(-1) for value in values])
    dist.all_reduce(flat)
    flat /= world_size()
    for value, mean in zip(values, torch.split(flat, [value.numel() for value in values]), strict=True):
        value.copy_(mean.view_as(value))


def broadcast_object(value: T) -> T:
    """Broadcast `value` from rank 0 and return it."""
    if world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0, group=_patient_group(dist.group.WORLD))
    return values[0]


@contextmanager
def rank_zero_first() -> Iterator[None]:
    """Rank 0 goes through the block first, so that the others find what it downloads or writes."""
    if not is_rank_zero():
        _barrier()
    try:
        yield
    finally:
        if is_rank_zero():  # also where it fails: the others then meet the same
            _barrier()


@contextmanager
def raise_on_rank_zero() -> Iterator[None]:
    """Let rank 0 alone raise an error that all ranks meet; the others record it for torchrun and exit."""
    try:
        yield
    except KedgeError as error:
        if is_rank_zero():
            raise
        record_failure(error)
        raise SystemExit(2) from None


def record_failure(error: BaseException) -> None:
    """Tell whoever started this process why it ends."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    path = os.environ.get(_ERROR_FILE)
    if path is not None:
        # Written beside and renamed: the launcher may read it at any moment.
        os.environ[_ERROR_FILE] = f"{path}.part"
        get_error_handler().record_exception(error)
        Path(os.environ[_ERROR_FILE]).replace(path)


def _barrier() -> None:
    if world_size() > 1:
        dist.barrier(group=_patient_group(dist.group.WORLD))


@functools.lru_cache(maxsize=1)
def _patient_group(world: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The same processes as `world`, on the CPU, where waiting may last."""
    del world
    return dist.new_group(backend="gloo", timeout=_TIMEOUT)  # type: ignore[return-value]
