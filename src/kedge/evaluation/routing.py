"""From embeddings to the list each one is sent to."""

from __future__ import annotations

import torch
from torch import Tensor

from kedge.model import Model

# Class scores are made for this many embeddings at a time: they need embeddings x classes numbers.
ROUTED_AT_ONCE = 16_384


def route(model: Model, embeddings: Tensor) -> Tensor:
    """The class whose list each embedding is sent to: the one with the highest score."""
    if len(embeddings) == 0:
        return torch.empty(0, dtype=torch.int64, device=embeddings.device)
    parts = torch.split(embeddings, ROUTED_AT_ONCE)
    return torch.cat([model.scores(part).argmax(dim=1) for part in parts])
