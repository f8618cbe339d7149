"""One process and two end in the same place."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields, make_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.launcher.api import LaunchConfig

from kedge import Model, train
from kedge.config.compose import compose
from kedge.errors import ConfigError
from kedge.training import parallel, resume_run
from kedge.training.checkpoint import Interrupted
from kedge.training.config import Settings
from kedge.training.parallel import _reason, layout_of

SCRIPT = Path(__file__).parent / "several/runs.py"
SGD = [
    *("dataset=arrays", "encoder=resnet10", "encoder.name=tiny", "encoder.dim=6", "recipe.batch_size=16"),
    *("recipe.epochs=2", "recipe.mixing.cutmix=0", "recipe.ema=0", "recipe.optimizer.lr=0.05"),
    *("split.shots=16", "split.holdout=0.2", "split.validate_every=1", "logger=none"),
    # Not the bounded head: its batch normalisation knows how many processes there are.
    *("encoder.head=linear", "recipe.backbone_lr_mult=2", "trainer.precision=64-true", "trainer.accelerator=cpu"),
]
CASES: dict[str, list[str]] = {
    "cam": ["loss=cam", "recipe.ema=0.3"],
    "cam-paper": ["loss=cam", "loss.discriminate=0", "loss.normalize=false"],
    "cam-sampled": ["loss=cam", "loss.repel_sample=2", "loss.init=random"],
    "cam-accumulated": ["loss=cam", "loss.init=random", "trainer.accumulate=2"],
    "cam-sharpness": ["loss=cam", "recipe.sam.radius=0.1", "recipe.sam.start=0.2"],
    "contrastive": ["loss=contrastive", "recipe.optimizer.lr=0.01", "loss.mining=semi-hard"],
    "cross_entropy": ["loss=cross_entropy"],
    "cross_entropy-accumulated": ["loss=cross_entropy", "trainer.accumulate=4"],
    "center": ["loss=center", "recipe.optimizer.lr=0.01"],
    "triplet": ["loss=triplet", "recipe.optimizer.lr=0.01", "recipe.per_class=4", "recipe.optimizer.clip=0.01"],
    "supcon": ["loss=supcon", "recipe.optimizer.lr=0.01", "recipe.views=2"],
    "arcface": ["loss=arcface", "recipe.optimizer.lr=0.01"],
    "frozen": ["loss=cam", "recipe.freeze=true", "recipe.size=12"],
    "plateau": ["loss=contrastive", "recipe.schedule.name=plateau", "recipe.schedule.patience_few_shot=0"],
}
ALONE = {"cam-unaccumulated": [*CASES["cam-accumulated"], "trainer.accumulate=1"], "whole": ["loss=cam"]}
TOGETHER = {
    "stopped": ["loss=cam", "recipe.epochs=3", "trainer.accumulate=2"],
    "broken": ["loss=cam"],
    "norm": [
        "loss=cam",
        "loss.discriminate=0",
        "encoder.head=bounded",
        "encoder.name=tiny-norm",
        "recipe.mixing.cutmix=0.5",
        "recipe.ema=0.3",
    ],
    "uneven": ["loss=cam", "recipe.batch_size=15"],
    "few": ["loss=cam", "split.shots=2", "split.holdout=0", "recipe.batch_size=64"],
    "too-few": ["loss=cam", "split.shots=1", "split.holdout=0", "trainer.accumulate=2"],
    "compared": ["loss=contrastive", "trainer.accumulate=2"],
}
Found = dict[str, Any]


def start(count: int, arguments: list[str], **options: Any) -> list[subprocess.Popen[str]]:
    """So many processes, as torchrun starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(count):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        own = {name: str(value) for name, value in names.items()} if count > 1 else {}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **own, **meeting}
        command = [sys.executable, *arguments]
        started.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, **options))
    return started


