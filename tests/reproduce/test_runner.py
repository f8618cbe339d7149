"""`kedge reproduce` as people start it: killed, started again, side by side, through a launcher, with mistakes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from kedge.cli import app
from kedge.reproduce.jobs import Job, ResultStore
from kedge.reproduce.report import write_report
from kedge.reproduce.runner import launch, perform, run

SMALL = ["recipe.batch_size=50", "split.shots=10", "split.holdout=0", "encoder.stem=imagenet", "encoder.dim=8"]
PART = ["--dataset", "sample", "--encoder", "resnet10", "--loss", "cam"]


def command(out: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "kedge", "reproduce", *words, *PART, "--out", str(out)]


def wait_for(condition: object, process: subprocess.Popen[bytes], seconds: float = 400) -> None:
    until = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < until
        time.sleep(0.02)


def alive(out: Path) -> list[int]:
    """Processes that work below `out`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes()
        except OSError:
            continue
        if b"kedge.reproduce.runner" in words and str(out).encode() in words:
            found.append(int(entry.parent.name))
    return found


@pytest.mark.timeout(600)
def test_killed_and_started_again_repeats_no_finished_run(tmp_path: Path, stripes: Path) -> None:
    words = ["table1", "recipe.epochs=6", *SMALL, "--seeds", "0-1", "--data", f"sample={stripes}"]
    results = tmp_path / "results.jsonl"
    first = subprocess.Popen(command(tmp_path, *words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    second_run = tmp_path / "runs"

    def in_the_second() -> bool:
        started = list(second_run.glob("*seed1*/checkpoints/last.ckpt"))
        return results.exists() and len(results.read_text().splitlines()) == 1 and bool(started)

    wait_for(in_the_second, first)
    first.send_signal(signal.SIGKILL)
    first.wait()
    until = time.monotonic() + 30
    while alive(tmp_path):  # whoever works for it notices
        assert time.monotonic() < until
        time.sleep(0.05)
    before = results.read_text().splitlines()
    assert len(before) == 1
    (finished,) = second_run.glob("*seed0*/history.csv")
    (interrupted,) = second_run.glob("*seed1*/config.yaml")
    stamps = finished.stat().st_mtime_ns, interrupted.stat().st_mtime_ns
    done = CliRunner().invoke(app, command(tmp_path, *words)[3:])
    assert done.exit_code == 0, done.output
    assert "1 runs to do, 1 already finished." in done.stderr
    after = results.read_text().splitlines()
    assert after[:1] == before
    assert len(after) == 2
    # The finished run was not touched, and the interrupted one not begun anew.
    assert stamps == (finished.stat().st_mtime_ns, interrupted.stat().st_mtime_ns)
    again = CliRunner().invoke(app, command(tmp_path, *words)[3:])
    assert "0 runs to do, 2 already finished." in again.stderr
    assert results.read_text().splitlines() == after
    assert ".md" in again.stdout


def jobs(*seeds: int, settings: tuple[str, ...] = ()) -> list[Job]:
    return [
        Job("sample", "resnet10", "cam", "paper", seed, settings=("recipe.epochs=1", *SMALL, *settings))
        for seed in seeds
    ]


@pytest.mark.timeout(600)
def test_a_run_that_fails_or_is_killed_leaves_the_others_alone_and_says_why(tmp_path: Path, stripes: Path) -> None:
    said: list[str] = []

    def kill() -> None:
        while not list(tmp_path.glob("runs/*seed2*/config.yaml")):
            time.sleep(0.01)
        (worker,) = (pid for pid in alive(tmp_path) if b'"seed": 2' in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(worker, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    every = [*jobs(0, settings=("recipe.optimizer.lr=1e30",)), *jobs(2), *jobs(1), *jobs(1)]
    failed = run(every, tmp_path, {"sample": stripes}, max_workers=2, report=said.append)
    killer.join()
    assert {job.seed for job in failed} == {0, 2}
    assert [line.seed for line in ResultStore(tmp_path / "results.jsonl").lines()] == [1]
    assert len(said) == 3
    (reason,) = [text for text in said if "seed0" in text]
    assert "failed" in reason
    assert "NaN or infinite" in reason
    assert not alive(tmp_path)


@pytest.mark.timeout(600)
def test_through_a_hydra_launcher(tmp_path: Path, stripes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert launch(jobs(0), Path("out"), {"sample": stripes}, "basic") == []
    (line,) = ResultStore(tmp_path / "out/results.jsonl").lines()
    assert line.values["accuracy"] > 0
    assert launch(jobs(0), Path("out"), {"sample": stripes}, "basic") == []
    assert len((tmp_path / "out/results.jsonl").read_text().splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    page = write_report([line], tmp_path / "out", {}).read_text()
    assert "### Retrieval on the full sets (Table 1), recipe paper, " in page
    assert page.count("Not run") > 5


@pytest.mark.timeout(600)
def test_no_path_of_this_machine_is_in_the_results(tmp_path: Path, stripes: Path) -> None:
    settings = ("recipe.epochs=1", "encoder.stem=imagenet", "encoder.dim=8", "recipe.batch_size=16")
    job = Job("svhn", "resnet10", "cam", "paper", 0, settings=settings)
    perform(job, tmp_path, {"svhn": stripes})
    text = (tmp_path / "results.jsonl").read_text()
    assert f"dataset.path={stripes.name} dataset.flip=false" in text
    assert str(stripes.parent) not in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["table9"], "Unknown experiment 'table9'"),
        (["table1", "--seeds", "many"], "--seeds takes numbers such as 0-4 or 0,1,2, found 'many'."),
        (["table1", "recipe.epoch=3"], "Unknown setting 'recipe.epoch'. Did you mean recipe.epochs=3?"),
        (["table1", "--recipe", "papier"], "recipe must be one of"),
        (["table1", "--data", "sample"], "--data takes NAME=FILE.npz"),
        (["report"], "holds no results; run an experiment first"),
    ],
)
def test_mistakes_are_one_sentence_before_anything_starts(
    words: list[str], sentence: str, tmp_path: Path, refused: Callable[..., str]
) -> None:
    assert sentence in refused(*command(tmp_path / "out", *words)[3:])
    assert not (tmp_path / "out").exists()


def test_a_plan_starts_nothing(tmp_path: Path) -> None:
    words = command(tmp_path / "out", "ablation", "recipe.epochs=3", *SMALL, "--seeds", "0", "--plan")
    done = CliRunner().invoke(app, words[3:], env={"COLUMNS": "200"}, catch_exceptions=False)
    assert done.exit_code == 0
    assert done.stdout.count("to do") == 17
    assert "16 runs to do, about" in done.stdout
    assert not (tmp_path / "out").exists()


def test_the_list() -> None:
    done = CliRunner().invoke(app, ["reproduce", "list"])
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names == [
        *("table1", "table2", "ablation", "classification", "dimensions", "convergence", "fewshot", "embeddings2d"),
        *("qualitative", "league", "unseen", "open_set"),
    ]


def test_several_experiments_share_their_runs(tmp_path: Path, stripes: Path) -> None:
    words = ["table1,table2", *PART, "recipe.epochs=1", *SMALL, "--seeds", "0", "--data", f"sample={stripes}"]
    done = CliRunner().invoke(app, ["reproduce", *words, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "1 runs to do, 0 already finished." in done.stderr
    assert [line.measure for line in ResultStore(tmp_path / "results.jsonl").lines()] == ["scores", "speed"]
    assert {file.stem for file in (tmp_path / "tables").glob("*.csv")} >= {"table1-paper", "table2-paper"}


def test_a_run_without_kept_weights_is_trained_again_for_its_curve(tmp_path: Path, stripes: Path) -> None:
    (job,) = jobs(0)
    data, store = {"sample": stripes}, ResultStore(tmp_path / "results.jsonl")
    perform(job, tmp_path, data)
    with_curve = replace(job, measures=("scores", "curve"))
    assert with_curve.key == job.key
    perform(with_curve, tmp_path, data)
    lines = {line.measure: line.values for line in store.lines()}
    # One run, trained twice with one seed: its last epoch is the model that was measured before.
    assert lines["curve"]["1"]["brute_force"] == lines["scores"]["brute_force"]
    assert not store.missing([job, with_curve])


def test_nothing_is_trained_on_the_cpu_where_the_gpu_is_gone(
    tmp_path: Path, stripes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # here, and not in the process of the run
    job = Job("stripes", "resnet10", "cam", "paper", 0, (), ("recipe.epochs=1", *SMALL))
    said: list[str] = []
    assert run([job], tmp_path, {"stripes": stripes}, report=said.append) == [job]
    assert "The GPU that was there is gone" in said[0]
    assert not (tmp_path / "runs").exists()
