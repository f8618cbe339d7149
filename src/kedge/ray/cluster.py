"""The Ray cluster: one that is running, or one started here for as long as the work takes."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from kedge.deps import require
from kedge.errors import ConfigError, GalleryError, KedgeError, first_line

__all__ = ["Cluster", "connect"]

_OBJECT_STORE = 1 << 30
"""Bytes of the object store of a cluster started here."""
_CONNECT_SECONDS = 5.0


class Cluster(NamedTuple):
    """The resources of a cluster."""

    cpus: int
    gpus: int


@contextmanager
def connect(address: str | None = None, workers: int | None = None) -> Iterator[Cluster]:
    """A cluster: the one at `address`, the one this process is connected to, or one started here and stopped again."""
    if workers is not None and workers < 1:
        raise ConfigError(f"workers must be at least 1, found {workers}.")
    ray = require("ray", extra="scale", purpose="A Ray cluster")
    require("lance_ray", extra="scale", purpose="A Ray cluster")
    with ExitStack() as stack:
        if not ray.is_initialized():
            folder = stack.enter_context(TemporaryDirectory(prefix="kedge-ray-", ignore_cleanup_errors=True))
            stack.callback(ray.shutdown)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Ray's, of releases to come, and Lance's, of the processes it starts
                _init(address or os.environ.get("RAY_ADDRESS") or None, workers, folder)
        for library in ("ray.data", "lance_ray"):
            logging.getLogger(library).setLevel(logging.ERROR)
        resources = ray.cluster_resources()
        with _unwrap_errors():
            yield Cluster(max(1, int(resources.get("CPU", 0))), int(resources.get("GPU", 0)))


def _init(address: str | None, workers: int | None, folder: str) -> None:
    """Join the cluster at an address, or start one that keeps its files in a folder."""
    import ray

    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address is None:
            ray.init(
                address="local",
                num_cpus=workers or len(os.sched_getaffinity(0)),
                object_store_memory=_OBJECT_STORE,
                include_dashboard=False,
                _temp_dir=folder,
                # A worker takes seconds to start: one that waits for its next chunk is not to be stopped after one.
                _system_config={"idle_worker_killing_time_threshold_ms": 60_000},
                **options,
            )
            return
        if address != "auto":
            # Ray itself would go on asking for ever.
            host, _, port = address.rpartition("/")[2].rpartition(":")
            socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
        ray.init(address=address, **options)
    except (OSError, RuntimeError, ValueError) as error:
        joining = f"No Ray cluster answers at {address}: check --address, or leave it out to start one on this machine."
        starting = f"Ray could not be started on this machine: {first_line(error)}"
        raise ConfigError(starting if address is None else joining) from error


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
        last_line = (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
        raise GalleryError(f"A worker failed ({last_line}); the gallery is as it was.") from error
