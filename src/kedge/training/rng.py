"""Random-number state: seeds derived from a run's own, and a state per rank beside the one that all ranks share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

__all__ = ["RankRNG", "derive_seed", "fork_rng"]


def derive_seed(*parts: int) -> int:
    """One seed from several integers, far from those of neighbouring integers."""
    mixed = 0
    for part in parts:
        mixed = (mixed * 6364136223846793005 + part * 1442695040888963407 + 1) % 2**63
    return mixed


def fork_rng(device: torch.device) -> AbstractContextManager[None]:
    """Restore the RNG state of the CPU and of `device` at the end of the block."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


class RankRNG:
    """Per-rank RNG state (dropout); losses use the RNG that all ranks share.

    A network that draws (dropout) should do so differently on each rank; a loss that draws (which anchors repel, which
    triplets count) must draw alike on all of them.
    """

    def __init__(self) -> None:
        self._state: tuple[Tensor, Tensor | None] | None = None

    def seed(self, seed: int, device: torch.device) -> None:
        """Start this rank's stream anew."""
        with fork_rng(device):
            torch.manual_seed(seed)
            self._state = _rng_state(device)

    @contextmanager
    def use(self, device: torch.device) -> Iterator[None]:
        """Draw from this rank's stream inside the block; until `seed` was called, from the shared one."""
        if self._state is None:
            yield
            return
        with fork_rng(device):
            cpu, cuda = self._state
            torch.set_rng_state(cpu)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda, device)
            try:
                yield
            finally:
                self._state = _rng_state(device)


def _rng_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
