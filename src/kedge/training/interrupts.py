"""How a run ends early: by SIGINT or SIGTERM, or by an error of the operating system."""

from __future__ import annotations

import errno
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from kedge.errors import TrainingError
from kedge.training.checkpoint import LAST

__all__ = ["Interrupted", "StopFlag", "handle_signals", "interrupted", "wrap_os_errors"]


class Interrupted(TrainingError):
    """The user stopped the run; its last checkpoint can be resumed."""


def interrupted(folder: Path, epochs_saved: int, epochs: int) -> Interrupted:
    """The error of a run that was stopped, with the command that resumes it."""
    if not (folder / LAST).exists():
        return Interrupted("Stopped before the first epoch ended: there is nothing to resume.")
    return Interrupted(f"Stopped after {epochs_saved} of {epochs} epochs. Go on with: kedge train --resume {folder}")


class StopFlag:
    """Whether a signal asked the run to stop."""

    def __init__(self) -> None:
        self.is_set = False

    def raise_if_set(self) -> None:
        """Raise again: the first KeyboardInterrupt may have fallen where exceptions are ignored."""
        if self.is_set:
            raise KeyboardInterrupt


@contextmanager
def handle_signals(stop: StopFlag) -> Iterator[None]:
    """SIGINT and SIGTERM set `stop` and raise KeyboardInterrupt; handlers of the caller's own stay in place."""

    def handle(number: int, frame: FrameType | None) -> None:
        stop.is_set = True
        signal.default_int_handler(number, frame)

    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    replaced = {}
    if threading.current_thread() is threading.main_thread():  # no other thread may set handlers
        replaced = {number: default for number, default in defaults.items() if signal.getsignal(number) is default}
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
        resume = f" The last checkpoint is intact: then kedge train --resume {folder}"
        hint = resume if (folder / LAST).exists() else ""
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise TrainingError(f"The disk is full: make room for {folder}.{hint}") from error
        raise TrainingError(f"{error.filename or folder}: {error.strerror or error}.{hint}") from error
