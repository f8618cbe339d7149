"""Data parallelism and precision: how a batch is split among processes, DDP and autocast, and torch's launcher."""

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
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from kedge import errors
from kedge.config.compose import load_config
from kedge.console import plain_warnings
from kedge.distributed import all_reduce_mean_, global_rank, is_torchrun, record_failure, world_size
from kedge.errors import ConfigError, KedgeError, TrainingError
from kedge.training.checkpoint import LAST, Interrupted, interrupted, load_checkpoint, resume_hint
from kedge.training.config import Settings

__all__ = [
    "SINGLE_PROCESS",
    "Accelerator",
    "Layout",
    "average_batch_statistics",
    "device_of",
    "launch",
    "layout_of",
    "precision_on",
    "run_worker",
]

_START_WORKER = "import sys; from kedge.training.parallel import run_worker; run_worker(sys.argv[1])"
_JOB, _CONFIG, _RESULT = "job.json", "config.yaml", "folder"
"""What a worker finds in its working folder, and what it leaves there: where the run is."""
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_ELASTIC = "torch.distributed.elastic"
_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_SHUTDOWN_SECONDS = 20
_AFTERMATH: dict[int, int] = {signal.SIGABRT: 1, signal.SIGTERM: 2}
"""How processes die of another's death: one aborts in a broken connection, or the launcher ends it."""


@dataclass(frozen=True)
class Layout:
    """Processes (on each of some machines) and accumulation steps that share a batch, and this process's rank."""

    devices: int = 1
    nodes: int = 1
    accumulate: int = 1
    rank: int = 0

    @property
    def processes(self) -> int:
        """On all machines."""
        return self.devices * self.nodes

    @property
    def parts(self) -> int:
        """Of a batch: one for each process and accumulation step."""
        return self.processes * self.accumulate

    def batch_size(self, requested: int, images: int) -> int:
        """The global batch: as requested, or as large as so few images allow."""
        size = requested if requested <= images else images - images % self.parts
        if self.parts > 1 and size < 2 * self.parts:
            raise ConfigError(f"{images} training images are too few for {self}: each needs at least two at a time.")
        return size

    def __str__(self) -> str:
        words = [f"{self.processes} processes"] if self.processes > 1 else []
        words += [f"{self.accumulate} steps (trainer.accumulate)"] if self.accumulate > 1 else []
        return " times ".join(words)


SINGLE_PROCESS = Layout()


def layout_of(settings: Settings, *, resumed: bool = False) -> Layout:
    """The layout that the settings ask for or, under torchrun, the one that it has started."""
    trainer, batch_size = settings.trainer, settings.recipe.batch_size
    if world_size() > 1 and not is_torchrun():
        raise ConfigError(f"{world_size()} processes were not started by torchrun; start them with it.")
    device = device_of(trainer.accelerator)
    available = torch.cuda.device_count() if device.type == "cuda" else 1
    devices = available if isinstance(trainer.devices, str) else trainer.devices
    nodes = trainer.num_nodes
    if is_torchrun():
        started = int(os.environ["LOCAL_WORLD_SIZE"])
        if not resumed and trainer.devices not in ("auto", 1, started):
            raise ConfigError(
                f"torchrun started {started} processes here, but trainer.devices={devices}; leave that out."
            )
        devices, nodes = started, int(os.environ["WORLD_SIZE"]) // started
    if device.type == "cuda" and devices > available:
        raise ConfigError(f"trainer.devices={devices}, but this machine has {available} GPUs; use at most that many.")
    layout = Layout(devices, nodes, trainer.accumulate, global_rank())
    if batch_size % layout.parts or (layout.parts > 1 and batch_size < 2 * layout.parts):
        raise ConfigError(
            f"recipe.batch_size must be a multiple of {layout.parts}, with at least two images for each of {layout}, "
            f"found {batch_size}."
        )
    return layout


def device_of(accelerator: str) -> torch.device:
    """The kind of device to train on."""
    if accelerator == "gpu" and not torch.cuda.is_available():
        raise ConfigError("trainer.accelerator=gpu, but no CUDA GPU was found; use auto or cpu.")
    return torch.device("cuda" if accelerator != "cpu" and torch.cuda.is_available() else "cpu")


def precision_on(device: torch.device, precision: str) -> str:
    """The precision that `auto` stands for."""
    if precision == "auto":
        return "bf16-mixed" if device.type == "cuda" else "32-true"
    return precision


