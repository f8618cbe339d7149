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

from kedge.distributed import is_rank_zero
from kedge.io import atomic_write

__all__ = ["History", "TrainingProgress"]


class History:
    """history.csv, one row per finished epoch, written by rank 0; short epochs are written several at a time."""

    WRITE_SECONDS = 1.0

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, str]] = []
        """Part of the checkpoint: the file may be behind it, or ahead."""
        self._next_write = 0.0
        self._unwritten = False

    def append(self, row: dict[str, Any], *, final: bool) -> None:
        """Add the row of an epoch, and write the file if it is time to."""
        self.rows.append({name: str(value) for name, value in row.items()})
        self._unwritten = True
        if final or time.monotonic() >= self._next_write:
            self._next_write = time.monotonic() + self.WRITE_SECONDS
            self.flush()

    def flush(self) -> None:
        """Write rows that are not in the file yet."""
        if not self._unwritten or not is_rank_zero():
            return
        table = io.StringIO(newline="")
        writer = csv.DictWriter(table, list(dict.fromkeys(name for row in self.rows for name in row)))
        writer.writeheader()
        writer.writerows(self.rows)
        # A checkpoint holds the rows too: there is no need to wait for the disk.
        with atomic_write(self.path, at_once=False) as stream:
            stream.write(table.getvalue().encode())
        self._unwritten = False


class TrainingProgress:
    """One bar for the whole run with the loss's components, the metrics of held-out images and the time left.

    Where the output is no terminal, a line per epoch instead.
    """

    REFRESH_SECONDS = 0.5
    """Between two reads of the device's numbers: a read waits for the device."""

    def __init__(self, console: Console, *, epochs: int, total_steps: int) -> None:
        self.console, self.epochs, self.total_steps = console, epochs, total_steps
        self._bar: Progress | None = None
        self._last_read = 0.0
        self._metrics = ""

    def start(self, step: int) -> None:
        """Open the bar."""
        if self.console.is_terminal and not self.console.quiet:
            self._bar = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=24),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[numbers]}"),
                console=self.console,
            )
            self._bar.add_task("training", total=self.total_steps, completed=step, numbers="")
            self._bar.start()

    def on_step(self, epoch: int, step: int, losses: Callable[[], dict[str, float]]) -> None:
        """Move the bar, now and then with fresh numbers."""
        if self._bar is not None and time.monotonic() - self._last_read >= self.REFRESH_SECONDS:
            self._last_read = time.monotonic()
            self._show(epoch, step, losses())

    def on_epoch_end(self, epoch: int, step: int, losses: dict[str, float], metrics: dict[str, float]) -> None:
        """Show the epoch's numbers; `metrics` are those of held-out images, if the epoch was validated."""
        if metrics or self._bar is None:
            self._metrics = "".join(f"  {name} {value:.3f}" for name, value in metrics.items())
        if self._bar is None:
            self.console.print(f"epoch {epoch + 1}/{self.epochs}  {self._text(losses)}")
        else:
            self._show(epoch, step, losses)

    def stop(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show(self, epoch: int, step: int, losses: dict[str, float]) -> None:
        assert self._bar is not None
        description = f"epoch {epoch + 1}/{self.epochs}"
        self._bar.update(self._bar.task_ids[0], completed=step, description=description, numbers=self._text(losses))

    def _text(self, losses: dict[str, float]) -> str:
        return "  ".join(f"{name} {value:.3g}" for name, value in losses.items()) + self._metrics
