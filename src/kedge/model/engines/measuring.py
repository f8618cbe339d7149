"""How long each way takes: in turns, so that whatever else the machine does meets all of them."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from kedge.model.engines.ways import Way

__all__ = ["check_staying", "in_turns"]

_ROUNDS = (4, 50)
"""At least, and at most."""
_SECONDS = 3.0
"""Enough, after the first rounds."""
_SHORT = 0.2
"""Of calls that take fewer seconds only every second one is timed."""
_CALM = 1.5
"""On a machine that has nothing else to do, half of the calls take no longer than this times the shortest."""


def check_staying() -> None:
    """Refuse to go on in the background when the process wants to leave."""
    if not threading.main_thread().is_alive():
        raise InterruptedError("the process is leaving")


def in_turns(
    ways: Mapping[str, Way], images: Tensor, turn: AbstractContextManager[object]
) -> tuple[dict[str, float], bool]:
    """The least seconds for the batch by name, and whether the machine was calm; `turn` is held call by call.

    The least, since that is what a way takes when nothing comes between.
    """
    found: dict[str, list[float]] = {name: [] for name in ways}
    last: dict[str, float] = {}
    began = time.monotonic()
    with torch.inference_mode():
        for number in range(-1, _ROUNDS[1]):
            check_staying()
            for name, way in ways.items():
                with turn:
                    if last.get(name, 1.0) < _SHORT:
                        way(images)  # what ran before leaves caches and threads as it likes them
                    started = time.perf_counter()
                    way(images)
                    last[name] = time.perf_counter() - started
                if number >= 0:  # the first round warms up
                    found[name].append(last[name])
            if number + 1 >= _ROUNDS[0] and time.monotonic() - began > _SECONDS:
                break
    least = {name: min(times) for name, times in found.items()}
    return least, all(statistics.median(times) <= _CALM * least[name] for name, times in found.items())
