"""A whole split of images through a network, batch by batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kedge.console import stderr
from kedge.errors import ConfigError

if TYPE_CHECKING:
    from kedge.datasets import ImageSplit

__all__ = ["embed_split"]


def embed_split(
    embed: Callable[[Tensor], Tensor], split: ImageSplit, *, batch_size: int = 256, title: str = "images"
) -> Tensor:
    """What ``embed`` (such as ``Model.embed_pixels``) makes of all images of a split, float32 on its device.

    ``embed`` takes uint8 batches. A terminal sees a progress bar.
    """
    from rich.progress import track

    if batch_size < 1:
        raise ConfigError(f"batch_size is {batch_size}; give at least 1.")
    if len(split) == 0:
        raise ConfigError(f"There are no {title} to embed.")
    batches = np.split(np.arange(len(split)), range(batch_size, len(split), batch_size))
    terminal = stderr()
    progress = track(batches, f"embedding {title}", console=terminal, transient=True, disable=not terminal.is_terminal)
    with torch.inference_mode():
        return torch.cat([embed(split.take(rows)).float() for rows in progress])
