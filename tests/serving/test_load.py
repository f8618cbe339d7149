"""Many clients at once: nobody gets an error, and the server does not grow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks/serving.py"
SLOW_CLIENTS = Path(__file__).parents[2] / "benchmarks/slow_clients.py"


def under_load(*options: str) -> dict[str, dict[str, dict[str, float]]]:
    done = subprocess.run([sys.executable, BENCHMARK, *options], capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return {line.split()[0]: json.loads(line.partition(" ")[2]) for line in done.stdout.splitlines()}


def test_64_clients_for_a_moment() -> None:
    found = under_load("--seconds", "1", "--only", "tiny", "--out", "")["tiny"]
    assert all(found[way]["answers"] >= 64 for way in ("batches", "one by one"))


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("gallery", ["demo", "resnet18-224"])
def test_64_clients_for_a_minute(gallery: str, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        found = under_load("--seconds", "60", "--only", gallery, "--out", "")[gallery]
    assert found["batches / one by one"] >= 1  # type: ignore[operator]


def beside_slow_clients(*options: str) -> list[dict[str, Any]]:
    command = [sys.executable, SLOW_CLIENTS, "--out", "", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_nobody_is_refused_beside_clients_that_never_finish() -> None:
    *rounds, whole = beside_slow_clients("--seconds", "1", "--rounds", "1")
    assert whole["refused"] == 0
    assert all(row["with"]["answers"] >= 32 for row in rounds)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_nobody_waits_for_clients_that_never_finish(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        *_, whole = beside_slow_clients()
    assert whole["refused"] == 0
    assert whole["ratio"] >= 0.9
