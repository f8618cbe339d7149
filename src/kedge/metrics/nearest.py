"""The nearest gallery items of each query, exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from kedge.errors import ConfigError
from kedge.metrics.counting import sort_keys
from kedge.metrics.distances import DEFAULT_MEMORY, distance_blocks
from kedge.metrics.inputs import Array, check_pair


def nearest(queries: Array, gallery: Array, k: int, *, memory: int = DEFAULT_MEMORY) -> Tensor:
    """The rows of the ``k`` nearest gallery items of each query (Q x k), ties by gallery order.

    >>> nearest(torch.tensor([[0.0]]), torch.tensor([[3.0], [1.0], [-1.0]]), k=2)
    tensor([[1, 2]])
    """
    queries, gallery = check_pair(queries, gallery)
    if not 1 <= k <= len(gallery):
        raise ConfigError(f"k is {k} but the gallery has {len(gallery)} items; give a k between 1 and that.")
    rows = torch.empty(len(queries), k, dtype=torch.int64, device=gallery.device)
    blocks = distance_blocks(queries, gallery, memory=memory, bytes_per_query=8 * len(gallery))
    for block, distances in blocks:
        keys = sort_keys(distances).topk(k, dim=1, largest=False, sorted=True).values
        rows[block] = keys & (2**31 - 1)
    return rows
