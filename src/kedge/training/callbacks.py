"""What a run leaves behind while it trains: checkpoints and a line per epoch; and what it shows."""

from __future__ import annotations

import copy
import csv
import io
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, Checkpoint
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kedge.files import whole_file
from kedge.training.module import RetrievalTraining

__all__ = ["BEST", "LAST", "BestAndLast", "History", "TrainingProgress", "WholeCheckpoints"]

BEST = "checkpoints/best.ckpt"
LAST = "checkpoints/last.ckpt"


class WholeCheckpoints(TorchCheckpointIO):
    """Writes beside the file, then renames.

    The trainer's own way goes through the system's temporary folder: on another disk the last step would be a
    copy, and a kill in the middle of it would leave half a checkpoint in place of the last good one.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Save `checkpoint` at `path`; what was there stays until the new one is complete."""
        del storage_options
        # Serialised first: torch's zip writer, given the file, would hide what the system says of a full disk.
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with whole_file(Path(path)) as stream:
            stream.write(buffer.getbuffer())


class BestAndLast(Checkpoint):
    """Saves every epoch as the last one, and as the best one if no other had a better target metric.

    Unlike the trainer's own, it saves the last epoch whether or not it is the best, and a run may be moved. Epochs
    that are shorter than saving them are saved now and then, so that training does not wait for the disk.
    """

    SHARE = 0.03
    """Of the time, saving may take so much."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.best: float | None = None
        self._next = 0.0
        self._waiting: dict[str, Any] | None = None
        """The best epoch, where it is not on disk yet."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save; the trainer calls this after everything else that belongs to the epoch."""
        if isinstance(pl_module, RetrievalTraining) and pl_module.held_out:
            name, mode = pl_module.target
            value = trainer.callback_metrics[name].item()
            if self.best is None or (value > self.best if mode == "max" else value < self.best):
                self.best = value
                self._waiting = copy.deepcopy(trainer._checkpoint_connector.dump_checkpoint(weights_only=False))
        started = time.monotonic()
        if started < self._next and trainer.current_epoch + 1 < (trainer.max_epochs or 0):
            return
        if self._waiting is not None:
            trainer.strategy.save_checkpoint(self._waiting, self.folder / BEST)
            self._waiting = None
        trainer.save_checkpoint(self.folder / LAST, weights_only=False)
        ended = time.monotonic()
        self._next = ended + (ended - started) / self.SHARE

    def state_dict(self) -> dict[str, Any]:
        """The best value so far."""
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from that value."""
        self.best = state_dict["best"]


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
        row: dict[str, Any] = {
            "epoch": trainer.current_epoch + 1,
            "step": trainer.global_step,
            "seconds": round(time.monotonic() - self._started, 2),
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
        }
        row |= {name: value.item() for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
        if isinstance(pl_module, RetrievalTraining):
            means = pl_module.shown(pl_module.running_means())
            row |= {f"train/{name}": value for name, value in means.items()}
        self._rows.append({name: str(value) for name, value in row.items()})
        self._started = time.monotonic()
        table = io.StringIO(newline="")
        writer = csv.DictWriter(table, list(dict.fromkeys(name for line in self._rows for name in line)))
        writer.writeheader()
        writer.writerows(self._rows)
        with whole_file(self.path) as stream:
            stream.write(table.getvalue().encode())


class TrainingProgress(Callback):
    """One bar for the whole run with the loss's parts, the target metric and the time left.

    Where the output is no terminal, a line per epoch instead.
    """

    REFRESH = 0.5
    """Seconds between two looks at the device's numbers: a look waits for the device."""

    def __init__(self, console: Console) -> None:
        self.console = console
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

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Close the bar."""
        del trainer, pl_module
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Close it too when something else ends the run."""
        del trainer, pl_module, exception
        self._close()

    def _close(self) -> None:
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