@pytest.fixture(scope="module")
def found(stripes: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Found]]:
    """What each process of both kinds ended with."""
    place = tmp_path_factory.mktemp("processes")
    running = {}
    for kind, count, more in (("alone", 1, ALONE), ("together", 2, TOGETHER)):
        (place / kind).mkdir()
        cases = {name: [*SGD, f"dataset.path={stripes}", *case] for name, case in {**CASES, **more}.items()}
        if kind == "alone":
            cases["whole"].append("recipe.epochs=3")
        (place / f"{kind}.json").write_text(json.dumps(cases))
        running[kind] = start(count, [str(SCRIPT), str(place / f"{kind}.json"), str(place / kind)])
    for some in running.values():
        for one in some:
            said = one.communicate(timeout=250)[1]
            assert one.returncode == 0, said
    return {
        kind: [
            torch.load(place / kind / f"found-{rank}.pt", weights_only=True) | {"place": str(place / kind)}
            for rank in range(len(some))
        ]
        for kind, some in running.items()
    }


def history(folder: Path) -> list[dict[str, str]]:
    with (folder / "history.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def assert_same(one: Found, other: Found, within: float) -> None:
    assert isinstance(one, dict), one
    assert isinstance(other, dict), other
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=within, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_end_with_the_weights_of_one(case: str, found: dict[str, list[Found]]) -> None:
    if case in ("triplet", "supcon", "arcface"):
        pytest.importorskip("pytorch_metric_learning")
    alone, (first, second) = found["alone"][0], found["together"]
    assert_same(first[case], second[case], 0)
    assert_same(alone[case], first[case], 1e-8)
    expected, seen = (history(Path(one["place"]) / case) for one in (alone, first))
    assert len(seen) == len(expected) == 2
    for row, other in zip(expected, seen, strict=True):
        assert row.keys() == other.keys()
        for name in row.keys() - {"seconds"}:
            assert float(other[name]) == pytest.approx(float(row[name]), abs=1e-8), name


def test_a_batch_in_steps_ends_with_the_weights_of_a_whole_one(found: dict[str, list[Found]]) -> None:
    alone = found["alone"][0]
    assert_same(alone["cam-unaccumulated"], alone["cam-accumulated"], 1e-8)
    assert_same(alone["cross_entropy"], alone["cross_entropy-accumulated"], 1e-8)


def test_the_repeller_acts_in_these_runs(found: dict[str, list[Found]]) -> None:
    for case in ("cam-sampled", "cam-accumulated"):
        rows = history(Path(found["together"][0]["place"]) / case)
        assert all(float(row["train/repeller"]) > 0.01 for row in rows[:1])


def test_statistics_and_averages_are_the_same_in_both(found: dict[str, list[Found]]) -> None:
    first, second = found["together"]
    assert "network.backbone.1.running_mean" in first["norm"]
    assert_same(first["norm"], second["norm"], 0)


def test_broken_numbers_end_both_with_the_same_sentence(found: dict[str, list[Found]]) -> None:
    first, second = found["together"]
    assert first["broken"] == second["broken"]
    assert first["broken"].startswith("TrainingError: The loss or the weights became NaN or infinite in epoch 2")


def test_a_stopped_run_goes_on_in_another_number_of_processes(
    found: dict[str, list[Found]], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Path(found["together"][0]["place"])
    # Short epochs are not saved each.
    assert re.match(r"Interrupted: Stopped after [12] of 3 epochs\.", found["together"][0]["stopped"])
    spec = importlib.util.spec_from_file_location("several_runs", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    runs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(runs)
    monkeypatch.setattr(runs.encoders, "build_backbone", runs.tiny_backbone)
    resume_run(place / "stopped", ["trainer.accumulate=1"])
    state = torch.load(place / "stopped/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    expected = {name: value for name, value in found["alone"][0]["whole"].items() if name != "target"}
    assert_same(expected, state, 1e-8)


def test_batches_that_cannot_be_shared(found: dict[str, list[Found]]) -> None:
    refused = found["together"][1]
    assert refused["uneven"] == (
        "ConfigError: recipe.batch_size must be a multiple of 2, with at least two images for each of 2 processes, "
        "found 15."
    )
    assert refused["too-few"].startswith("ConfigError: 4 training images are too few for 2 processes times 2 steps")
    assert refused["compared"].startswith("ConfigError: The loss contrastive compares the images of a batch")
    assert isinstance(refused["few"], dict), refused["few"]


def sample(folder: Path) -> list[str]:
    """A run on the bundled sample that takes a few seconds."""
    return [
        *("encoder=timm", "encoder.name=timm:test_resnet", "encoder.dim=8", "recipe.size=16", "recipe.epochs=2"),
        *(
            "recipe.batch_size=16",
            "split.shots=8",
            "recipe.optimizer.lr=0.05",
            f"hydra.run.dir={folder}",
            "logger=none",
        ),
    ]


def command(*arguments: str, runner: str = "-m", **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with ears():
        return subprocess.Popen([sys.executable, runner, *arguments], env=environment, **pipes, **options)


@contextlib.contextmanager
def ears() -> Iterator[None]:
    """Ctrl-C is heard in processes that are started meanwhile, even if whoever runs the tests ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_command_and_torchrun_leave_the_same_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cpu = "trainer.accelerator=cpu"
    torchrun = ["torch.distributed.run", "--nproc-per-node=2", "-m", "kedge", "train", cpu]
    process = command(*torchrun, *sample(tmp_path / "torchrun"))
    # Its launcher is this process, which has imported everything already.
    before = signal.getsignal(signal.SIGINT)
    model = train(overrides=[*sample(tmp_path / "devices"), cpu, "trainer.devices=2"], folder=tmp_path / "devices")
    assert signal.getsignal(signal.SIGINT) is before
    assert Model.load(tmp_path / "devices").fingerprint == model.fingerprint
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert said.count("Model in") == 1
    for lines in (errors, capfd.readouterr().err):
        assert lines.count("epoch 1/2") == 1
        assert "2 × cpu" in lines
    rows, other_rows = (
        [{name: value for name, value in row.items() if name != "seconds"} for row in history(tmp_path / name)]
        for name in ("torchrun", "devices")
    )
    assert rows == other_rows
    assert len(rows) == 2


def children(process: subprocess.Popen[str]) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True)
    return [int(one) for one in listed.stdout.split()]


def gone(number: int) -> bool:
    status = Path(f"/proc/{number}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
@pytest.mark.parametrize(
    "ends", [("worker",), pytest.param(("INT", "TERM", "parent"), marks=pytest.mark.soak)], ids=" and ".join
)
def test_a_signal_or_a_killed_process_ends_all_and_leaves_a_checkpoint(ends: tuple[str, str], tmp_path: Path) -> None:
    """A killed worker; Ctrl-C, a request to end and a killed parent side by side."""
    long = ["trainer.accelerator=cpu", "trainer.devices=2", "recipe.epochs=5000"]
    running = {name: command("kedge", "train", *sample(tmp_path / name), *long) for name in ends}
    workers: dict[str, list[int]] = {}
    end = time.monotonic() + 300  # a guard against waiting forever, on however busy a machine
    for name, process in running.items():
        while not (tmp_path / name / "checkpoints/last.ckpt").exists():
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < end
            time.sleep(0.1)
        workers[name] = children(process)
        assert len(workers[name]) == 2
    for name, process in running.items():
        if name == "worker":
            os.kill(workers[name][1], signal.SIGKILL)
        else:
            process.send_signal(signal.Signals["SIGKILL" if name == "parent" else f"SIG{name}"])
    for name, process in running.items():
        if name == "parent":
            process.wait()
            continue
        errors = process.communicate(timeout=60)[1]
        assert process.returncode == (2 if name == "worker" else 130), errors
        assert f"kedge train --resume {tmp_path / name}" in errors
        assert ("was killed (SIGKILL)" if name == "worker" else "Stopped after") in errors
        assert "Traceback" not in errors, errors
    end = time.monotonic() + 30
    while not all(gone(number) for some in workers.values() for number in some):
        assert time.monotonic() < end
        time.sleep(0.1)
    for name in running:
        state = torch.load(tmp_path / name / "checkpoints/last.ckpt", weights_only=True)
        assert all(value.isfinite().all() for value in state["state_dict"].values() if value.is_floating_point())


@pytest.mark.parametrize("killed", [False, True])
def test_who_was_stopped_since_another_was_killed_is_not_the_reason(killed: bool, tmp_path: Path) -> None:
    said = tmp_path / "error.json"
    message = {"message": "Interrupted: Stopped after 1 of 9 epochs.", "extraInfo": {"timestamp": "1"}}
    said.write_text(json.dumps({"message": message}))
    failures = {0: ProcessFailure(0, 100, 1, str(said))}
    if killed:
        failures[1] = ProcessFailure(1, 101, -signal.SIGKILL, str(tmp_path / "none.json"))
    found = _reason(failures, tmp_path)
    assert isinstance(found, Interrupted) is not killed
    assert ("was killed (SIGKILL)" in str(found)) is killed


@pytest.mark.parametrize("after", [signal.SIGABRT, signal.SIGTERM])
def test_who_died_of_anothers_death_is_not_the_reason(after: signal.Signals, tmp_path: Path) -> None:
    none = str(tmp_path / "none.json")
    for killed in (0, 1):
        failures = {
            rank: ProcessFailure(rank, 100 + rank, -signal.SIGKILL if rank == killed else -after, none)
            for rank in range(2)
        }
        assert f"Process {killed} was killed (SIGKILL)" in str(_reason(failures, tmp_path))


@pytest.mark.soak
def test_the_jobs_of_a_sweep_in_processes_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    overrides = [one for one in sample(tmp_path) if not one.startswith("hydra.run")]
    sweep = ["-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", f"hydra.sweep.dir={tmp_path}", "seed=0,1"]
    process = command("kedge", "train", *overrides, *sweep, "recipe.epochs=1")
    errors = process.communicate(timeout=150)[1]
    assert process.returncode == 0, errors
    first, second = (torch.load(tmp_path / f"{job}/checkpoints/last.ckpt", weights_only=True) for job in (0, 1))
    assert not torch.equal(first["state_dict"]["loss.anchors"], second["state_dict"]["loss.anchors"])


def test_settings_that_cannot_be_met(tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {
        "trainer.devices=0": r"trainer.devices must be at least 1, found 0",
        "trainer.devices=some": r"trainer.devices must be one of auto, found 'some'",
        "trainer.num_nodes=0": r"trainer.num_nodes must be at least 1",
        "trainer.accumulate=3": r"recipe.batch_size must be a multiple of 3, .* 3 steps \(trainer.acc.*, found 16",
        "trainer.num_nodes=2": r"needs MASTER_ADDR, MASTER_PORT, NODE_RANK in the environment of every machine",
    }
    for override, sentence in cases.items():
        with pytest.raises(ConfigError, match=sentence):
            train(overrides=[*tiny, override], folder=tmp_path / "run")
        assert not (tmp_path / "run").exists()
    sharp = ["trainer.accumulate=2", "recipe.sam.radius=0.1"]
    with pytest.raises(ConfigError, match=r"recipe.sam needs the whole batch at once"):
        train(overrides=[*tiny, *sharp], folder=tmp_path / "run")


def test_a_torch_that_cannot_be_told_how_long_to_wait_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = Settings.from_config(compose(["trainer.accelerator=cpu", "trainer.devices=2"]))
    layout = layout_of(settings, resumed=False)
    known = [(field.name, field.type, field) for field in fields(LaunchConfig) if field.name != "shutdown_timeout"]
    monkeypatch.setattr(parallel, "LaunchConfig", make_dataclass("Older", known))
    assert parallel._launch_config(layout, str(tmp_path)).nproc_per_node == 2


@pytest.mark.soak
def test_python_hears_why_processes_end(tiny: list[str], tmp_path: Path) -> None:
    overrides = [*tiny, "trainer.accelerator=cpu", "trainer.devices=2", "loss=contrastive", "trainer.accumulate=2"]
    with pytest.raises(ConfigError, match="The loss contrastive compares the images of a batch"):
        train(overrides=overrides, folder=tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
