"""Loggers of metrics besides history.csv: TensorBoard, Weights & Biases, MLflow, CSV; one or several."""

from __future__ import annotations

import csv
import json
import logging
import os
import secrets
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger
from omegaconf import OmegaConf

from kedge.config.compose import CONFIG
from kedge.deps import missing_extra
from kedge.encoders.network import reach
from kedge.errors import ConfigError
from kedge.io import atomic_write
from kedge.training.config import CSV, Loggers, MLflow, TensorBoard, WandB

__all__ = ["MetricsLogger", "check_loggers", "open_loggers"]

_IDS = "loggers.json"
"""The file in a run's folder with the ids under which loggers know the run, so that a resumed run continues there."""
_REACH_SECONDS = 5.0


class MetricsLogger(Protocol):
    """What the training loop calls; the methods of Lightning's loggers. A step is an epoch, counted from 1."""

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        """Log the run's configuration."""

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Log the metrics of an epoch."""

    def finalize(self, status: str) -> None:
        """Close the logger of a run that ended with `status`: success or failed."""


def check_loggers(loggers: Loggers) -> None:
    """Refuse what cannot work: a package that is not installed, a server that does not answer."""
    for name in ("tensorboard", "wandb", "mlflow"):
        options = getattr(loggers, name)
        if options is not None and getattr(options, "needed", True) and find_spec(name) is None:
            raise missing_extra(name, extra=name, purpose=f"logger={name}")
    if loggers.wandb is not None and _is_online(loggers.wandb):
        _check_server("wandb", _wandb_address(), "use logger.wandb.mode=offline and send the run later with wandb sync")
    if loggers.mlflow is not None and _mlflow_address(loggers.mlflow).startswith("http"):
        _check_server("mlflow", _mlflow_address(loggers.mlflow), "start it, or check logger.mlflow.tracking_uri")


def open_loggers(loggers: Loggers, folder: Path) -> list[MetricsLogger]:
    """The loggers of the run in `folder`, each with the run's configuration; call it on rank 0 only.

    A resumed run continues in the same W&B or MLflow run.
    """
    check_loggers(loggers)
    ids: dict[str, str] = json.loads((folder / _IDS).read_text()) if (folder / _IDS).exists() else {}
    opened: list[MetricsLogger] = []
    for name, make in _MAKERS.items():
        options = getattr(loggers, name)
        if options is None or (name == "tensorboard" and find_spec(name) is None):
            continue
        try:
            logger, run_id = make(options, folder, ids.get(name))
            if name not in ids:
                logger.log_hyperparams(_hyperparameters(folder))
        except ModuleNotFoundError as error:
            raise missing_extra(error.name or name, extra=name, purpose=f"logger={name}") from error
        except Exception as error:  # each library has errors of its own
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(f"logger={name} cannot be opened: {reason}") from error
        opened.append(logger)
        ids[name] = run_id
    if ids:
        with atomic_write(folder / _IDS) as stream:
            stream.write((json.dumps(ids) + "\n").encode())
    return opened


class _CSVTable:
    """csv/metrics.csv, which a resumed run continues."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, []
        path.parent.mkdir(exist_ok=True)
        if path.is_file():
            with path.open(newline="") as stream:
                self.rows = list(csv.DictReader(stream))

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        """The run's config.yaml has them."""

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Write the table with one more row."""
        self.rows = [row for row in self.rows if int(row["step"]) < step]
        self.rows.append({"step": str(step)} | {name: str(value) for name, value in metrics.items()})
        with self.path.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, list(dict.fromkeys(name for row in self.rows for name in row)))
            writer.writeheader()
            writer.writerows(self.rows)

    def finalize(self, status: str) -> None:
        """Nothing is left to write."""


class _WandbRun:
    """A run of Weights & Biases that ends with training: the next one of this process, as in a sweep, is another."""

    def __init__(self, run: Any) -> None:
        self.run = run
        run.define_metric("epoch")
        run.define_metric("*", step_metric="epoch", step_sync=True)

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        """As the run's config."""
        self.run.config.update(params, allow_val_change=True)

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """With the epoch as the axis of all charts."""
        self.run.log({**metrics, "epoch": step})

    def finalize(self, status: str) -> None:
        """Close the run."""
        self.run.finish(exit_code=0 if status == "success" else 1)


def _tensorboard(options: TensorBoard, folder: Path, run_id: str | None) -> tuple[MetricsLogger, str]:
    del options, run_id
    return TensorBoardLogger(folder, name="", version="tensorboard", default_hp_metric=False), "tensorboard"


def _csv(options: CSV, folder: Path, run_id: str | None) -> tuple[MetricsLogger, str]:
    del options, run_id
    return _CSVTable(folder / "csv" / "metrics.csv"), "csv"


def _wandb(options: WandB, folder: Path, run_id: str | None) -> tuple[MetricsLogger, str]:
    import wandb

    run_id = run_id or secrets.token_hex(4)
    run = wandb.init(
        project=options.project,
        name=options.name or folder.resolve().name,
        entity=options.entity,
        group=options.group,
        mode=options.mode,
        dir=folder,
        id=run_id,
        resume="allow" if _is_online(options) else None,
        reinit="create_new",  # the caller may have a run of their own
        settings=wandb.Settings(console="off", quiet=True),
    )
    return _WandbRun(run), run_id


def _mlflow(options: MLflow, folder: Path, run_id: str | None) -> tuple[MetricsLogger, str]:
    for name, level in (("lightning.pytorch.loggers.mlflow", logging.ERROR), ("mlflow.store.db", logging.WARNING)):
        logging.getLogger(name).setLevel(level)  # that something is made where nothing was
    logger = MLFlowLogger(
        experiment_name=options.experiment,
        run_name=options.name or folder.resolve().name,
        tracking_uri=_mlflow_address(options),
        run_id=run_id,
    )
    if run_id is not None:
        logger.experiment.update_run(run_id, status="RUNNING")
    return logger, str(logger.run_id)


_MAKERS: dict[str, Callable[[Any, Path, str | None], tuple[MetricsLogger, str]]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "csv": _csv,
}


def _hyperparameters(folder: Path) -> dict[str, Any]:
    """The run's configuration, but for its loggers."""
    values: Any = OmegaConf.to_container(OmegaConf.load(folder / CONFIG), resolve=True)
    return {name: value for name, value in values.items() if name != "logger"}


def _is_online(options: WandB) -> bool:
    return (options.mode or os.environ.get("WANDB_MODE") or "online") == "online"


def _wandb_address() -> str:
    import wandb

    return str(wandb.setup().settings.base_url)


def _mlflow_address(options: MLflow) -> str:
    if options.tracking_uri is not None:
        return options.tracking_uri
    import mlflow

    return str(mlflow.get_tracking_uri())


def _check_server(name: str, address: str, advice: str) -> None:
    try:
        reach(address, _REACH_SECONDS)
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(f"logger={name}: {address} does not answer ({reason}); {advice}.") from error
