"""The process of one run: it is trained or resumed, measured, and its result lines are written."""

from __future__ import annotations

import csv
import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path

from filelock import FileLock
from omegaconf import OmegaConf

from kedge.config.compose import CONFIG, build_dataset, load_config, quoted
from kedge.config.trust import OWN
from kedge.errors import KedgeError
from kedge.model import Model
from kedge.reproduce.jobs import DataFiles, Job
from kedge.reproduce.machine import describe
from kedge.reproduce.measures import MEASURES
from kedge.reproduce.results import ResultLine, ResultStore
from kedge.training import resume_run, start_run
from kedge.training.checkpoint import BEST, LAST

__all__ = ["perform"]


def perform(job: Job, out: Path, data_files: DataFiles) -> None:
    """Do what is missing of a job: a trained run is not trained again, an interrupted one is resumed."""
    folder, store = out / "runs" / job.name, ResultStore(out / "results.jsonl")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Another `kedge reproduce` may be at the same run.
    with FileLock(folder.with_suffix(".lock")):
        missing = store.missing([job])
        if not missing:
            return
        model = _train(job, folder, data_files)
        dataset = build_dataset(load_config(folder / CONFIG, trust=True).dataset)
        common = {
            "command": " ".join(["kedge train", *_overrides_without_paths(job, data_files)]),
            "config_hash": job.key,
            "dataset_hash": dataset.fingerprint(),
            "machine": describe(),
        }
        for measure in missing[0].measures:
            started = time.monotonic()
            values = MEASURES[measure](model, dataset, folder)
            seconds = _training_seconds(folder) if measure == "scores" else time.monotonic() - started
            store.append(ResultLine.of(job, measure, values=values, seconds=round(seconds, 2), **common))
        for name in (BEST, LAST):  # the model is there, and there may be hundreds of runs
            (folder / name).unlink(missing_ok=True)


def _train(job: Job, folder: Path, data_files: DataFiles) -> Model:
    if (folder / CONFIG).exists():
        _check_classes(job, folder, data_files)
    if (folder / "model").exists():
        return Model.load(folder).to("auto")
    if (folder / LAST).exists():
        return resume_run(folder, trust=True)
    if folder.exists():  # killed before its first epoch ended: nothing to resume
        shutil.rmtree(folder)
    return start_run(job.full_config(data_files), folder)


def _check_classes(job: Job, folder: Path, data_files: DataFiles) -> None:
    """Refuse a run with classes that are neither Kedge's nor the job's own: the folder may be someone else's."""
    there, own = (
        OmegaConf.to_container(config, resolve=False)
        for config in (load_config(folder / CONFIG, trust=True), job.full_config(data_files))
    )
    load_config(folder / CONFIG, builds=[group for group in OWN if there.get(group) != own[group]])  # type: ignore


def _training_seconds(folder: Path) -> float:
    with (folder / "history.csv").open(newline="") as file:
        return sum(float(row["seconds"]) for row in csv.DictReader(file))


def _overrides_without_paths(job: Job, data_files: DataFiles) -> list[str]:
    overrides = job.overrides(data_files)
    path = data_files.get(job.dataset)
    return overrides if path is None else [word.replace(quoted(path), path.name) for word in overrides]


def main() -> None:
    """Perform the task on standard input; end when that is closed, as it is when the parent process was killed."""
    task = json.loads(sys.stdin.readline())
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    data_files = {name: Path(path) for name, path in task["data_files"].items()}
    try:
        perform(Job.from_json(task["job"]), Path(task["out"]), data_files)
    except KedgeError as error:
        print(f"kedge: {error}", file=sys.stderr)
        sys.exit(2)


def _exit_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
