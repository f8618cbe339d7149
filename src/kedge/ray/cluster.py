"""The Ray cluster: one that is running, or one started here for as long as the work takes."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kedge.deps import require
from kedge.errors import ConfigError, GalleryError, KedgeError
from kedge.gallery.schema import first_line

__all__ = ["Cluster", "connect"]

_OBJECT_STORE = 1 << 30
"""Bytes of the object store of a cluster started here."""
_CONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class Cluster:
    """The resources of a cluster."""

    cpus: float
    gpus: float

    @property
    def embedders(self) -> int:
        """Copies of a model that keep it busy."""
        return max(1, int(self.gpus or self.cpus))

    @property
    def workers(self) -> int:
        """Processes that keep it busy."""
        return max(1, int(self.cpus))


@contextmanager
def connect(address: str | None = None, workers: int | None = None) -> Iterator[Cluster]:
    """A cluster: the one at `address`, the one this process is connected to, or one started here and stopped again."""
    if workers is not None and workers < 1:
        raise ConfigError(f"workers must be at least 1, found {workers}.")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # its core writes to the terminal, past any logger
    ray = require("ray", extra="scale", purpose="A Ray cluster")
    require("lance_ray", extra="scale", purpose="A Ray cluster")
    if ray.is_initialized():
        with _unwrap_errors():
            yield _resources()
        return
    address = address or os.environ.get("RAY_ADDRESS") or None
    # Each session leaves its logs in this folder.
    folder = None if address else tempfile.mkdtemp(prefix="kedge-ray-")
    try:
        with warnings.catch_warnings(), _silence_stderr():
            warnings.simplefilter("ignore")  # Ray's, of releases to come, and Lance's, of the processes it starts
            if address:
                _join(address)
            else:
                _start(str(folder), workers)
        with _unwrap_errors():
            yield _resources()
    finally:
        ray.shutdown()
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _silence_stderr() -> Iterator[None]:
    """Drop what Ray's core writes to the terminal when it starts."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


def _join(address: str) -> None:
    import ray

    try:
        if address != "auto":
            # Ray itself would go on asking for ever.
            host, _, port = address.rpartition("/")[2].rpartition(":")
            socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, TimeoutError) as error:
        raise ConfigError(
            f"No Ray cluster answers at {address}: check --address, or leave it out to start one on this machine."
        ) from error


def _start(folder: str, workers: int | None) -> None:
    import ray

    try:
        ray.init(
            address="local",
            num_cpus=workers or len(os.sched_getaffinity(0)),
            object_store_memory=_OBJECT_STORE,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=folder,
            # A worker takes seconds to start: one that waits for its next chunk is not to be stopped after one.
            _system_config={"idle_worker_killing_time_threshold_ms": 60_000},
        )
    except (OSError, RuntimeError, ValueError, TimeoutError) as error:
        raise ConfigError(f"Ray could not be started on this machine: {first_line(error)}") from error


def _resources() -> Cluster:
    import ray

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    logging.getLogger("lance_ray").setLevel(logging.ERROR)
    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return Cluster(resources.get("CPU", 0.0), resources.get("GPU", 0.0))


@contextmanager
def _unwrap_errors() -> Iterator[None]:
    """Raise an error of a worker as it was there, not as Ray wraps it."""
    from ray.exceptions import RayError

    try:
        yield
    except (RayError, RuntimeError) as error:
        cause: BaseException | None = error
        while cause is not None:
            # Ray's wrapper of an error is an instance of its class, too.
            if isinstance(cause, KedgeError) and not isinstance(cause, RayError):
                raise type(cause)(*cause.args) from error
            cause = getattr(cause, "cause", None) or cause.__cause__
        if not isinstance(error, RayError):
            raise
        raise GalleryError(f"A worker failed ({_last_line(error)}): what the gallery held before stays.") from error


def _last_line(error: BaseException) -> str:
    return ([line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__])[-1]
