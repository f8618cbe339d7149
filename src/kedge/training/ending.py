"""How a run ends before its time: by a signal, or by what the system refuses."""

from __future__ import annotations

import errno
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from kedge.errors import TrainingError
from kedge.training.callbacks import LAST
from kedge.training.module import RetrievalTraining

__all__ = ["Interrupted", "StopsTogether", "heard", "stopped", "told"]


class Interrupted(TrainingError):
    """The user stopped the run; its last checkpoint can be resumed."""


def stopped(folder: Path, done: int, epochs: int) -> Interrupted:
    """A run that was stopped after so many epochs, as far as its last checkpoint goes."""
    if not (folder / LAST).exists():
        return Interrupted("Stopped before the first epoch ended: there is nothing to resume.")
    return Interrupted(f"Stopped after {done} of {epochs} epochs. Go on with: kedge train --resume {folder}")


@contextmanager
def heard(module: RetrievalTraining) -> Iterator[None]:
    """Ctrl-C raises wherever Python happens to be, also where that is ignored: then the next step raises again."""
    alone = threading.current_thread() is threading.main_thread()  # no other may ask for signals
    if not alone or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _note(module))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class StopsTogether(Callback):
    """With several processes, the signal that ends all of them is what Ctrl-C is to one.

    The trainer's own way is to ask the others from within the signal's handler, for which they may wait forever.
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the signal over, after the trainer has; it gives it back."""
        del trainer
        if isinstance(pl_module, RetrievalTraining) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _note(pl_module))


def _note(module: RetrievalTraining) -> Callable[[int, FrameType | None], Any]:
    def note(number: int, frame: FrameType | None) -> None:
        module.stopped = True
        signal.default_int_handler(number, frame)

    return note


@contextmanager
def told(folder: Path) -> Iterator[None]:
    """What the system refuses, in one sentence."""
    try:
        yield
    except OSError as error:
        resume = f" The last checkpoint is intact: then kedge train --resume {folder}"
        kept = resume if (folder / LAST).exists() else ""
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise TrainingError(f"The disk is full: make room for {folder}.{kept}") from error
        raise TrainingError(f"{error.filename or folder}: {error.strerror or error}.{kept}") from error
