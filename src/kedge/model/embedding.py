"""A whole split of pictures through a network, batch by batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from kedge.datasets import ImageSplit
from kedge.errors import ConfigError

__all__ = ["embed_pictures"]


def embed_pictures(
    embed: Callable[[Tensor], Tensor], pictures: ImageSplit, *, batch_size: int = 256, title: str = "pictures"
) -> Tensor:
    """What ``embed`` (such as ``Model.embed_pixels``) makes of all pictures, float32 on its device.

    ``embed`` takes uint8 batches. A terminal sees a progress bar.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size is {batch_size}; give at least 1.")
    if len(pictures) == 0:
        raise ConfigError(f"There are no {title} to embed.")
    parts = []
    with torch.inference_mode(), _progress() as progress:
        task = progress.add_task(f"embedding {title}", total=len(pictures))
        for start in range(0, len(pictures), batch_size):
            rows = np.arange(start, min(start + batch_size, len(pictures)))
            parts.append(embed(pictures.take(rows)).float())
            progress.advance(task, len(rows))
        return torch.cat(parts)


def _progress() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
