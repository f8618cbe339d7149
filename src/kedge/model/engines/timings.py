"""What was measured on this machine: how long each way takes for a picture, and to be made.

One small file for each case, written whole: several processes may measure the same one, and the last counts.
`$KEDGE_TIMINGS`, or `kedge/timings` in `$XDG_CACHE_HOME` or `~/.cache`, holds them; it can be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from kedge.io import atomic_write

__all__ = ["Case", "Timing", "recall", "remember"]

_PACKAGES = ("kedge", "torch", "onnxruntime")


@dataclass(frozen=True)
class Timing:
    """Of one way."""

    picture: float
    """Seconds for a picture, in a batch of that size."""
    making: float
    """Seconds until it can be used."""


@dataclass(frozen=True)
class Case:
    """What a choice depends on, besides the machine and the versions."""

    encoder: str
    """Its specification, as JSON."""
    height: int
    width: int
    mirror: bool
    batch: int
    """Pictures at a time: the number that stands for others of its kind."""
    threads: int

    @property
    def file(self) -> Path:
        """Where its timings are, or would be."""
        text = json.dumps(self.about(), sort_keys=True)
        return _folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"

    def about(self) -> dict[str, Any]:
        """The case in words: the file says it, too."""
        return {**asdict(self), "cpu": _cpu(), **{name: _version(name) for name in _PACKAGES}}


def recall(case: Case) -> dict[str, Timing] | None:
    """What is known of a case, by the name of the way; None if nothing is, or it cannot be read."""
    try:
        found = json.loads(case.file.read_bytes())
        if found["case"] != case.about():
            return None
        timings = {
            str(name): Timing(float(one["picture"]), float(one["making"])) for name, one in found["timings"].items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    usable = all(0 < one.picture < math.inf and 0 <= one.making < math.inf for one in timings.values())
    return timings if usable and "eager" in timings else None


def remember(case: Case, timings: Mapping[str, Timing]) -> None:
    """Keep what was measured; where that cannot be written, it is measured again some day."""
    content = {"case": case.about(), "timings": {name: asdict(one) for name, one in timings.items()}}
    try:
        case.file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(case.file, at_once=False) as stream:
            stream.write(json.dumps(content, indent=1).encode())
    except OSError:
        pass


def _folder() -> Path:
    own = os.environ.get("KEDGE_TIMINGS")
    return Path(own or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "kedge", "timings")).expanduser()


@cache
def _cpu() -> str:
    """The processor's name, and how many of it there are."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part"))]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()}"


@cache
def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
