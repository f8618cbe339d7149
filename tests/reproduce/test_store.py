"""Lines that survive kills, half lines and many writers."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from pathlib import Path

from kedge.reproduce.jobs import Job
from kedge.reproduce.store import Line, Store

JOB = Job("sample", "resnet10", "cam", "paper", 0)


def line(job: Job = JOB, measure: str = "scores", **values: float) -> Line:
    return Line.of(
        job,
        measure,
        values=values,
        command="kedge train",
        config_hash=job.key,
        dataset_hash="d",
        seconds=1.0,
        machine={},
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    store = Store(tmp_path / "new" / "results.jsonl")
    assert store.lines() == []
    written = line(replace(JOB, changes=("encoder.dim=4",), settings=("recipe.epochs=2",)), accuracy=0.5)
    store.append(written)
    assert store.lines() == [written]
    assert written.job == replace(JOB, changes=("encoder.dim=4",), settings=("recipe.epochs=2",))


def test_the_later_of_two_counts(tmp_path: Path) -> None:
    store = Store(tmp_path / "results.jsonl")
    for value in (0.1, 0.2):
        store.append(line(accuracy=value))
    assert [found.values for found in store.lines()] == [{"accuracy": 0.2}]


def test_half_a_line_is_nothing_and_spoils_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "results.jsonl")
    store.append(line(accuracy=0.1))
    with store.path.open("ab") as stream:
        stream.write(b'{"key": "half of a li')
    assert len(store.lines()) == 1
    store.append(line(replace(JOB, seed=1), accuracy=0.3))
    assert [found.values["accuracy"] for found in store.lines()] == [0.1, 0.3]


def test_missing_says_what_is_left_of_a_job(tmp_path: Path) -> None:
    store = Store(tmp_path / "results.jsonl")
    both = replace(JOB, measures=("scores", "speed"))
    assert store.missing([both]) == [both]
    store.append(line())
    assert store.missing([both]) == [replace(JOB, measures=("speed",))]
    assert store.missing([JOB]) == []


def _write(path: Path, seed: int) -> None:
    for number in range(10):
        Store(path).append(line(replace(JOB, seed=seed), f"m{number}", padding=float(10**9)))


def test_many_writers(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(path, seed)) for seed in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(path.read_text().splitlines()) == len(Store(path).lines()) == 40
