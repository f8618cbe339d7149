"""Kedge's own commands, each in a process of its own, and what a run leaves behind."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def kedge(*arguments: str | Path, environment: Mapping[str, str] | None = None) -> str:
    """What the command said on stderr; the end of the benchmark where it failed."""
    command = [sys.executable, "-m", "kedge", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[2:])}\n{done.stderr[-3000:]}")
    return done.stderr


def history(run: Path) -> list[dict[str, str]]:
    """A row per epoch."""
    with (run / "history.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def seconds(run: Path) -> list[float]:
    """How long each epoch took."""
    return [float(row["seconds"]) for row in history(run)]
