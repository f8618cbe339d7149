"""Checkpoints that are whole or not there."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO

__all__ = ["WholeCheckpoints"]


class WholeCheckpoints(TorchCheckpointIO):
    """Writes beside the file, then renames.

    The trainer's own way goes through the system's temporary folder: on another disk the last step would be a
    copy, and a kill in the middle of it would leave half a checkpoint in place of the last good one.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Save `checkpoint` at `path`; what was there stays until the new one is complete."""
        del storage_options
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(".part")
        # Serialised first: torch's zip writer, given the file, would hide what the system says of a full disk.
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        try:
            with part.open("wb") as file:
                file.write(buffer.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
