"""The ranks of a few items of a gallery, by counting what lies before them: no sort of the gallery.

Items are ordered by (distance, gallery order). Squared distances are never negative, so the bits of a float32
order like its value, and both parts fit in one int64 key: no two keys are equal and ties need no other care.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

NEVER = torch.iinfo(torch.int64).max
CELLS = 1 << 16
# Below this, handing rows to threads costs more than it saves.
ITEMS_WORTH_THREADS = 200_000

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


def count_ranks(distances: Tensor, items: Tensor, valid: Tensor) -> Tensor:
    """The ranks, from 1, of ``items`` (B x R columns) by ``distances`` (B x N); NEVER where not valid."""
    by_rows = distances.device.type == "cpu"
    return ranks_by_cells(distances, items, valid) if by_rows else ranks_by_search(distances, items, valid)


def work_space(items: int, device: torch.device) -> tuple[int, int]:
    """The bytes :func:`count_ranks` needs for ``items``: once, and for each query of a block."""
    if device.type == "cpu":
        return 48 * items * _threads(items), 0
    return 0, 28 * items


def sort_keys(distances: Tensor) -> Tensor:
    """One int64 per distance whose order is that of (distance, column)."""
    columns = torch.arange(distances.shape[1], device=distances.device)
    return distances.view(torch.int32).to(torch.int64).bitwise_left_shift_(31).bitwise_or_(columns)


def ranks_by_search(distances: Tensor, items: Tensor, valid: Tensor) -> Tensor:
    """Look every gallery item up among the sorted ``items``; all rows at once, as a GPU likes it."""
    keys = sort_keys(distances)
    wanted, order = keys.gather(1, items).masked_fill_(~valid, NEVER).sort(dim=1)
    place = torch.searchsorted(wanted, keys, right=True)
    counts = torch.zeros(len(items), items.shape[1] + 1, dtype=torch.int64, device=items.device)
    counts.scatter_add_(1, place, torch.ones_like(place))
    ranks = counts[:, :-1].cumsum(1) + 1
    return torch.empty_like(ranks).scatter_(1, order, ranks).masked_fill_(~valid, NEVER)


def ranks_by_cells(distances: Tensor, items: Tensor, valid: Tensor) -> Tensor:
    """One row after the other, with the memory of one row: the way for a CPU."""
    rows, columns, wanted = distances.numpy(), items.numpy(), valid.numpy()
    ranks = np.full(columns.shape, NEVER, dtype=np.int64)

    def rank_row(row: int) -> None:
        if wanted[row].any():
            ranks[row, wanted[row]] = _row_ranks(rows[row], columns[row, wanted[row]])

    with ThreadPoolExecutor(_threads(distances.shape[1])) as pool:
        list(pool.map(rank_row, range(len(rows))))
    return torch.from_numpy(ranks)


def _threads(items: int) -> int:
    return torch.get_num_threads() if items >= ITEMS_WORTH_THREADS else 1


def _row_ranks(distances: Floats, items: Ints) -> Ints:
    """Cut the line of distances into cells; items in a cell without a wanted item are only counted."""
    wanted = distances[items]
    low, high = wanted.min(), wanted.max()
    reach = np.flatnonzero(distances <= high)
    near = distances[reach]
    # A span too small to divide by leaves one cell, and all is sorted.
    width = (high - low) / np.float32(CELLS)
    scale = np.float32(1) / width if width > np.finfo(np.float32).tiny else np.float32(0)

    # Subtracting, scaling and truncating keep the order, so cells are ordered as their items are.
    def cells_of(values: Floats) -> Ints:
        cells: Ints = np.maximum((values - low) * scale + np.float32(1), 0).astype(np.int64)
        return cells

    cells, homes = cells_of(near), cells_of(wanted)
    counts = np.bincount(cells)
    mixed = np.zeros(len(counts), dtype=bool)
    mixed[homes] = True
    counts[mixed] = 0
    rivals = np.flatnonzero(mixed[cells])
    keys = _keys(near[rivals], reach[rivals])
    keys.sort()
    before: Ints = counts.cumsum()[homes] + np.searchsorted(keys, _keys(wanted, items))
    return before + 1


def _keys(distances: Floats, items: Ints) -> Ints:
    bits: Ints = distances.view(np.int32).astype(np.int64)
    return (bits << 31) | items