class Accelerator:
    """This process's device with autocast and gradient scaling, and DDP where there are several processes."""

    def __init__(self, settings: Settings, layout: Layout, device: torch.device) -> None:
        """One seed gives one result on the same machine."""
        # cuDNN's kernels that always add in one order, and no search for others.
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        if settings.trainer.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(settings.trainer.deterministic)
        self.layout = layout
        self.device = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
        self._dtype = _AUTOCAST.get(precision_on(device, settings.trainer.precision))
        self.scaler = torch.amp.GradScaler(device.type, enabled=self._dtype is torch.float16)
        """Scales up what float16 would round to zero; with other precisions it does nothing."""

    def autocast(self) -> torch.autocast:
        """The context of a forward pass."""
        return torch.autocast(self.device.type, self._dtype, enabled=self._dtype is not None)

    def to_device(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """A batch, without waiting where its memory is pinned."""
        inputs, labels = (tensor.to(self.device, non_blocking=True) for tensor in batch)
        return inputs, labels

    def wrap(self, module: nn.Module, *, find_unused_parameters: bool = False) -> nn.Module:
        """The module under DDP, where there are several processes."""
        if self.layout.processes == 1:
            return module
        warnings.filterwarnings("ignore", message=".*`broadcast_buffers` is deprecated.*")  # its successor is too new
        return DistributedDataParallel(
            module,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            find_unused_parameters=find_unused_parameters,
            broadcast_buffers=False,  # they are averaged: `average_batch_statistics`
        )

    def no_sync(self, module: nn.Module) -> AbstractContextManager[None]:
        """Gradients stay on their rank meanwhile, and add up there."""
        return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()


def average_batch_statistics(network: nn.Module) -> None:
    """Average over ranks the statistics of batch normalisation that is not synchronised."""
    layers = (layer for layer in network.modules() if isinstance(layer, _BatchNorm))
    local = (layer for layer in layers if not isinstance(layer, nn.SyncBatchNorm))
    buffers: list[Tensor] = [value for layer in local for value in layer.buffers() if value.is_floating_point()]
    all_reduce_mean_(buffers)


# ---------------------------------------------------------------------- from one process to several, as torchrun does


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
    meeting: dict[str, Any] = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "local_addr": "localhost"}
    meeting["run_id"] = uuid.uuid4().hex
    if layout.nodes > 1:
        missing = [name for name in _RENDEZVOUS if name not in os.environ]
        if missing:
            raise ConfigError(
                f"trainer.num_nodes={layout.nodes} needs {', '.join(missing)} in the environment of every machine; "
                "set them, or start with torchrun."
            )
        address, port, node_rank = (os.environ[name] for name in _RENDEZVOUS)
        meeting = {"rdzv_backend": "static", "rdzv_endpoint": f"{address}:{port}", "run_id": "kedge"}
        meeting["rdzv_configs"] = {"rank": int(node_rank), "timeout": 900}
    if "shutdown_timeout" in {field.name for field in fields(LaunchConfig)}:  # older releases of torch wait 30 seconds
        meeting["shutdown_timeout"] = _SHUTDOWN_SECONDS
    return LaunchConfig(
        min_nodes=layout.nodes,
        max_nodes=layout.nodes,
        nproc_per_node=layout.devices,
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=log_folder),
        **meeting,
    )


def _reason(failures: Mapping[int, ProcessFailure], folder: Path) -> KedgeError:
    """Why the run ended: what a worker refused, rather than what others made of its end."""
    ordered = sorted(failures.values(), key=lambda failure: failure.timestamp)
    kinds = dict(vars(errors))
    if all(failure.exitcode >= 0 for failure in ordered):  # else one was killed, and the launcher stopped the others
        kinds["Interrupted"] = Interrupted
    for failure in ordered:
        name, _, sentence = _message(failure).partition(": ")
        kind = kinds.get(name)
        if isinstance(kind, type) and issubclass(kind, KedgeError):
            return kind(sentence)
    first = min(ordered, key=lambda failure: (failure.exitcode >= 0, _AFTERMATH.get(-failure.exitcode, 0)))
    resume = resume_hint(folder, "Continue with:")
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
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if _ELASTIC in name]
    levels = [logger.level for logger in loggers]
    in_main_thread = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS} if in_main_thread else {}
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def run_worker(job_path: str) -> None:
    """One process of a run, as the launcher starts it."""
    job_folder = Path(job_path)
    job = json.loads((job_folder / _JOB).read_text())
    plain_warnings()
    sys.path[:] = job["path"]  # a loss of the user's is found where the user's program found it
    threading.Thread(target=_end_with_parent, args=(job["pid"],), daemon=True).start()
    try:
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
