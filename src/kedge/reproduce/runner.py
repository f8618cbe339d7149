"""Runs the jobs of an experiment: several at a time, each in a process of its own, or through a Hydra launcher."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from filelock import FileLock
from omegaconf import OmegaConf

from kedge.config.compose import CONFIG, build_dataset, load_config, quoted
from kedge.config.trust import OWN
from kedge.errors import ConfigError, KedgeError, TrainingError
from kedge.model import Model
from kedge.reproduce.jobs import WHOLE_RUN, DataFiles, Job, ResultLine, ResultStore
from kedge.reproduce.machine import describe
from kedge.reproduce.measures import MEASURES
from kedge.training import resume_run, start_run
from kedge.training.checkpoint import BEST, LAST

__all__ = ["launch", "perform", "run"]


def run(
    jobs: Sequence[Job],
    out: Path,
    data_files: DataFiles,
    *,
    max_workers: int = 1,
    report: Callable[[str], None] = print,
) -> list[Job]:
    """Run what is missing of these jobs; returns those that failed. The output of each goes to a log file.

    Times are measured last, one job at a time.
    """
    pending = ResultStore(out / "results.jsonl").missing(jobs)
    timed = [replace(job, measures=("speed",)) for job in pending if "speed" in job.measures]
    others = [replace(job, measures=tuple(m for m in job.measures if m != "speed")) for job in pending]
    failed = _run([job for job in others if job.measures], out, data_files, max_workers, report)
    untrained = {job.key for job in failed}
    return failed + _run([job for job in timed if job.key not in untrained], out, data_files, 1, report)


def _run(
    pending: Sequence[Job], out: Path, data_files: DataFiles, max_workers: int, report: Callable[[str], None]
) -> list[Job]:
    logs, has_gpu = {job: out / "logs" / f"{job.name}.log" for job in pending}, torch.cuda.is_available()
    failed: list[Job] = []
    processes: list[subprocess.Popen[bytes]] = []

    def wait_for(job: Job) -> bool:
        logs[job].parent.mkdir(parents=True, exist_ok=True)
        with logs[job].open("ab") as stream:
            process = _start(_task(job, out, data_files) | {"gpu": has_gpu}, stream)
        processes.append(process)
        with process:
            return process.wait() == 0

    with ThreadPoolExecutor(max_workers) as pool:
        futures = {pool.submit(wait_for, job): job for job in pending}
        try:
            for count, future in enumerate(as_completed(futures), start=1):
                job, done = futures[future], future.result()
                outcome = "done" if done else f"failed: {_last_line(logs[job])} ({logs[job]})"
                report(f"{count}/{len(pending)} {job.name} {outcome}")
                failed += [] if done else [job]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            for process in processes:
                process.stdin.close()  # type: ignore[union-attr]
    return failed


def launch(jobs: Sequence[Job], out: Path, data_files: DataFiles, launcher: str) -> list[Job]:
    """The same through a Hydra launcher (`joblib`, `submitit_slurm`, `ray` … where its plugin is installed)."""
    import hydra
    from hydra.errors import HydraException

    store = ResultStore(out / "results.jsonl")
    pending = store.missing(jobs)
    if not pending:
        return []
    with tempfile.TemporaryDirectory(prefix="kedge-") as scratch:
        plan = Path(scratch, "plan.json")
        plan.write_text(json.dumps([_task(job, out.resolve(), data_files) for job in pending]))
        numbers = ",".join(map(str, range(len(pending))))
        argv = sys.argv
        sys.argv = ["kedge", "-m", f"plan={plan}", f"number={numbers}", f"hydra/launcher={launcher}"]
        sys.argv += [f"hydra.sweep.dir={scratch}"]
        try:
            hydra.main(version_base="1.3", config_path="pkg://kedge.config", config_name="reproduce")(perform_planned)()
        except HydraException as error:
            raise ConfigError(f"--launcher {launcher}: {str(error).splitlines()[0]}") from error
        finally:
            sys.argv = argv
    return store.missing(pending)


def perform_planned(config: Any) -> None:
    """One job of a plan, for a launcher."""
    task = json.loads(Path(config.plan).read_text())[config.number]
    with _start(task, None) as process:
        process.wait()


def _task(job: Job, out: Path, data_files: DataFiles) -> dict[str, Any]:
    return {"job": asdict(job), "out": str(out), "data_files": {name: str(path) for name, path in data_files.items()}}


def _start(task: dict[str, Any], log: Any) -> subprocess.Popen[bytes]:
    """A worker process; it ends when its standard input is closed, as it is when this process is killed."""
    command = [sys.executable, "-m", "kedge.reproduce.runner", json.dumps(task)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log or sys.stderr, stderr=log)


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("kedge: ")[:300] if lines else "it printed nothing"


# ---------------------------------------------------------------------- the process of one run


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
        command = " ".join(["kedge train", *job.overrides(data_files)])
        if path := data_files.get(job.dataset):  # the results hold no path of this machine
            command = command.replace(quoted(path), path.name)
        about = {"command": command, "config_hash": job.key, "dataset_hash": dataset.fingerprint()}
        for measure in missing[0].measures:
            started = time.monotonic()
            values = MEASURES[measure](model, dataset, folder, data_files)
            seconds = time.monotonic() - started
            if measure in WHOLE_RUN:
                seconds = float(pd.read_csv(folder / "history.csv")["seconds"].sum())
            timed = {"seconds": round(seconds, 2), "machine": describe()}
            store.append(ResultLine.of(job, measure, values=values, **about, **timed))
        for name in (BEST, LAST):  # the model is there, and there may be hundreds of runs
            (folder / name).unlink(missing_ok=True)


def _train(job: Job, folder: Path, data_files: DataFiles) -> Model:
    if (folder / CONFIG).exists():
        _check_classes(job, folder, data_files)
        if job.keep_every and not load_config(folder / CONFIG, trust=True).trainer.keep_every:
            shutil.rmtree(folder)  # trained for other measures, it kept no weights on its way
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


def main() -> None:
    """Perform the task of the first argument; end when standard input is closed."""
    task = json.loads(sys.argv[1])
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    data_files = {name: Path(path) for name, path in task["data_files"].items()}
    try:
        if task.get("gpu") and not torch.cuda.is_available():
            raise TrainingError(
                "The GPU that was there is gone (see nvidia-smi): nothing is trained on the CPU instead."
            )
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
