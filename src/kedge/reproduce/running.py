"""Many runs, some at a time, in processes of their own or through a Hydra launcher."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from kedge.errors import ConfigError
from kedge.reproduce.jobs import Job, Source
from kedge.reproduce.store import Store

__all__ = ["DONE", "FAILED", "launch", "run"]

DONE, FAILED = "done", "failed"
"""What a worker answers."""

Said = Callable[[str], None]


def run(jobs: Sequence[Job], out: Path, sources: Source, *, at_once: int = 1, say: Said = print) -> list[Job]:
    """Perform what is missing of these jobs; returns those that failed. What each says goes to a file of its own."""
    store = Store(out / "results.jsonl")
    waiting = _once(store.missing(jobs))
    failed: list[Job] = []
    done, lock = 0, threading.Lock()
    workers: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    everyone = [Worker(out) for _ in range(min(max(1, at_once), len(waiting)))]
    for worker in everyone:
        workers.put(worker)

    def one(job: Job) -> None:
        nonlocal done
        log = out / "logs" / f"{job.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        worker = workers.get()
        fine = worker.perform(_asked(job, out, sources, log))
        workers.put(worker)
        with lock:
            done += 1
            if not fine:
                failed.append(job)
            outcome = "done" if fine else f"failed: {_last_line(log)} ({log})"
            say(f"{done}/{len(waiting)} {job.name} {outcome}")

    with ThreadPoolExecutor(max(1, at_once)) as pool:
        futures = [pool.submit(one, job) for job in waiting]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            for worker in everyone:
                worker.end()
    return failed


class Worker:
    """A process that performs jobs, one after the other; one that died is replaced at the next."""

    def __init__(self, out: Path) -> None:
        self._command = [sys.executable, "-m", "kedge.reproduce.worker", str(out)]
        self._process: subprocess.Popen[str] | None = None
        self._ended = False

    def perform(self, asked: dict[str, Any]) -> bool:
        """Whether it went well."""
        process = self._there()
        if process is None:
            return False
        try:
            process.stdin.write(json.dumps(asked) + "\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            answer = process.stdout.readline()  # type: ignore[union-attr]
        except (OSError, ValueError):  # ended by itself, or by us
            answer = ""
        if not answer:  # it is gone
            process.wait()
            self._process = None
        return answer.strip() == DONE

    def end(self) -> None:
        """It takes no more jobs, and leaves the one it is at."""
        self._ended = True
        process = self._process
        if process is not None:
            with suppress(OSError):
                process.stdin.close()  # type: ignore[union-attr]
            process.wait()

    def _there(self) -> subprocess.Popen[str] | None:
        if self._process is not None and self._process.poll() is not None:
            self._process = None
        if self._process is None and not self._ended:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
            )
        return self._process


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
        plan.write_text(json.dumps([_asked(job, out.resolve(), sources, None) for job in waiting]))
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
    worker = Worker(Path(asked["out"]))
    worker.perform(asked)
    worker.end()


def _once(jobs: Sequence[Job]) -> list[Job]:
    """Experiments share runs: each is trained once, with all that is wanted of it."""
    found: dict[str, Job] = {}
    for job in jobs:
        measures = dict.fromkeys([*(found[job.key].measures if job.key in found else ()), *job.measures])
        found[job.key] = Job.from_json(job.to_json() | {"measures": list(measures)})
    return list(found.values())


def _asked(job: Job, out: Path, sources: Source, log: Path | None) -> dict[str, Any]:
    """What a worker is told; without a log, what it says is said where it was started."""
    return {
        "job": job.to_json(),
        "out": str(out),
        "sources": {name: str(path) for name, path in sources.items()},
        "log": None if log is None else str(log),
    }


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("kedge: ")[:300] if lines else "it said nothing"
