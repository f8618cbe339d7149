"""What a result was measured on: hardware, versions and commit, without paths."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["describe"]

_PACKAGES = ("kedge", "torch", "torchvision", "lightning", "numpy")


def describe() -> dict[str, Any]:
    """The machine, the versions of what matters, and Kedge's commit where it runs from a checkout."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "commit": _commit(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "gpu": gpu,
        "driver": _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpu else None,
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
    }


def _commit() -> str | None:
    here = Path(__file__).resolve().parent
    root = _output_of("git", "rev-parse", "--show-toplevel", folder=here)
    # Installed inside somebody else's repository, their commit says nothing of Kedge.
    if root is None or Path(root, "src", "kedge", "reproduce") != here:
        return None
    return _output_of("git", "rev-parse", "--short", "HEAD", folder=here)


def _output_of(*command: str, folder: Path | None = None) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=folder).stdout.strip() or None
    except OSError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
