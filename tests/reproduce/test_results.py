"""Lines that survive kills, half lines and many writers."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path

from kedge.reproduce.experiment import ACCURACY, KNN1
from kedge.reproduce.jobs import Job, ResultLine, Results, ResultStore

DOCS = Path(__file__).parents[2] / "docs"
JOB = Job("sample", "resnet10", "cam", "paper", 0)


def line(job: Job = JOB, measure: str = "scores", **values: float) -> ResultLine:
    return ResultLine.of(
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
    store = ResultStore(tmp_path / "new" / "results.jsonl")
    assert store.lines() == []
    written = line(replace(JOB, changes=("encoder.dim=4",), settings=("recipe.epochs=2",)), accuracy=0.5)
    store.append(written)
    assert store.lines() == [written]
    assert written.job == replace(JOB, changes=("encoder.dim=4",), settings=("recipe.epochs=2",))


def test_the_later_of_two_counts(tmp_path: Path) -> None:
    store = ResultStore(tmp_path / "results.jsonl")
    for value in (0.1, 0.2):
        store.append(line(accuracy=value))
    assert [entry.values for entry in store.lines()] == [{"accuracy": 0.2}]


def test_lines_of_an_earlier_key_version_belong_to_the_jobs_they_describe(tmp_path: Path) -> None:
    texts = (DOCS / "results.jsonl").read_text().splitlines(keepends=True)
    old = [text for text in texts if json.loads(text).get("key_version", 1) == 1]
    lines = [json.loads(text) for text in old]
    assert lines
    store = ResultStore(tmp_path / "results.jsonl")
    store.path.write_text("".join(old))
    jobs = [Job.from_json(old | {"measures": [old["measure"]]}) for old in lines]
    assert store.missing(jobs) == []
    assert store.missing([replace(jobs[0], seed=99)]) != []
    assert len(store.lines()) == len(lines)
    # What can no longer be composed stays a line, and is nobody's.
    gone = replace(line(), encoder="gone", key="0" * 12, key_version=1)
    store.append(gone)
    assert store.lines()[-1] == gone


def test_half_a_line_is_nothing_and_spoils_nothing(tmp_path: Path) -> None:
    store = ResultStore(tmp_path / "results.jsonl")
    store.append(line(accuracy=0.1))
    with store.path.open("ab") as stream:
        stream.write(b'{"key": "half of a li')
    assert len(store.lines()) == 1
    store.append(line(replace(JOB, seed=1), accuracy=0.3))
    assert [entry.values["accuracy"] for entry in store.lines()] == [0.1, 0.3]


def test_missing_says_what_is_left_of_a_job(tmp_path: Path) -> None:
    store = ResultStore(tmp_path / "results.jsonl")
    both = replace(JOB, measures=("scores", "speed"))
    assert store.missing([both]) == [both]
    store.append(line())
    assert store.missing([both]) == [replace(JOB, measures=("speed",))]
    assert store.missing([JOB]) == []


def test_what_is_no_number_was_not_run(tmp_path: Path) -> None:
    store = ResultStore(tmp_path / "results.jsonl")
    store.append(line(accuracy=0.5, knn1=0.25))
    text = store.path.read_text()
    for edited in ("NaN", "Infinity", "1e999", "null", '"0.5"', "{}"):
        store.path.write_text(text.replace("0.5", edited))
        results = Results(store.lines())
        assert results.cell([JOB], ACCURACY).text() == "not run"
        assert results.cell([JOB], KNN1).text("percent") == "25.00%"


def _write(path: Path, seed: int) -> None:
    for number in range(10):
        ResultStore(path).append(line(replace(JOB, seed=seed), f"m{number}", padding=float(10**9)))


def test_many_writers(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(path, seed)) for seed in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(path.read_text().splitlines()) == len(ResultStore(path).lines()) == 40
