"""Checkpoints of a run, and how it ends early: by SIGINT or SIGTERM, or by an error of the operating system."""

from __future__ import annotations

import errno
import io
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from kedge.distributed import broadcast_object, is_rank_zero
from kedge.errors import TrainingError
from kedge.io import atomic_write

__all__ = [
    "BEST",
    "KEPT",
    "LAST",
    "Interrupted",
    "ModelCheckpoint",
    "handle_signals",
    "interrupted",
    "load_checkpoint",
    "resume_hint",
    "wrap_os_errors",
]

BEST = "checkpoints/best.ckpt"
LAST = "checkpoints/last.ckpt"
KEPT = "checkpoints/epoch-{:04d}.ckpt"

_STATE = ("epoch", "global_step", "state_dict", "optimizer_states", "lr_schedulers", "best", "history")


class ModelCheckpoint:
    """Saves every epoch as the last one, and as the best one if no earlier epoch had a higher score.

    The last checkpoint holds all that resuming needs; the best one, or the final one where nothing is held out, the
    weights alone. Epochs that are shorter than saving them are saved now and then, so that training does not wait for
    the disk. Rank 0 writes.
    """

    MAX_TIME_SHARE = 0.01
    """Share of the time that saving may take."""

    def __init__(self, folder: Path, *, epochs: int, keep_every: int = 0) -> None:
        self.folder, self.epochs, self.keep_every = folder, epochs, keep_every
        self.best: float | None = None
        """The highest score so far."""
        self.epochs_saved = 0
        """Epochs that the last checkpoint holds."""
        self._next_save = 0.0
        self._best_weights: dict[str, Tensor] = {}
        self._best_epoch: int | None = None
        """Of the weights that are still to be written."""

    def on_epoch_end(
        self, epoch: int, score: float | None, weights: dict[str, Tensor], state: Callable[[], dict[str, Any]]
    ) -> None:
        """Save what is due after `epoch`: `weights` are those of the model, `state` is all that resuming needs."""
        done, final = epoch + 1, epoch + 1 == self.epochs
        if self.keep_every and done % self.keep_every == 0:
            _save({"state_dict": weights, "epoch": epoch}, self.folder / KEPT.format(done))
        if final if score is None else self.best is None or score >= self.best:
            # Of equals the later one, which has learned longer. Copied on its device, in a few launches.
            self.best, self._best_epoch = score, epoch
            self._best_weights = self._best_weights or {name: value.clone() for name, value in weights.items()}
            torch._foreach_copy_(list(self._best_weights.values()), list(weights.values()))
        started = time.monotonic()
        if not broadcast_object(final or started >= self._next_save):
            return
        if self._best_epoch is not None:
            _save({"state_dict": self._best_weights, "epoch": self._best_epoch}, self.folder / BEST)
            self._best_epoch = None
        _save({"epoch": epoch, "best": self.best} | state(), self.folder / LAST)
        self.epochs_saved = done
        ended = time.monotonic()
        self._next_save = ended + (ended - started) / self.MAX_TIME_SHARE


def _save(checkpoint: dict[str, Any], path: Path) -> None:
    if not is_rank_zero():
        return
    # Serialised first: torch's zip writer, given the file, would hide what the system says of a full disk.
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as stream:
        stream.write(buffer.getbuffer())


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The state that `ModelCheckpoint` saved; also of 0.1, which kept parts of it below `callbacks`."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    callbacks = state.get("callbacks")
    if callbacks is not None:
        state["best"] = callbacks.get("BestAndLast", {}).get("best")
        state["history"] = callbacks.get("History", {}).get("rows", [])
        state["ema"] = callbacks.get("Averaging")
        state["precision"] = state.get("MixedPrecision")
    missing = [name for name in _STATE if name not in state]
    if missing:
        raise TrainingError(f"{path} cannot be resumed, since it has no {', '.join(missing)}; train again.")
    return state


class Interrupted(TrainingError):
    """The user stopped the run; its last checkpoint can be resumed."""


def resume_hint(folder: Path, words: str) -> str:
    """The command that resumes the run, after these words; nothing where there is no checkpoint."""
    return f" {words} kedge train --resume {folder}" if (folder / LAST).exists() else ""


def interrupted(folder: Path, epochs_saved: int, epochs: int) -> Interrupted:
    """The error of a run that was stopped."""
    hint = resume_hint(folder, f"Stopped after {epochs_saved} of {epochs} epochs. Continue with:").strip()
    return Interrupted(hint or "Stopped before the first epoch ended; there is nothing to resume.")


@contextmanager
def handle_signals(stop: threading.Event) -> Iterator[None]:
    """SIGINT and SIGTERM set `stop` and raise KeyboardInterrupt; handlers of the caller's own stay in place."""

    def handle(number: int, frame: FrameType | None) -> None:
        stop.set()
        signal.default_int_handler(number, frame)

    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    replaced = {number: default for number, default in defaults.items() if signal.getsignal(number) is default}
    if threading.current_thread() is not threading.main_thread():
        replaced = {}  # no other thread may set handlers
    for number in replaced:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, default in replaced.items():
            signal.signal(number, default)


@contextmanager
def wrap_os_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError into a TrainingError of one sentence."""
    try:
        yield
    except OSError as error:
        hint = resume_hint(folder, "The last checkpoint is intact; continue with:")
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise TrainingError(f"The disk is full; free some space for {folder}.{hint}") from error
        raise TrainingError(f"{error.filename or folder}: {error.strerror or error}.{hint}") from error
