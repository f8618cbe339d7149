"""Estimates of how long runs will take, before any starts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from functools import cache

import torch

from kedge.config.compose import build, compose
from kedge.reproduce.jobs import DataFiles, Job, dataset_info
from kedge.reproduce.machine import describe
from kedge.reproduce.results import ResultLine

__all__ = ["Estimates", "format_duration"]

_BATCH = {"cpu": 8, "cuda": 256}
"""Images in the step that is timed: enough to keep the device busy."""


class Estimates:
    """Seconds of training: the mean of finished runs like it on this machine or, without any, from one step."""

    def __init__(self, lines: Iterable[ResultLine], data_files: DataFiles) -> None:
        self.data_files = data_files
        here = _hardware(describe())
        self._seconds: dict[tuple[object, ...], list[float]] = {}
        for line in lines:
            if line.measure == "scores" and _hardware(line.machine) == here:
                self._seconds.setdefault(_kind(line.job), []).append(line.seconds)

    def seconds(self, job: Job) -> tuple[float, str]:
        """The estimate, and what it is made from."""
        if finished := self._seconds.get(_kind(job)):
            return statistics.mean(finished), "runs like it"
        config, dataset = job.config, dataset_info(job.dataset, self.data_files)
        shots, sam = config.split.shots, config.recipe.sam
        images = min(dataset.images, shots * dataset.classes) if shots else dataset.images
        passes = 2 - sam.start if sam.radius else 1
        per_image = _seconds_per_image(
            job.encoder, config.recipe.size or dataset.side, config.encoder.get("stem"), config.encoder.get("dim")
        )
        return per_image * images * config.recipe.epochs * passes, "one step"


def format_duration(seconds: float) -> str:
    """For people.

    >>> format_duration(59), format_duration(150), format_duration(9000), format_duration(400_000)
    ('59 s', '2.5 min', '2.5 h', '4.6 days')
    """
    for limit, divisor, unit in ((90, 1, "s"), (5400, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / divisor:.0f} {unit}" if divisor == 1 else f"{seconds / divisor:.1f} {unit}"
    return f"{seconds / 86_400:.1f} days"


def _hardware(machine: dict[str, object]) -> tuple[object, ...]:
    return machine.get("gpu"), machine.get("cpu"), machine.get("cores")


def _kind(job: Job) -> tuple[object, ...]:
    return job.dataset, job.encoder, job.recipe, job.settings, job.changes


@cache
def _seconds_per_image(encoder: str, side: int, stem: str | None, dim: int | None) -> float:
    """The best of three steps, forward and backward."""
    overrides = [f"encoder={encoder}", "encoder.weights=null"]
    overrides += [f"encoder.stem={stem}"] if stem else []
    overrides += [f"encoder.dim={dim}"] if dim else []
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = build(compose(overrides).encoder, head="linear", image_size=side).to(device).train()
    images = torch.rand(_BATCH[device.type], 3, side, side, device=device)
    times = []
    for _ in range(3):
        started = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            total = network(images).square().sum()
        total.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times) / len(images)
