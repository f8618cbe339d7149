"""What a run leaves behind while it trains: checkpoints and a line per epoch; and what it shows."""

from __future__ import annotations

import contextlib
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

from kedge.distributed import broadcast_object
from kedge.io import atomic_write
from kedge.training.averaging import Averaging
from kedge.training.module import CHOICE, RetrievalTraining

__all__ = ["BEST", "KEPT", "LAST", "BestAndLast", "History", "TrainingProgress", "WholeCheckpoints"]

BEST = "checkpoints/best.ckpt"
LAST = "checkpoints/last.ckpt"
KEPT = "checkpoints/epoch-{:04d}.ckpt"


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
        with atomic_write(Path(path)) as stream:
            stream.write(buffer.getbuffer())


class BestAndLast(Checkpoint):
    """Saves every epoch as the last one, and as the best one if no earlier one had a higher mAP of held-out images.

    The last one is all that resuming needs; the best one, or the final one where nothing is held out, is the weights
    alone. Unlike the trainer's own, it saves the last epoch whether or not it is the best, and a run may be moved.
    Epochs that are shorter than saving them are saved now and then, so that training does not wait for the disk.
    """

    SHARE = 0.01
    """Of the time, saving may take so much."""

    def __init__(self, folder: Path, averaging: Averaging | None = None, *, keep_every: int = 0) -> None:
        self.folder = folder
        self.averaging = averaging
        self.keep_every = keep_every
        self.best: float | None = None
        self._next = 0.0
        self._kept: dict[str, Any] = {}
        self._waiting = False
        """Whether what is kept is not on disk yet."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save; the trainer calls this after everything else that belongs to the epoch."""
        done = trainer.current_epoch + 1
        final = done >= (trainer.max_epochs or 0)
        if self.keep_every and done % self.keep_every == 0:
            weights = {"state_dict": self._weights(pl_module), "epoch": trainer.current_epoch}
            trainer.strategy.save_checkpoint(weights, self.folder / KEPT.format(done))
        if isinstance(pl_module, RetrievalTraining) and pl_module.validated:
            value = trainer.callback_metrics[CHOICE].item()
            if self.best is None or value >= self.best:  # of equals the later one, which has learned longer
                self.best = value
                self._keep(trainer.current_epoch, pl_module)
        elif final:
            self._keep(trainer.current_epoch, pl_module)
        started = time.monotonic()
        if not broadcast_object(final or started >= self._next):
            return
        if self._waiting:
            trainer.strategy.save_checkpoint(self._kept, self.folder / BEST)
            self._waiting = False
        trainer.save_checkpoint(self.folder / LAST, weights_only=False)
        if isinstance(pl_module, RetrievalTraining):
            pl_module.saved_epochs = done
        ended = time.monotonic()
        self._next = ended + (ended - started) / self.SHARE

    def _keep(self, epoch: int, module: L.LightningModule) -> None:
        """Copy the weights, in a few launches."""
        weights = self._weights(module)
        if self._kept:
            torch._foreach_copy_(list(self._kept["state_dict"].values()), list(weights.values()))
        else:
            self._kept = {"state_dict": {name: value.clone() for name, value in weights.items()}}
        self._kept["epoch"] = epoch
        self._waiting = True

    def _weights(self, module: L.LightningModule) -> dict[str, Any]:
        return module.state_dict() | (self.averaging.weights if self.averaging else {})

    def state_dict(self) -> dict[str, Any]:
        """The best value so far."""
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from that value."""
        self.best = state_dict["best"]


class History(Callback):
    """One row per finished epoch."""

    EVERY = 1.0
    """Seconds: short epochs are written several at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._next = 0.0
        self._rows: list[dict[str, str]] = []
        self._started = time.monotonic()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        del trainer, pl_module
        self._started = time.monotonic()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the row."""
        row: dict[str, Any] = {
            "epoch": trainer.current_epoch + 1,
            "step": trainer.global_step,
            "seconds": round(time.monotonic() - self._started, 2),
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
        }
        if isinstance(pl_module, RetrievalTraining):
            if pl_module.validated:
                row |= {name: trainer.callback_metrics[name].item() for name in pl_module.watched}
            means = pl_module.shown(pl_module.running_means())
            row |= {f"train/{name}": value for name, value in means.items()}
        self._rows.append({name: str(value) for name, value in row.items()})
        self._started = time.monotonic()
        if self._started < self._next and trainer.current_epoch + 1 < (trainer.max_epochs or 0):
            return
        self._next = self._started + self.EVERY
        self._write()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Write what is left."""
        del trainer, pl_module, exception
        if self._rows:
            with contextlib.suppress(OSError):  # what ended the run is the better message
                self._write()

    def state_dict(self) -> dict[str, Any]:
        """The rows belong to the checkpoint: the file may be behind it, or ahead."""
        return {"rows": self._rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the checkpoint's last epoch."""
        self._rows = state_dict["rows"]

    def _write(self) -> None:
        table = io.StringIO(newline="")
        writer = csv.DictWriter(table, list(dict.fromkeys(name for line in self._rows for name in line)))
        writer.writeheader()
        writer.writerows(self._rows)
        # A checkpoint holds the rows too: there is no need to wait for the disk.
        with atomic_write(self.path, at_once=False) as stream:
            stream.write(table.getvalue().encode())


class TrainingProgress(Callback):
    """One bar for the whole run with the loss's parts, the metrics of held-out images and the time left.

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
        """Take over the metrics of held-out images."""
        found = trainer.callback_metrics
        shown = [name for name in getattr(pl_module, "watched", ()) if name in found]
        self._metric = "  ".join(f"{name} {found[name].item():.3f}" for name in shown)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Without a terminal: the epoch's line."""
        if self._progress is None:
            if isinstance(pl_module, RetrievalTraining) and not pl_module.validated:
                self._metric = ""  # that of an earlier epoch
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
