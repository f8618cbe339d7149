"""Where a run's numbers go: history.csv and the console; on request TensorBoard, Weights & Biases, MLflow, CSV."""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import secrets
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kedge.config.compose import CONFIG
from kedge.deps import missing_extra
from kedge.distributed import is_rank_zero
from kedge.encoders.network import reach
from kedge.errors import ConfigError
from kedge.io import atomic_write
from kedge.training.config import CSV, Loggers, MLflow, TensorBoard, WandB

__all__ = ["History", "MetricsLogger", "TrainingProgress", "check_loggers", "open_loggers"]

_IDS = "loggers.json"
"""The file in a run's folder with the ids under which loggers know the run, so that a resumed run continues there."""


class History:
    """history.csv, one row per finished epoch, written by rank 0."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, str]] = []
        """Part of the checkpoint: the file may be behind it, or ahead."""

    def append(self, row: dict[str, Any]) -> None:
        """Add the row of an epoch."""
        self.rows.append({name: str(value) for name, value in row.items()})
        if not is_rank_zero():
            return
        table = io.StringIO(newline="")
        writer = csv.DictWriter(table, list(dict.fromkeys(name for row in self.rows for name in row)))
        writer.writeheader()
        writer.writerows(self.rows)
        # A checkpoint holds the rows too: there is no need to wait for the disk.
        with atomic_write(self.path, at_once=False) as stream:
            stream.write(table.getvalue().encode())


class TrainingProgress:
    """One bar for the whole run with the metrics of held-out images, the loss and the time left.

    Where the output is no terminal, a line per epoch with the loss's components too.
    """

    REFRESH_SECONDS = 0.5
    """Between two reads of the device's numbers: a read waits for the device."""

    def __init__(self, console: Console, *, epochs: int, total_steps: int) -> None:
        self.console, self.epochs = console, epochs
        self.has_bar = console.is_terminal and not console.quiet
        columns = TextColumn("[bold]{task.description}"), BarColumn(bar_width=16), TextColumn("{task.fields[numbers]}")
        self._bar = Progress(*columns, TimeRemainingColumn(), TextColumn("left"), console=console)
        self._task = self._bar.add_task("training", total=total_steps, numbers="")
        self._last_read = 0.0
        self._metrics = ""

    def start(self, step: int) -> None:
        """Open the bar."""
        if self.has_bar:
            self._bar.reset(self._task, completed=step)
            self._bar.start()

    def stop(self) -> None:
        """Close the bar."""
        if self.has_bar:
            self._bar.stop()

    def on_step(self, epoch: int, step: int, losses: Callable[[], dict[str, float]]) -> None:
        """Move the bar, now and then with fresh numbers."""
        if self.has_bar and time.monotonic() - self._last_read >= self.REFRESH_SECONDS:
            self._last_read = time.monotonic()
            self._show(epoch, step, losses())

    def on_epoch_end(self, epoch: int, step: int, losses: dict[str, float], metrics: dict[str, float]) -> None:
        """Show the epoch's numbers; `metrics` are those of held-out images, if the epoch was validated."""
        if metrics or not self.has_bar:
            names = {name: name.removeprefix("val/") if self.has_bar else name for name in metrics}
            self._metrics = "".join(f"  {names[name]} {value:.3f}" for name, value in metrics.items())
        self._show(epoch, step, losses)

    def _show(self, epoch: int, step: int, losses: dict[str, float]) -> None:
        shown = {name: value for name, value in losses.items() if name == "loss" or not self.has_bar}
        numbers = "  ".join(f"{name} {value:.3g}" for name, value in shown.items()) + self._metrics
        description = f"epoch {epoch + 1}/{self.epochs}"
        if self.has_bar:
            self._bar.update(self._task, completed=step, description=description, numbers=numbers)
        else:
            self.console.print(f"{description}  {numbers}")


