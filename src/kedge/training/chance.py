"""Chance of a process's own, beside that which all share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["OwnChance"]

State = tuple[Tensor, Tensor | None]


class OwnChance:
    """A stream of random numbers that differs from process to process.

    A network that draws (dropout) should do so differently in each; a loss that draws (which anchors repel, which
    triplets count) must draw alike in all, and takes the common stream.
    """

    def __init__(self) -> None:
        self._state: State | None = None

    def restart(self, seed: int, device: torch.device) -> None:
        """Begin again from `seed`."""
        own = _state(device)
        torch.manual_seed(seed)
        self._state = _state(device)
        _restore(own, device)

    @contextmanager
    def drawn(self, device: torch.device) -> Iterator[None]:
        """Whatever is drawn here comes from this stream."""
        if self._state is None:
            yield
            return
        own = _state(device)
        _restore(self._state, device)
        try:
            yield
        finally:
            self._state = _state(device)
            _restore(own, device)


def _state(device: torch.device) -> State:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _restore(state: State, device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
