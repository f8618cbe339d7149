"""What a run tells while it trains: a row per epoch in history.csv, and a progress bar or lines on the console."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from kedge.distributed import all_reduce_mean_, is_rank_zero
from kedge.errors import TrainingError
from kedge.io import atomic_write
from kedge.training.step import Outcome

__all__ = ["EpochMeans", "History", "TrainingProgress"]


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
    """One bar for the whole run with the loss's components, the metrics of held-out images and the time left.

    Where the output is no terminal, a line per epoch instead.
    """

    REFRESH_SECONDS = 0.5
    """Between two reads of the device's numbers: a read waits for the device."""

    def __init__(self, console: Console, *, epochs: int, total_steps: int) -> None:
        self.console, self.epochs = console, epochs
        self.has_bar = console.is_terminal and not console.quiet
        left = TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[numbers]}")
        columns = TextColumn("[bold]{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn(), *left
        self._bar = Progress(*columns, console=console)
        self._task = self._bar.add_task("training", total=total_steps, numbers="")
        self._last_read = 0.0
        self._metrics = ""

    def start(self, step: int) -> None:
        """Open the bar."""
        if self.has_bar:
            self._bar.reset(self._task, completed=step)
            self._bar.start()

    def on_step(self, epoch: int, step: int, losses: Callable[[], dict[str, float]]) -> None:
        """Move the bar, now and then with fresh numbers."""
        if self.has_bar and time.monotonic() - self._last_read >= self.REFRESH_SECONDS:
            self._last_read = time.monotonic()
            self._show(epoch, step, losses())

    def on_epoch_end(self, epoch: int, step: int, losses: dict[str, float], metrics: dict[str, float]) -> None:
        """Show the epoch's numbers; `metrics` are those of held-out images, if the epoch was validated."""
        if metrics or not self.has_bar:
            self._metrics = "".join(f"  {name} {value:.3f}" for name, value in metrics.items())
        self._show(epoch, step, losses)

    def stop(self) -> None:
        """Close the bar."""
        if self.has_bar:
            self._bar.stop()

    def _show(self, epoch: int, step: int, losses: dict[str, float]) -> None:
        numbers = "  ".join(f"{name} {value:.3g}" for name, value in losses.items()) + self._metrics
        description = f"epoch {epoch + 1}/{self.epochs}"
        if self.has_bar:
            self._bar.update(self._task, completed=step, description=description, numbers=numbers)
        else:
            self.console.print(f"{description}  {numbers}")


class EpochMeans:
    """Means of the loss and its components over the steps of an epoch, summed on the device."""

    def __init__(self, loss_name: str) -> None:
        self.loss_name = loss_name
        self._names: tuple[str, ...] = ()
        self._totals: Tensor | None = None
        self._steps = 0

    def add(self, outcome: Outcome) -> None:
        """Take in one step."""
        self._steps += 1
        if self._totals is None:
            # A copy: a compiled step uses the memory of its outcome again.
            self._names, self._totals = outcome.names, outcome.values.double().clone()
        elif self._names == outcome.names:
            self._totals.add_(outcome.values)
        else:
            parts = " and ".join(", ".join(names[1:-1]) for names in (self._names, outcome.names))
            raise TrainingError(f"The loss {self.loss_name} must have the same parts in every step, found {parts}.")

    def all_reduce(self) -> None:
        """Average over ranks."""
        if self._totals is not None:
            all_reduce_mean_([self._totals])

    def read(self) -> dict[str, float]:
        """The means so far; reading waits for the device."""
        values = [] if self._totals is None else (self._totals / self._steps).tolist()
        return dict(zip(self._names, values, strict=True))

    def shown(self) -> dict[str, float]:
        """The means to report: the loss and, where it has several, its components."""
        shown = {name: value for name, value in self.read().items() if not name.startswith("_")}
        return shown if len(shown) > 2 else {"loss": shown["loss"]} if shown else {}
