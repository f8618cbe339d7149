"""Many clients at once: nobody gets an error, and the server does not grow."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from kedge.serving.client import Client

BENCHMARK = Path(__file__).parents[2] / "benchmarks/serving.py"
SLOW_CLIENTS = Path(__file__).parents[2] / "benchmarks/slow_clients.py"


def under_load(*options: str) -> dict[str, dict[str, dict[str, float]]]:
    done = subprocess.run([sys.executable, BENCHMARK, *options], capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return {line.split()[0]: json.loads(line.partition(" ")[2]) for line in done.stdout.splitlines()}


def test_64_clients_for_a_moment(
    built: Path, serving_in_thread: Callable[..., AbstractContextManager[Any]], query: Callable[..., bytes]
) -> None:
    with serving_in_thread(built) as server, ThreadPoolExecutor(64) as pool:
        clients = [Client(server.url) for _ in range(64)]
        answers = pool.map(lambda client: client.search(query("level"), k=1), clients * 3)
        assert {answer["searches"][0]["hits"][0]["label"] for answer in answers} == {"level"}


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


def test_clients_that_never_finish_for_a_moment() -> None:
    few = ("--clients", "2", "--slow-headers", "4", "--half-bodies", "2", "--body", "4096")
    *_, whole = beside_slow_clients("--rounds", "1", "--seconds", "1", *few)
    assert whole["refused"] == 0


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_nobody_waits_for_clients_that_never_finish(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        *_, whole = beside_slow_clients()
    assert whole["refused"] == 0
    assert whole["ratio"] >= 0.9
