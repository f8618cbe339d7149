"""From one process to several with torch's elastic launcher, as torchrun does; and the worker that it starts."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from kedge import errors
from kedge.distributed import record_failure
from kedge.errors import ConfigError, KedgeError, TrainingError
from kedge.training.checkpoint import LAST, Interrupted, interrupted, load_checkpoint, resume_hint
from kedge.training.parallel import Layout, layout_of

__all__ = ["launch", "run_worker"]

_START_WORKER = "import sys; from kedge.training.launch import run_worker; run_worker(sys.argv[1])"
_JOB, _CONFIG, _RESULT = "job.json", "config.yaml", "folder"
"""What a worker finds in its working folder, and what it leaves there: where the run is."""
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_ELASTIC = "torch.distributed.elastic"
_SHUTDOWN_SECONDS = 20
_AFTERMATH: dict[int, int] = {signal.SIGABRT: 1, signal.SIGTERM: 2}
"""How processes die of another's death: one aborts in a broken connection, or the launcher ends it."""


def launch(config: DictConfig, folder: Path, layout: Layout, *, resume: bool) -> Path:
    """Run one worker per device, each with this configuration; returns the run's folder when all are done."""
    with tempfile.TemporaryDirectory(prefix="kedge-") as name:
        job_folder = Path(name)
        OmegaConf.save(config, job_folder / _CONFIG, resolve=True)
        job = {"folder": str(folder.resolve()), "resume": resume, "path": sys.path, "pid": os.getpid()}
        (job_folder / _JOB).write_text(json.dumps(job))
        start = elastic_launch(_launch_config(layout, name), sys.executable)
        try:
            with _restored_handlers():
                start("-c", _START_WORKER, name)
        except SignalException as error:
            last = folder / LAST
            saved = load_checkpoint(last)["epoch"] + 1 if last.exists() else 0
            raise interrupted(folder, saved, config.recipe.epochs) from error
        except ChildFailedError as error:
            raise _reason(error.failures, folder) from None
        return Path((job_folder / _RESULT).read_text())


def _launch_config(layout: Layout, log_folder: str) -> LaunchConfig:
    options: dict[str, Any] = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "local_addr": "localhost"}
    options["run_id"] = uuid.uuid4().hex
    if layout.nodes > 1:
        missing = [name for name in _RENDEZVOUS if name not in os.environ]
        if missing:
            raise ConfigError(
                f"trainer.num_nodes={layout.nodes} needs {', '.join(missing)} in the environment of every machine: "
                "set them, or start with torchrun."
            )
        address, port, node_rank = (os.environ[name] for name in _RENDEZVOUS)
        options = {
            "rdzv_backend": "static",
            "rdzv_endpoint": f"{address}:{port}",
            "rdzv_configs": {"rank": int(node_rank), "timeout": 900},
            "run_id": "kedge",  # the same on all machines
        }
    return LaunchConfig(
        min_nodes=layout.nodes,
        max_nodes=layout.nodes,
        nproc_per_node=layout.devices,
        max_restarts=0,
        shutdown_timeout=_SHUTDOWN_SECONDS,
        logs_specs=DefaultLogsSpecs(log_dir=log_folder),
        **options,
    )


def _reason(failures: Mapping[int, ProcessFailure], folder: Path) -> KedgeError:
    """Why the run ended: what a worker refused, rather than what others made of its end."""
    kinds = {**vars(errors), Interrupted.__name__: Interrupted}
    ordered = sorted(failures.values(), key=lambda failure: failure.timestamp)
    if any(failure.exitcode < 0 for failure in ordered):  # one was killed, and the launcher stopped the others
        del kinds[Interrupted.__name__]
    for failure in ordered:
        name, _, sentence = _message(failure).partition(": ")
        kind = kinds.get(name)
        if isinstance(kind, type) and issubclass(kind, KedgeError):
            return kind(sentence)
    first = min(ordered, key=lambda failure: (failure.exitcode >= 0, _AFTERMATH.get(-failure.exitcode, 0)))
    resume = resume_hint(folder, "Go on with:")
    if first.exitcode < 0:
        name = signal.Signals(-first.exitcode).name
        return TrainingError(f"Process {first.local_rank} was killed ({name}), and the others with it.{resume}")
    if isinstance(first.message, dict):
        print(first.message.get("extraInfo", {}).get("py_callstack", ""), file=sys.stderr)
    return TrainingError(f"Process {first.local_rank} failed: {_message(first).splitlines()[0]}{resume}")


def _message(failure: ProcessFailure) -> str:
    message: Any = failure.message
    return str(message.get("message", "")) if isinstance(message, dict) else str(message)


@contextmanager
def _restored_handlers() -> Iterator[None]:
    """Keep the launcher quiet, and restore the signal handlers that it replaces."""
    levels = {name: logging.getLogger(name).level for name in logging.root.manager.loggerDict if _ELASTIC in name}
    in_main_thread = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS} if in_main_thread else {}
    for name in levels:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def run_worker(job_path: str) -> None:
    """One process of a run, as the launcher starts it."""
    job_folder = Path(job_path)
    job = json.loads((job_folder / _JOB).read_text())
    sys.path[:] = job["path"]  # a loss of the user's is found where the user's program found it
    threading.Thread(target=_end_with_parent, args=(job["pid"],), daemon=True).start()
    try:
        from kedge.config.compose import load_config
        from kedge.training.config import Settings
        from kedge.training.run import run_here

        # The launcher wrote it, of a configuration that it composed or checked.
        config = load_config(job_folder / _CONFIG, trust=True)
        layout = layout_of(Settings.from_config(config), resumed=job["resume"])
        folder, _ = run_here(config, Path(job["folder"]), layout, resume=job["resume"])
        if os.environ["LOCAL_RANK"] == "0":
            (job_folder / _RESULT).write_text(str(folder))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:  # for the launcher to tell
        record_failure(error)
        sys.exit(2)


def _end_with_parent(parent: int) -> None:
    """A killed launcher cannot ask its workers to stop."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)
