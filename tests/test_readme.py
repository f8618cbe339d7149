"""What the README promises: its code runs, and its figures are those that the benchmarks wrote."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A folder with photos/ and two pictures to ask for."""
    generator = np.random.default_rng(0)
    colours = {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200)}
    for name, colour in colours.items():
        (tmp_path / "photos" / name).mkdir(parents=True)
        for index in range(10):
            pixels = np.clip(generator.normal(colour, 40, (60, 80, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{index}.jpg")
    for name in ("query.jpg", "other.jpg"):
        Image.fromarray(pixels).save(tmp_path / name)
    return tmp_path


@pytest.fixture
def offline(tmp_path: Path) -> dict[str, str]:
    """No weights in the cache and no network, wherever the test runs."""
    nowhere = "http://127.0.0.1:9"
    return os.environ | {"TORCH_HOME": str(tmp_path / "torch"), "http_proxy": nowhere, "https_proxy": nowhere}


def test_python_blocks_run(desk: Path, offline: dict[str, str]) -> None:
    code = "\n".join(blocks("python"))
    assert "kedge.train(" in code
    check = "assert vectors.shape == (2, model.dim) and len(names) == 1 and len(classes) == 32"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{check}"],
        cwd=desk,
        env=offline,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    *hits, score = done.stdout.splitlines()
    assert len(hits) == 5
    assert 0 < float(score) < 1


def test_shell_blocks_run(desk: Path, offline: dict[str, str]) -> None:
    lines = "\n".join(blocks("bash")).splitlines()
    assert len(lines) == 4
    for line in lines:
        command = [sys.executable, "-m", *line.split()]
        done = subprocess.run(command, cwd=desk, env=offline, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
    assert (desk / "runs/photos/metrics.json").exists()
    assert "data:image" in (desk / "hits.html").read_text(encoding="utf-8")
