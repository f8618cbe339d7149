"""What a result was measured on (hardware, versions and commit, without paths), and how long a run takes there."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from kedge.config.compose import build
from kedge.encoders import build_encoder
from kedge.model.io import kedge_version
from kedge.reproduce.jobs import DataFiles, Job, ResultLine, dataset_info

__all__ = ["Estimates", "describe"]

_BATCH = {"cpu": 1, "cuda": 64}
"""Images in the step that is timed: enough to keep the device busy."""
_SIDE = 224


def describe() -> dict[str, Any]:
    """The machine, the versions of what matters, and Kedge's commit where it runs from a checkout."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "commit": _commit(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "gpu": gpu,
        "driver": _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpu else None,
        "python": platform.python_version(),
        "kedge": kedge_version(),
        **{name: version(name) for name in ("torch", "torchvision", "numpy")},
    }


class Estimates:
    """Seconds of training: the mean of finished runs like it on this machine or, without any, from its FLOPs."""

    def __init__(self, lines: Iterable[ResultLine], data_files: DataFiles) -> None:
        self.data_files = data_files
        here = _hardware(describe())
        self._seconds: defaultdict[Job, list[float]] = defaultdict(list)
        self._flops: dict[tuple[Any, ...], int] = {}
        for line in lines:
            if line.measure == "scores" and _hardware(line.machine) == here:
                self._seconds[_kind(line.job)].append(line.seconds)

    def seconds(self, job: Job) -> tuple[float, str]:
        """The estimate, and what it is made from."""
        if finished := self._seconds.get(_kind(job)):
            return statistics.mean(finished), "runs like it"
        config, dataset = job.config, dataset_info(job.dataset, self.data_files)
        shots, sam = config.split.shots, config.recipe.sam
        images = min(dataset.images, shots * dataset.classes) if shots else dataset.images
        passes = 2 - sam.start if sam.radius else 1
        side = config.recipe.size or dataset.side
        shape = (job.encoder, side, config.encoder.get("stem"), config.encoder.get("dim"))
        if shape not in self._flops:
            with torch.device("meta"):  # nothing is computed
                network = build(config.encoder, weights=None, head="linear", image_size=side)
                self._flops[shape] = _flops(network, torch.empty(1, 3, side, side))
        flops = self._flops[shape] * images * config.recipe.epochs * passes
        return flops * _seconds_per_flop(), "FLOPs"


def _commit() -> str | None:
    root = Path(__file__).resolve().parents[3]
    # Installed inside somebody else's repository, their commit says nothing of Kedge.
    return _output_of("git", "-C", str(root), "rev-parse", "--short", "HEAD") if (root / ".git").exists() else None


def _output_of(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        return None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _hardware(machine: dict[str, Any]) -> tuple[Any, ...]:
    return machine.get("gpu"), machine.get("cpu"), machine.get("cores")


def _kind(job: Job) -> Job:
    """What runs that take as long have in common."""
    return Job(job.dataset, job.encoder, "", job.recipe, 0, job.changes, job.settings)


def _flops(network: nn.Module, images: torch.Tensor) -> int:
    """FLOPs of a step: backward takes twice as many as forward."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network.eval()(images)
    return 3 * int(counter.get_total_flops())


@cache
def _seconds_per_flop() -> float:
    """The better of two steps (forward and backward) of a ResNet-50 on this machine."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = build_encoder("resnet50", image_size=_SIDE).to(device)
    images = torch.rand(_BATCH[device.type], 3, _SIDE, _SIDE, device=device)
    flops = _flops(network, images)
    network.train()
    times = []
    for _ in range(2):
        started = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            total = network(images).square().sum()
        total.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times) / flops
