"""Where a run's numbers go besides history.csv: TensorBoard, Weights & Biases, MLflow, a table; one or several."""

from __future__ import annotations

import json
import logging
import os
import secrets
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import OmegaConf

from kedge.config.compose import CONFIG
from kedge.encoders.network import reach
from kedge.errors import ConfigError
from kedge.io import atomic_write
from kedge.training.settings import CSV, Loggers, MLflow, TensorBoard, WandB

__all__ = ["check_loggers", "open_loggers"]

_KNOWN = "loggers.json"
"""The file in a run's folder that says under which names loggers know the run, so that it goes on there."""
_REACH_SECONDS = 5.0


def check_loggers(wanted: Loggers) -> None:
    """Refuse what cannot work: a package that is not there, a server that does not answer."""
    for name, package in (("tensorboard", "tensorboard"), ("wandb", "wandb"), ("mlflow", "mlflow")):
        asked = getattr(wanted, name)
        if asked is not None and getattr(asked, "needed", True) and find_spec(package) is None:
            raise ConfigError(f"logger={name} needs {package}, which is not installed: pip install 'kedge[{name}]'.")
    if wanted.wandb is not None and _is_online(wanted.wandb):
        _check_server("wandb", _wandb_address(), "use logger.wandb.mode=offline and send the run later with wandb sync")
    if wanted.mlflow is not None and _mlflow_address(wanted.mlflow).startswith("http"):
        _check_server("mlflow", _mlflow_address(wanted.mlflow), "start it, or check logger.mlflow.tracking_uri")


def open_loggers(wanted: Loggers, folder: Path) -> list[Logger]:
    """The loggers of the run in `folder`; what it was started with is told to each once.

    Only the leading process may call this. A resumed run goes on where it stood, in the same W&B or MLflow run.
    """
    check_loggers(wanted)
    known = _read(folder / _KNOWN)
    opened: list[Logger] = []
    for name, make in _MAKERS.items():
        asked = getattr(wanted, name)
        if asked is None or (name == "tensorboard" and find_spec(name) is None):
            continue
        try:
            logger, number = make(asked, folder, known.get(name))
            if name not in known:
                logger.log_hyperparams(_hyperparameters(folder))
        except ModuleNotFoundError as error:
            raise ConfigError(f"logger={name} needs {error.name}: pip install 'kedge[{name}]'.") from error
        except Exception as error:  # each library has errors of its own
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(f"logger={name} cannot be opened: {reason}") from error
        opened.append(logger)
        known[name] = number
    if known:
        with atomic_write(folder / _KNOWN) as stream:
            stream.write((json.dumps(known) + "\n").encode())
    return opened


class _ByEpoch(Logger):
    """Counts in epochs, as history.csv does, so that what belongs to one epoch stands together."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log what the trainer and the module say of an epoch, which they count from 0."""
        if "epoch" in metrics:
            step = round(float(metrics["epoch"])) + 1
            metrics = {name: value for name, value in metrics.items() if name != "epoch"}
        if metrics:
            super().log_metrics(dict(metrics), step)  # type: ignore[safe-super]


class _TensorBoard(_ByEpoch, TensorBoardLogger):
    """Event files."""


class _MLflow(_ByEpoch, MLFlowLogger):
    """A run of MLflow."""


class _Table(_ByEpoch, CSVLogger):  # type: ignore[misc]  # CSVLogger's own signature is narrower than Logger's
    """A table that a resumed run goes on with: the trainer's own would begin it anew."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, name="", version="csv", flush_logs_every_n_steps=1)
        table = folder / "csv" / "metrics.csv"
        before = table.read_bytes() if table.is_file() else b""
        table.unlink(missing_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the folder is there already
            writer = self.experiment
        if before:
            table.write_bytes(before)
            writer.metrics_keys = before.split(b"\n", 1)[0].decode().strip().split(",")


class _Wandb(_ByEpoch, WandbLogger):
    """A run of Weights & Biases that ends with training: the next one of this process, as in a sweep, is another."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log, with the epoch as the axis of all charts."""
        if "epoch" in metrics:
            metrics = {**metrics, "epoch": round(float(metrics["epoch"])) + 1}
            step = None
        WandbLogger.log_metrics(self, metrics, step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Close it."""
        super().finalize(status)
        if self._experiment is not None:
            self._experiment.finish(exit_code=0 if status == "success" else 1)
            self._experiment = None


def _tensorboard(wanted: TensorBoard, folder: Path, known: str | None) -> tuple[Logger, str]:
    del wanted, known
    return _TensorBoard(folder, name="", version="tensorboard", default_hp_metric=False), "tensorboard"


def _csv(wanted: CSV, folder: Path, known: str | None) -> tuple[Logger, str]:
    del wanted, known
    return _Table(folder), "csv"


def _wandb(wanted: WandB, folder: Path, known: str | None) -> tuple[Logger, str]:
    import wandb

    number = known or secrets.token_hex(4)
    run = wandb.init(
        project=wanted.project,
        name=wanted.name or folder.resolve().name,
        entity=wanted.entity,
        group=wanted.group,
        mode=wanted.mode,  # type: ignore[arg-type]
        dir=folder,
        id=number,
        resume="allow" if _is_online(wanted) else None,
        reinit="create_new",  # the caller may have a run of their own
        settings=wandb.Settings(console="off", quiet=True),
    )
    run.define_metric("epoch")
    run.define_metric("*", step_metric="epoch", step_sync=True)
    return _Wandb(experiment=run), number


def _mlflow(wanted: MLflow, folder: Path, known: str | None) -> tuple[Logger, str]:
    for name, level in (("lightning.pytorch.loggers.mlflow", logging.ERROR), ("mlflow.store.db", logging.WARNING)):
        logging.getLogger(name).setLevel(level)  # that something is made where nothing was
    logger = _MLflow(
        experiment_name=wanted.experiment,
        run_name=wanted.name or folder.resolve().name,
        tracking_uri=_mlflow_address(wanted),
        run_id=known,
    )
    number = str(logger.run_id)
    if known is not None:
        logger.experiment.update_run(number, status="RUNNING")
    return logger, number


_MAKERS: dict[str, Callable[[Any, Path, str | None], tuple[Logger, str]]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "csv": _csv,
}


def _hyperparameters(folder: Path) -> dict[str, Any]:
    """The run's configuration, but for where it is logged."""
    values: Any = OmegaConf.to_container(OmegaConf.load(folder / CONFIG), resolve=True)
    return {name: value for name, value in values.items() if name != "logger"}


def _read(path: Path) -> dict[str, str]:
    try:
        return {str(name): str(number) for name, number in json.loads(path.read_text()).items()}
    except FileNotFoundError:
        return {}


def _is_online(wanted: WandB) -> bool:
    return (wanted.mode or os.environ.get("WANDB_MODE") or "online") == "online"


def _wandb_address() -> str:
    import wandb

    return str(wandb.setup().settings.base_url)


def _mlflow_address(wanted: MLflow) -> str:
    if wanted.tracking_uri is not None:
        return wanted.tracking_uri
    import mlflow

    return str(mlflow.get_tracking_uri())


def _check_server(name: str, address: str, advice: str) -> None:
    try:
        reach(address, _REACH_SECONDS)
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(f"logger={name}: {address} does not answer ({reason}); {advice}.") from error
