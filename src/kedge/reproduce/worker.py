"""A process that takes runs one by one: trained or resumed, measured, and their lines written."""

from __future__ import annotations

import csv
import gc
import json
import os
import queue
import shutil
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from omegaconf import OmegaConf

from kedge.config.compose import CONFIG, build_dataset, load_config, quoted
from kedge.config.trust import OWN
from kedge.errors import KedgeError
from kedge.model import Model
from kedge.reproduce.jobs import Job, Source
from kedge.reproduce.machine import describe
from kedge.reproduce.measures import MEASURES
from kedge.reproduce.running import DONE, FAILED
from kedge.reproduce.store import Line, Store
from kedge.training import resume_run, start_run
from kedge.training.checkpoint import BEST, LAST

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
        dataset = build_dataset(load_config(folder / CONFIG, trust=True).dataset)
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
    if (folder / CONFIG).exists():
        _check_own(job, folder, sources)
    if (folder / "model").exists():
        return Model.load(folder).to("auto")
    if (folder / LAST).exists():
        return resume_run(folder, trust=True)
    if folder.exists():  # killed before its first epoch ended: nothing to go on from
        shutil.rmtree(folder)
    return start_run(job.config(sources), folder)


def _check_own(job: Job, folder: Path, sources: Source) -> None:
    """Refuse a run with classes that are neither Kedge's nor the job's own: the folder may be a stranger's."""
    found, own = (
        OmegaConf.to_container(config, resolve=False)
        for config in (load_config(folder / CONFIG, trust=True), job.config(sources))
    )
    load_config(folder / CONFIG, builds=[group for group in OWN if found.get(group) != own[group]])  # type: ignore


def _seconds(folder: Path) -> float:
    with (folder / "history.csv").open(newline="") as file:
        return sum(float(row["seconds"]) for row in csv.DictReader(file))


def _without_paths(job: Job, sources: Source) -> list[str]:
    words = job.overrides(sources)
    path = sources.get(job.dataset)
    return words if path is None else [word.replace(quoted(path), path.name) for word in words]


def main() -> None:
    """Perform jobs, a line of the input each, and answer each with a line; end when whoever asks is gone."""
    asked: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    # What libraries print is the job's, so that the answers have a way of their own.
    own = os.dup(1), os.dup(2)
    os.dup2(own[1], 1)
    threading.Thread(target=_listen, args=(asked,), daemon=True).start()
    while True:
        fine = _attempt(asked.get(), own[1])
        os.write(own[0], f"{DONE if fine else FAILED}\n".encode())


def _listen(asked: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        asked.put(json.loads(line))
    os._exit(1)  # the other side of the pipe was closed, by a kill perhaps: nobody waits for an end


def _attempt(asked: dict[str, Any], errors: int) -> bool:
    """Whether the job was done; what is said meanwhile goes to its log."""
    log = None if asked["log"] is None else os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(errors if log is None else log, stream)
    sources = {name: Path(path) for name, path in asked["sources"].items()}
    try:
        perform(Job.from_json(asked["job"]), Path(asked["out"]), sources)
    except KedgeError as error:
        print(f"kedge: {error}", file=sys.stderr)
        return False
    except Exception:
        traceback.print_exc()
        return False
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream in (1, 2):
            os.dup2(errors, stream)
        if log is not None:
            os.close(log)
        _forget()
    return True


def _forget() -> None:
    """The next job finds the memory as this one did."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
