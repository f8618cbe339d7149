"""Many runs, some at a time, each in a process of its own or through a Hydra launcher."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kedge.errors import ConfigError
from kedge.reproduce.jobs import Job, Source
from kedge.reproduce.store import Store

__all__ = ["launch", "run"]

Said = Callable[[str], None]


def run(jobs: Sequence[Job], out: Path, sources: Source, *, at_once: int = 1, say: Said = print) -> list[Job]:
    """Perform what is missing of these jobs; returns those that failed. What each says goes to a file of its own."""
    store = Store(out / "results.jsonl")
    waiting = _once(store.missing(jobs))
    failed: list[Job] = []
    done, lock = 0, threading.Lock()
    running: set[subprocess.Popen[bytes]] = set()

    def one(job: Job) -> None:
        nonlocal done
        log = out / "logs" / f"{job.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stream:
            process = subprocess.Popen(
                _command(_asked(job, out, sources)), stdin=subprocess.PIPE, stdout=stream, stderr=stream
            )
            with lock:
                running.add(process)
            code = process.wait()
        with lock:
            running.discard(process)
            done += 1
            if code:
                failed.append(job)
            outcome = f"failed: {_last_line(log)} ({log})" if code else "done"
            say(f"{done}/{len(waiting)} {job.name} {outcome}")

    with ThreadPoolExecutor(max(1, at_once)) as pool:
        futures = [pool.submit(one, job) for job in waiting]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in [*running]:
                process.terminate()
            raise
    return failed


def launch(jobs: Sequence[Job], out: Path, sources: Source, launcher: str) -> list[Job]:
    """The same through a Hydra launcher (`joblib`, `submitit_slurm`, `ray` … where its plugin is installed)."""
    import hydra
    from hydra.errors import HydraException

    store = Store(out / "results.jsonl")
    waiting = _once(store.missing(jobs))
    if not waiting:
        return []
    with tempfile.TemporaryDirectory(prefix="kedge-") as scratch:
        plan = Path(scratch, "plan.json")
        plan.write_text(json.dumps([_asked(job, out.resolve(), sources) for job in waiting]))
        numbers = ",".join(map(str, range(len(waiting))))
        theirs = sys.argv
        sys.argv = ["kedge", "-m", f"plan={plan}", f"number={numbers}", f"hydra/launcher={launcher}"]
        sys.argv += [f"hydra.sweep.dir={scratch}"]
        try:
            hydra.main(version_base="1.3", config_path="pkg://kedge.config", config_name="reproduce")(perform_one)()
        except HydraException as error:
            raise ConfigError(f"--launcher {launcher}: {str(error).splitlines()[0]}") from error
        finally:
            sys.argv = theirs
    return store.missing(waiting)


def perform_one(config: Any) -> None:
    """One job of a plan, for a launcher."""
    asked = json.loads(Path(config.plan).read_text())[config.number]
    # The pipe stays open until the job is done: its end tells the worker that it has been left alone.
    subprocess.Popen(_command(asked), stdin=subprocess.PIPE).wait()


def _once(jobs: Sequence[Job]) -> list[Job]:
    """Experiments share runs: each is trained once, with all that is wanted of it."""
    found: dict[str, Job] = {}
    for job in jobs:
        measures = dict.fromkeys([*(found[job.key].measures if job.key in found else ()), *job.measures])
        found[job.key] = Job.from_json(job.to_json() | {"measures": list(measures)})
    return list(found.values())


def _asked(job: Job, out: Path, sources: Source) -> dict[str, Any]:
    return {"job": job.to_json(), "out": str(out), "sources": {name: str(path) for name, path in sources.items()}}


def _command(asked: dict[str, Any]) -> list[str]:
    return [sys.executable, "-m", "kedge.reproduce.worker", json.dumps(asked)]


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("kedge: ")[:300] if lines else "it said nothing"
