"""From the pictures of a split to embeddings, and from embeddings to the list each one is routed to."""

from __future__ import annotations

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from kedge.datasets import Pictures
from kedge.errors import ConfigError
from kedge.model import Model

# Class scores are made for this many embeddings at a time: they need embeddings x classes numbers.
ROUTED_AT_ONCE = 16_384


def embed_pictures(model: Model, pictures: Pictures, *, batch_size: int = 256, title: str = "pictures") -> Tensor:
    """Embeddings of a whole split, float32 on the model's device; a terminal sees a progress bar."""
    if batch_size < 1:
        raise ConfigError(f"batch_size is {batch_size}; give at least 1.")
    embeddings = torch.empty(len(pictures), model.dim, device=model.device)
    with _progress() as progress:
        task = progress.add_task(f"embedding {title}", total=len(pictures))
        for start in range(0, len(pictures), batch_size):
            rows = np.arange(start, min(start + batch_size, len(pictures)))
            embeddings[start : start + len(rows)] = model.embed_pixels(pictures.take(rows))
            progress.advance(task, len(rows))
    return embeddings


def route(model: Model, embeddings: Tensor) -> Tensor:
    """The class whose list each embedding is sent to: the one with the highest score."""
    if len(embeddings) == 0:
        return torch.empty(0, dtype=torch.int64, device=embeddings.device)
    parts = torch.split(embeddings, ROUTED_AT_ONCE)
    return torch.cat([model.scores(part).argmax(dim=1) for part in parts])


def _progress() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
