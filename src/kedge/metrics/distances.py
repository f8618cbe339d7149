"""Distances from a few queries at a time to the whole gallery."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import threshold

DEFAULT_MEMORY = 512 * 1024**2
MOST_QUERIES = 1024


def distance_blocks(
    queries: Tensor, gallery: Tensor, *, memory: int, bytes_per_query: int
) -> Iterator[tuple[slice, Tensor]]:
    """Yield (rows of queries, float32 squared distances to every gallery item), block by block.

    A block has as many queries as ``memory`` bytes allow when each needs ``bytes_per_query`` of work space
    besides its distances, and at least one. The buffer belongs to the reader until it asks for the next.

    Everyone compares the same numbers: squared L2 distances, computed in float64 by one matrix product on
    data centred at the gallery mean (so that large common offsets cost no digits) and rounded to float32,
    with 0 for what is below the product's own error. The last bits of a float64 product depend on its shape;
    this hides them (but for one distance in some 10^8, on the edge between two floats), so that equal vectors
    tie and no block size changes a rank. Ties go by gallery order.
    """
    items, dim = gallery.shape
    tile = _tile_rows(items, dim, gallery.device)
    mean = _mean(gallery, tile)
    per_query = bytes_per_query + 4 * items + 8 * (tile + 2 * dim)
    room = memory - 4 * 8 * tile * (dim + 2)
    step = max(1, min(len(queries), MOST_QUERIES, room // per_query))
    buffer = torch.empty(step, items, dtype=torch.float32, device=gallery.device)
    for start in range(0, len(queries), step):
        rows = slice(start, min(start + step, len(queries)))
        near = queries[rows].to(torch.float64) - mean
        # |q - g|² = (q, |q|², 1) · (-2g, 1, |g|²)
        near_norms = near.square().sum(1, keepdim=True)
        left = torch.cat([near, near_norms, torch.ones_like(near_norms)], dim=1)
        block = buffer[: len(near)]
        for first in range(0, items, tile):
            far = gallery[first : first + tile].to(torch.float64) - mean
            norms = far.square().sum(1, keepdim=True)
            right = torch.cat([far.mul_(-2), torch.ones_like(norms), norms], dim=1)
            error = (dim + 2) * torch.finfo(torch.float64).eps * float(near_norms.max() + norms.max())
            block[:, first : first + tile] = threshold(torch.mm(left, right.T), error, 0, inplace=True)
        yield rows, block


def _tile_rows(items: int, dim: int, device: torch.device) -> int:
    # A tile of the gallery in float64 should stay in the cache of a CPU, and fill a GPU.
    room = 4 * 1024**2 if device.type == "cpu" else 64 * 1024**2
    return max(1, min(items, room // (8 * (dim + 2))))


def _mean(gallery: Tensor, tile: int) -> Tensor:
    total = torch.zeros(gallery.shape[1], dtype=torch.float64, device=gallery.device)
    for first in range(0, len(gallery), tile):
        total += gallery[first : first + tile].to(torch.float64).sum(0)
    return total / len(gallery)
