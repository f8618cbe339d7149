"""One run in a process of its own: trained or resumed, measured, and its lines written."""

from __future__ import annotations

import csv
import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

from filelock import FileLock

from kedge.config.compose import CONFIG, build_dataset, load_config
from kedge.errors import KedgeError
from kedge.model import Model
from kedge.reproduce.jobs import Job, Source
from kedge.reproduce.machine import describe
from kedge.reproduce.measures import MEASURES
from kedge.reproduce.store import Line, Store
from kedge.training import quoted, resume_run, start_run
from kedge.training.callbacks import BEST, LAST

__all__ = ["perform"]


def perform(job: Job, out: Path, sources: Source) -> None:
    """Do what is missing of a job: a trained run is not trained again, an interrupted one goes on."""
    folder, store = out / "runs" / job.name, Store(out / "results.jsonl")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A second sitting may have been started while the first still runs.
    with FileLock(folder.with_suffix(".lock")):
        wanted = store.missing([job])
        if not wanted:
            return
        model = _trained(job, folder, sources)
        dataset = build_dataset(load_config(folder / CONFIG).dataset)
        common = {
            "command": " ".join(["kedge train", *_without_paths(job, sources)]),
            "config_hash": job.key,
            "dataset_hash": dataset.fingerprint(),
            "machine": describe(),
        }
        for measure in wanted[0].measures:
            started = time.monotonic()
            values = MEASURES[measure](model, dataset, folder)
            spent = _seconds(folder) if measure == "scores" else time.monotonic() - started
            store.append(Line.of(job, measure, values=values, seconds=round(spent, 2), **common))
        for name in (BEST, LAST):  # the model is there, and there may be hundreds of runs
            (folder / name).unlink(missing_ok=True)


def _trained(job: Job, folder: Path, sources: Source) -> Model:
    if (folder / "model").exists():
        return Model.load(folder).to("auto")
    if (folder / LAST).exists():
        return resume_run(folder)
    if folder.exists():  # killed before its first epoch ended: nothing to go on from
        shutil.rmtree(folder)
    return start_run(job.config(sources), folder)


def _seconds(folder: Path) -> float:
    with (folder / "history.csv").open(newline="") as file:
        return sum(float(row["seconds"]) for row in csv.DictReader(file))


def _without_paths(job: Job, sources: Source) -> list[str]:
    words = job.overrides(sources)
    path = sources.get(job.dataset)
    return words if path is None else [word.replace(quoted(path), path.name) for word in words]


def main() -> None:
    """Take a job from the command line; end when whoever started this process is gone."""
    threading.Thread(target=_until_left_alone, daemon=True).start()
    asked: dict[str, Any] = json.loads(sys.argv[1])
    sources = {name: Path(path) for name, path in asked["sources"].items()}
    try:
        perform(Job.from_json(asked["job"]), Path(asked["out"]), sources)
    except KedgeError as error:
        print(f"kedge: {error}", file=sys.stderr)
        sys.exit(2)


def _until_left_alone() -> None:
    os.read(sys.stdin.fileno(), 1)  # returns when the other side of the pipe is closed, by a kill too
    os._exit(1)


if __name__ == "__main__":
    main()
