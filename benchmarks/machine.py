"""What a result was measured on: hardware, versions and commit, no paths."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def describe() -> dict[str, Any]:
    import torch

    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "commit": done.stdout.strip() or None,
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "gpu": gpu,
        "driver": _driver() if gpu else None,
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "torchvision", "lightning", "numpy")},
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        return None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
