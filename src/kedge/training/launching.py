"""From one process to several: torch's own launcher, as `torchrun` uses it, and what becomes of it here."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from kedge.errors import ConfigError, KedgeError, TrainingError
from kedge.training.callbacks import LAST
from kedge.training.ending import Interrupted, stopped
from kedge.training.layout import Layout

__all__ = ["JOB", "PLACE", "SETTINGS", "launch"]

JOB, SETTINGS, PLACE = "job.json", "config.yaml", "folder"
"""What a worker finds in its folder, and what it leaves there: where the run is."""
_MEETING_POINT = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_ELASTIC = "torch.distributed.elastic"
_PARTING = 20
# How processes die of another's death: it aborts in a broken connection, or the launcher ends it.
_AFTERMATH: dict[int, int] = {signal.SIGABRT: 1, signal.SIGTERM: 2}
"""Seconds for a process to end when it is asked to."""


def launch(config: DictConfig, folder: Path, layout: Layout, *, resume: bool) -> Path:
    """Run one worker per device, each with this configuration; returns the run's folder when all are done."""
    with tempfile.TemporaryDirectory(prefix="kedge-") as place:
        OmegaConf.save(config, Path(place, SETTINGS), resolve=True)
        job = {"folder": str(folder.resolve()), "resume": resume, "path": sys.path, "cwd": str(Path.cwd())}
        Path(place, JOB).write_text(json.dumps(job))
        start = elastic_launch(_how(layout, place), sys.executable)
        try:
            with _as_before():
                start("-m", "kedge.training.worker", place)
        except SignalException as error:
            last = folder / LAST
            done = torch.load(last, map_location="cpu", weights_only=True)["epoch"] + 1 if last.exists() else 0
            raise stopped(folder, done, config.recipe.epochs) from error
        except ChildFailedError as error:
            raise _reason(error.failures, folder) from None
        return Path(Path(place, PLACE).read_text())


def _how(layout: Layout, place: str) -> LaunchConfig:
    meeting: dict[str, Any] = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "local_addr": "localhost"}
    if layout.nodes > 1:
        missing = [name for name in _MEETING_POINT if name not in os.environ]
        if missing:
            raise ConfigError(
                f"trainer.num_nodes={layout.nodes} needs {', '.join(missing)} in the environment of every machine: "
                "set them, or start with torchrun."
            )
        address, port, number = (os.environ[name] for name in _MEETING_POINT)
        meeting = {
            "rdzv_backend": "static",
            "rdzv_endpoint": f"{address}:{port}",
            "rdzv_configs": {"rank": int(number), "timeout": 900},
        }
    # Machines that meet at one place must call the run by one name.
    name = "kedge" if layout.nodes > 1 else uuid.uuid4().hex
    return LaunchConfig(
        min_nodes=layout.nodes,
        max_nodes=layout.nodes,
        nproc_per_node=layout.devices,
        run_id=name,
        max_restarts=0,
        shutdown_timeout=_PARTING,
        logs_specs=DefaultLogsSpecs(log_dir=place),
        **meeting,
    )


def _reason(failures: Mapping[int, ProcessFailure], folder: Path) -> KedgeError:
    """Why the run ended: what a worker refused, rather than what others made of its end."""
    known = {**vars(sys.modules[KedgeError.__module__]), Interrupted.__name__: Interrupted}
    ordered = sorted(failures.values(), key=lambda failure: failure.timestamp)
    if any(failure.exitcode < 0 for failure in ordered):  # one was killed, and the launcher stopped the others
        del known[Interrupted.__name__]
    for failure in ordered:
        kind, _, sentence = _said(failure).partition(": ")
        if isinstance(known.get(kind), type) and issubclass(known[kind], KedgeError):
            found: KedgeError = known[kind](sentence)
            return found
    first = min(ordered, key=lambda failure: (failure.exitcode >= 0, _AFTERMATH.get(-failure.exitcode, 0)))
    resume = f" Go on with: kedge train --resume {folder}" if (folder / LAST).exists() else ""
    if first.exitcode < 0:
        name = signal.Signals(-first.exitcode).name
        return TrainingError(f"Process {first.local_rank} was killed ({name}), and the others with it.{resume}")
    if isinstance(first.message, dict):
        print(first.message.get("extraInfo", {}).get("py_callstack", ""), file=sys.stderr)
    return TrainingError(f"Process {first.local_rank} failed: {_said(first).splitlines()[0]}{resume}")


def _said(failure: ProcessFailure) -> str:
    message: Any = failure.message
    return str(message.get("message", "")) if isinstance(message, dict) else str(message)


@contextmanager
def _as_before() -> Iterator[None]:
    """Whatever the launcher logs and does to signals is gone when it is done."""
    levels = {name: logging.getLogger(name).level for name in logging.root.manager.loggerDict if _ELASTIC in name}
    above = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS} if above else {}
    for name in levels:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        for number, handler in handlers.items():
            signal.signal(number, handler)
