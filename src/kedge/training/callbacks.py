"""What a run leaves behind while it trains: a line per epoch in history.csv, a checkpoint, a progress bar."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kedge.training.module import RetrievalTraining

__all__ = ["History", "TrainingProgress", "checkpoints"]


def checkpoints(folder: Path, module: RetrievalTraining) -> ModelCheckpoint:
    """Writes last.ckpt after every epoch and best.ckpt by the target metric of the held-out images."""
    name, mode = module.target
    return ModelCheckpoint(
        dirpath=folder,
        filename="best",
        monitor=name if module.held_out else None,
        mode=mode if module.held_out else "min",
        save_last=True,
        save_top_k=1 if module.held_out else 0,
        save_on_train_epoch_end=True,
        enable_version_counter=False,
    )


class History(Callback):
    """One row per finished epoch; a resumed run goes on where its checkpoint ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: list[dict[str, str]] = []
        self._started = time.monotonic()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep the rows of the epochs that the checkpoint holds."""
        del pl_module
        if self.path.exists():
            with self.path.open(newline="") as file:
                self._rows = [row for row in csv.DictReader(file) if int(row["epoch"]) <= trainer.current_epoch]
        self._started = time.monotonic()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the row."""
        optimizer = trainer.optimizers[0]
        row: dict[str, Any] = {
            "epoch": trainer.current_epoch + 1,
            "step": trainer.global_step,
            "seconds": round(time.monotonic() - self._started, 2),
            "lr": optimizer.param_groups[0]["lr"],
        }
        metrics = {
            name: value.item() for name, value in trainer.callback_metrics.items() if name.startswith("val/")
        }
        if isinstance(pl_module, RetrievalTraining):
            means = pl_module.shown(pl_module.running_means())
            metrics |= {f"train/{name}": value for name, value in means.items()}
        self._rows.append({name: str(value) for name, value in {**row, **metrics}.items()})
        self._started = time.monotonic()
        columns = list(dict.fromkeys(name for line in self._rows for name in line))
        part = self.path.with_suffix(".part")
        with part.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(self._rows)
        part.replace(self.path)


class TrainingProgress(Callback):
    """One bar for the whole run with the loss's parts, the target metric and the time left.

    Where the output is no terminal, a line per epoch instead.
    """

    REFRESH = 0.5
    """Seconds between two looks at the device's numbers: a look waits for the device."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._progress: Progress | None = None
        self._looked = 0.0
        self._metric = ""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the bar."""
        del pl_module
        total = int(trainer.estimated_stepping_batches)
        if self.console.is_terminal:
            self._progress = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=24),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[numbers]}"),
                console=self.console,
            )
            self._progress.add_task("training", total=total, completed=trainer.global_step, numbers="")
            self._progress.start()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        """Move the bar, now and then with fresh numbers."""
        del args
        if self._progress is None or time.monotonic() - self._looked < self.REFRESH:
            return
        self._looked = time.monotonic()
        self._show(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take over the target metric."""
        name = getattr(pl_module, "target", ("",))[0]
        if name in trainer.callback_metrics:
            self._metric = f"{name} {trainer.callback_metrics[name].item():.3f}"

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Without a terminal: the epoch's line."""
        if self._progress is None:
            text = f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}  {self._numbers(pl_module)}"
            self.console.print(text, highlight=False, soft_wrap=True)
        else:
            self._show(trainer, pl_module)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Close the bar, whatever ended the run."""
        del trainer, pl_module, stage
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _show(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self._progress is not None:
            task = self._progress.task_ids[0]
            description = f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}"
            numbers = self._numbers(module)
            self._progress.update(task, completed=trainer.global_step, description=description, numbers=numbers)

    def _numbers(self, module: L.LightningModule) -> str:
        means = module.shown(module.running_means()) if isinstance(module, RetrievalTraining) else {}
        shown = [f"{name} {value:.3g}" for name, value in means.items()]
        return "  ".join([*shown, self._metric] if self._metric else shown)
