"""How long runs will take, before any starts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from functools import cache

import torch

from kedge.config.compose import build
from kedge.errors import DataError
from kedge.reproduce.jobs import Job, Source, load_pictures
from kedge.reproduce.machine import describe
from kedge.reproduce.store import Line

__all__ = ["Estimates", "duration"]

_KNOWN = {
    "cifar100": (50_000, 100, 32),
    "svhn": (73_257, 10, 32),
    "food101": (75_750, 101, 224),
    "tiny_imagenet": (100_000, 200, 64),
}
"""Training pictures, classes and the pictures' side, so that a plan needs no download."""
_TRIED = {"cpu": 8, "cuda": 256}
"""Pictures in the step that is timed: enough to keep the device busy."""


class Estimates:
    """Seconds of training: as lines of the same kind of run on this machine say or, without any, from one step."""

    def __init__(self, lines: Iterable[Line], sources: Source) -> None:
        self.sources = sources
        here = _place(describe())
        self._seen: dict[tuple[object, ...], list[float]] = {}
        for line in lines:
            if line.measure == "scores" and _place(line.machine) == here:
                self._seen.setdefault(_kind(line.job), []).append(line.seconds)

    def seconds(self, job: Job) -> tuple[float, str]:
        """The estimate, and on what it rests."""
        if seen := self._seen.get(_kind(job)):
            return statistics.mean(seen), "runs like it"
        config = job.config(self.sources)
        count, classes, side = self._pictures(job)
        side = config.recipe.size or side
        shots = config.split.shots
        count = min(count, shots * classes) if shots else count
        stem = (job.encoder, side, config.encoder.get("stem"), config.encoder.get("dim"))
        sharpness = config.recipe.sharpness
        looks = 2 - sharpness.start if sharpness.radius else 1
        return _picture(*stem) * count * config.recipe.epochs * looks, "one step"

    def _pictures(self, job: Job) -> tuple[int, int, int]:
        if job.dataset in _KNOWN:
            return _KNOWN[job.dataset]
        dataset = load_pictures(job.dataset, self.sources)
        if dataset is None:
            raise DataError(f"The dataset {job.dataset} cannot be loaded.")
        return len(dataset.train), len(dataset.classes), min(dataset.train.size)


def duration(seconds: float) -> str:
    """For people.

    >>> duration(59), duration(150), duration(9000), duration(400_000)
    ('59 s', '2.5 min', '2.5 h', '4.6 days')
    """
    for limit, divisor, unit in ((90, 1, "s"), (5400, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / divisor:.0f} {unit}" if divisor == 1 else f"{seconds / divisor:.1f} {unit}"
    return f"{seconds / 86_400:.1f} days"


def _place(machine: dict[str, object]) -> tuple[object, ...]:
    return machine.get("gpu"), machine.get("cpu"), machine.get("cores")


def _kind(job: Job) -> tuple[object, ...]:
    return job.dataset, job.encoder, job.recipe, job.settings, job.changes


@cache
def _picture(encoder: str, side: int, stem: str | None, dim: int | None) -> float:
    """Seconds of forward and backward, per picture."""
    from kedge.config.compose import compose

    overrides = [f"encoder={encoder}", "encoder.weights=null"]
    overrides += [f"encoder.stem={stem}"] if stem else []
    overrides += [f"encoder.dim={dim}"] if dim else []
    node = compose(overrides).encoder
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = build(node, head="linear", image_size=side).to(device).train()
    images = torch.rand(_TRIED[device.type], 3, side, side, device=device)
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