class MetricsLogger:
    """What the training loop calls. A step is an epoch, counted from 1."""

    run_id = ""
    """Under which the logger knows the run."""

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        """Log the configuration of a new run."""

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Log the metrics of an epoch."""

    def finalize(self, *, success: bool) -> None:
        """Close the logger."""


def check_loggers(loggers: Loggers) -> None:
    """Refuse what cannot work: a package that is not installed, a server that does not answer."""
    for name in ("tensorboard", "wandb", "mlflow"):
        options = getattr(loggers, name)
        if options is not None and getattr(options, "needed", True) and find_spec(name) is None:
            raise missing_extra(name, extra=name, purpose=f"logger={name}")
    if loggers.wandb is not None and _is_online(loggers.wandb):
        _check_server("wandb", _wandb_address(), "use logger.wandb.mode=offline and send the run later with wandb sync")
    if loggers.mlflow is not None and (address := _mlflow_address(loggers.mlflow)).startswith("http"):
        _check_server("mlflow", address, "start it, or check logger.mlflow.tracking_uri")


def open_loggers(loggers: Loggers, folder: Path) -> list[MetricsLogger]:
    """The loggers of the run in `folder`, each with the run's configuration; call it on rank 0 only.

    A resumed run continues in the same W&B or MLflow run.
    """
    ids: dict[str, str] = json.loads((folder / _IDS).read_text()) if (folder / _IDS).exists() else {}
    opened: list[MetricsLogger] = []
    for name, kind in _LOGGERS.items():
        options = getattr(loggers, name)
        if options is None or (name == "tensorboard" and find_spec(name) is None):
            continue
        try:
            logger = kind(options, folder, ids.get(name))
            if name not in ids:
                config: Any = OmegaConf.to_container(OmegaConf.load(folder / CONFIG), resolve=True)
                logger.log_hyperparams({group: values for group, values in config.items() if group != "logger"})
        except ModuleNotFoundError as error:
            raise missing_extra(error.name or name, extra=name, purpose=f"logger={name}") from error
        except Exception as error:  # each library has errors of its own
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(f"logger={name} cannot be opened: {reason}") from error
        opened.append(logger)
        ids[name] = logger.run_id
    if ids:
        with atomic_write(folder / _IDS) as stream:
            stream.write((json.dumps(ids) + "\n").encode())
    return opened


class _TensorBoard(MetricsLogger):
    """Event files for TensorBoard, with the run's configuration as text."""

    def __init__(self, _: TensorBoard, folder: Path, __: str | None) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self.writer: Any = SummaryWriter(folder / "tensorboard")

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        self.writer.add_text("config", f"```yaml\n{OmegaConf.to_yaml(params)}```")

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def finalize(self, *, success: bool) -> None:  # noqa: ARG002
        self.writer.close()


class _CSVTable(MetricsLogger):
    """csv/metrics.csv, which a resumed run continues; its config.yaml has the hyperparameters."""

    def __init__(self, _: CSV, folder: Path, __: str | None) -> None:
        self.table = History(folder / "csv" / "metrics.csv")
        self.table.path.parent.mkdir(exist_ok=True)
        if self.table.path.is_file():
            with self.table.path.open(newline="") as stream:
                self.table.rows = list(csv.DictReader(stream))

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.table.rows = [row for row in self.table.rows if int(row["step"]) < step]
        self.table.append({"step": step} | metrics)


class _WandbRun(MetricsLogger):
    """A run of Weights & Biases that ends with training: the next one of this process, as in a sweep, is another."""

    def __init__(self, options: WandB, folder: Path, run_id: str | None) -> None:
        import wandb

        self.run_id = run_id or secrets.token_hex(4)
        self.run: Any = wandb.init(
            project=options.project,
            name=options.name or folder.resolve().name,
            entity=options.entity,
            group=options.group,
            mode=options.mode,
            dir=folder,
            id=self.run_id,
            resume="allow" if _is_online(options) else None,
            reinit="create_new",  # the caller may have a run of their own
            settings=wandb.Settings(console="off", quiet=True),
        )
        # The epoch is the axis of all charts.
        self.run.define_metric("epoch")
        self.run.define_metric("*", step_metric="epoch", step_sync=True)

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        self.run.config.update(params, allow_val_change=True)

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.run.log({**metrics, "epoch": step})

    def finalize(self, *, success: bool) -> None:
        self.run.finish(exit_code=0 if success else 1)


class _MLflowRun(MetricsLogger):
    """A run of MLflow, in an experiment that is made where it is missing."""

    def __init__(self, options: MLflow, folder: Path, run_id: str | None) -> None:
        from mlflow import MlflowClient

        logging.getLogger("mlflow.store.db").setLevel(logging.WARNING)  # that something is made where nothing was
        self.client = client = MlflowClient(_mlflow_address(options))
        if run_id is not None:
            client.update_run(run_id, status="RUNNING")
        else:
            found = client.get_experiment_by_name(options.experiment)
            experiment_id = client.create_experiment(options.experiment) if found is None else found.experiment_id
            run_id = client.create_run(experiment_id, run_name=options.name or folder.resolve().name).info.run_id
        self.run_id = run_id

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        """As the run's parameters, such as recipe/epochs."""
        import pandas

        for name, value in pandas.json_normalize(params, sep="/").iloc[0].items():
            self.client.log_param(self.run_id, str(name), str(value)[:250])  # longer ones are refused

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.client.log_metric(self.run_id, name, value, step=step)

    def finalize(self, *, success: bool) -> None:
        self.client.set_terminated(self.run_id, "FINISHED" if success else "FAILED")


_LOGGERS: dict[str, Callable[[Any, Path, str | None], MetricsLogger]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WandbRun,
    "mlflow": _MLflowRun,
    "csv": _CSVTable,
}


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
        reach(address)
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(f"logger={name}: {address} does not answer ({reason}); {advice}.") from error
