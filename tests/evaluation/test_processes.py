"""Two processes find what one finds."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kedge import train

SCRIPT = Path(__file__).parent / "several/reports.py"
TOGETHER = ["-m", "torch.distributed.run", "--nproc-per-node=2"]


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *arguments], env=environment, **pipes)


def timeless(report: dict[str, Any]) -> dict[str, Any]:
    return {**report, "meta": {name: value for name, value in report["meta"].items() if name != "seconds"}}


def test_two_processes_report_what_one_does(tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    train(overrides=[*tiny, "recipe.epochs=2", "trainer.accelerator=cpu"], folder=run)
    running = [
        start(*TOGETHER, str(SCRIPT), str(run), str(tmp_path / "together")),
        start(*TOGETHER, "-m", "kedge", "evaluate", str(run)),
    ]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(run), str(tmp_path / "alone")])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    said = [process.communicate(timeout=150) for process in running]
    for process, (_, errors) in zip(running, said, strict=True):
        assert process.returncode == 0, errors
    alone = json.loads((tmp_path / "alone/0.json").read_text())
    first, second = (json.loads((tmp_path / f"together/{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    for name, expected in alone.items():
        # Whole batches, and embeddings that are given, are the same to the bit.
        if name == "whole batches" or name.endswith("embeddings"):
            assert timeless(first[name]) == timeless(expected), name
        else:
            assert first[name]["brute_force"] == pytest.approx(expected["brute_force"], abs=1e-3), name
            assert first[name]["queries"] == expected["queries"]
    assert said[1][0].count("Written to") == 1
    assert json.loads((run / "metrics.json").read_text())["queries"] == 40


@pytest.mark.soak
def test_two_processes_refuse_in_one_sentence(tmp_path: Path) -> None:
    process = start(*TOGETHER, "-m", "kedge", "evaluate", str(tmp_path / "nowhere"))
    errors = process.communicate(timeout=150)[1]
    assert process.returncode != 0
    assert [line.startswith("kedge: ") for line in errors.splitlines()].count(True) == 1
