"""Where the relevant items of each query stand in its result, and the scores that follow from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from kedge.errors import ConfigError, DataError
from kedge.metrics.distances import DEFAULT_MEMORY, distance_blocks
from kedge.metrics.inputs import Array, check_integers, check_pair, check_self_index

Rest = Literal["dropped", "last"]
NEVER = torch.iinfo(torch.int64).max
"""The rank of an item that is not returned."""
_COLUMN_BITS = 31
"""Of a sort key, below the bits of the distance."""


class Lists(NamedTuple):
    """The list of every query and of every gallery item: a query sees the items of its own list only, or first."""

    query: Array
    gallery: Array
    rest: Rest = "dropped"


@dataclass(frozen=True)
class Ranking:
    """The scores of each query; zero for a query without a relevant item (``relevant == 0``)."""

    average_precision: Tensor
    precision: dict[int, Tensor]
    relevant: Tensor
    average_precision_at_r: Tensor
    """AP of the first R items, where R is the number of relevant ones."""
    precision_at_r: Tensor
    """The share of relevant items among the first R."""

    @property
    def left_out(self) -> int:
        """How many queries have no relevant item in the gallery and take no part in the means."""
        return int((self.relevant == 0).sum())

    def mean(self) -> dict[str, float]:
        """``{"mAP": …, "P@k": …}`` over the queries that have a relevant item."""
        return self._means({"mAP": self.average_precision, **{f"P@{k}": part for k, part in self.precision.items()}})

    def retrieval(self) -> dict[str, float]:
        """``{"R@k": …, "R-precision": …, "MAP@R": …}`` over these; R@k: those with a relevant item in the first k."""
        recall = {f"R@{k}": (precision > 0).double() for k, precision in self.precision.items()}
        return self._means({**recall, "R-precision": self.precision_at_r, "MAP@R": self.average_precision_at_r})

    def _means(self, scores: dict[str, Tensor]) -> dict[str, float]:
        judged = self.relevant > 0
        if not bool(judged.any()):
            raise DataError("No query has a relevant item in the gallery; check that both use the same labels.")
        return {name: float(values[judged].mean()) for name, values in scores.items()}


@torch.no_grad()
def rank_relevant(
    queries: Array,
    query_labels: Array,
    gallery: Array,
    gallery_labels: Array,
    *,
    ks: Iterable[int] = (1, 20, 100),
    query_lists: Array | None = None,
    gallery_lists: Array | None = None,
    rest: Rest = "dropped",
    self_index: Array | None = None,
    memory: int = DEFAULT_MEMORY,
) -> Ranking:
    """Rank the gallery by L2 distance for each query, ties by gallery order; items of its label are relevant.

    AP is the sum over ranks of precision x relevance, divided by *all* relevant items of the gallery;
    P@k divides by k. With lists, a query sees the items of its own list only (``rest="dropped"``: the others
    are not returned and count against it) or before all others (``rest="last"``). ``self_index`` names the
    gallery row that is the query itself (-1: none); that item is removed. ``memory`` bounds the work space,
    in bytes, as far as one query at a time allows.

    >>> gallery = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    >>> ranking = rank_relevant(torch.tensor([[-1.0]]), [7], gallery, [7, 8, 7, 8], ks=(1, 2))
    >>> {name: round(value, 3) for name, value in ranking.mean().items()}
    {'mAP': 0.833, 'P@1': 1.0, 'P@2': 0.5}
    """
    if (query_lists is None) != (gallery_lists is None):
        raise ConfigError("Only one of query_lists and gallery_lists is given; give both or neither.")
    lists = None if query_lists is None or gallery_lists is None else Lists(query_lists, gallery_lists, rest)
    if rest not in get_args(Rest):
        raise ConfigError(f'rest is {rest!r}; give "dropped" or "last".')
    [ranking] = rank_in_lists(
        queries, query_labels, gallery, gallery_labels, [lists], ks=ks, self_index=self_index, memory=memory
    )
    return ranking


@torch.no_grad()
def rank_in_lists(
    queries: Array,
    query_labels: Array,
    gallery: Array,
    gallery_labels: Array,
    several: Sequence[Lists | None],
    *,
    ks: Iterable[int] = (1, 20, 100),
    self_index: Array | None = None,
    memory: int = DEFAULT_MEMORY,
) -> list[Ranking]:
    """`rank_relevant` with several lists, or (None) without any, for which distances are computed once."""
    depths = tuple(ks)
    if min(depths, default=1) < 1:
        raise ConfigError(f"k is {min(depths)}; precision needs a depth of at least 1.")
    queries, gallery = check_pair(queries, gallery)
    device = gallery.device
    asked = check_integers("query_labels", query_labels, len(queries), device)
    members = _Members(check_integers("gallery_labels", gallery_labels, len(gallery), device))
    own = None if self_index is None else check_self_index(self_index, len(queries), gallery)
    checked = [
        lists
        and (
            check_integers("query_lists", lists.query, len(queries), device),
            check_integers("gallery_lists", lists.gallery, len(gallery), device),
            lists.rest,
        )
        for lists in several
    ]

    def zeros(dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.zeros(len(queries), dtype=dtype, device=device)

    relevant = zeros(torch.int64)
    rankings = [Ranking(zeros(), {k: zeros() for k in depths}, relevant, zeros(), zeros()) for _ in several]
    # The work space of count_ranks (by sorting, a row for each thread), and the masks of lists.
    by_rows = device.type == "cpu"
    memory -= 24 * len(gallery) * torch.get_num_threads() if by_rows else 0
    per_item = (0 if by_rows else 28) + (6 if any(checked) else 0)
    per_query = per_item * len(gallery) + 64 * members.most
    for block, distances in distance_blocks(queries, gallery, memory=memory, bytes_per_query=per_query):
        items, valid = members.of(asked[block])
        if own is not None:
            valid &= items != own[block, None]
            present = (own[block] >= 0).nonzero().squeeze(1)
            distances[present, own[block][present]] = torch.inf
        relevant[block] = valid.sum(1)
        for lists, ranking in zip(checked, rankings, strict=True):
            if lists is None:
                ranks = count_ranks(distances, items, valid)
            else:
                of_queries, of_items, rest = lists
                ranks = _ranks_with_lists(distances, items, valid, of_queries[block, None] == of_items, rest)
            ranking.average_precision[block], ranking.average_precision_at_r[block] = _average_precision(
                ranks, relevant[block]
            )
            ranking.precision_at_r[block] = (ranks <= relevant[block, None]).sum(1) / relevant[block].clamp(min=1)
            for k in depths:
                ranking.precision[k][block] = (ranks <= k).sum(1).to(torch.float64) / k
    return rankings


def nearest(queries: Array, gallery: Array, k: int, *, memory: int = DEFAULT_MEMORY) -> Tensor:
    """The rows of the ``k`` nearest gallery items of each query (Q x k), ties by gallery order.

    >>> nearest(torch.tensor([[0.0]]), torch.tensor([[3.0], [1.0], [-1.0]]), k=2)
    tensor([[1, 2]])
    """
    queries, gallery = check_pair(queries, gallery)
    if not 1 <= k <= len(gallery):
        raise ConfigError(f"k is {k} but the gallery has {len(gallery)} items; give a k between 1 and that.")
    rows = torch.empty(len(queries), k, dtype=torch.int64, device=gallery.device)
    for block, distances in distance_blocks(queries, gallery, memory=memory, bytes_per_query=8 * len(gallery)):
        rows[block] = sort_keys(distances).topk(k, dim=1, largest=False).values & ((1 << _COLUMN_BITS) - 1)
    return rows


class _Members:
    """The gallery rows of each label, in gallery order."""

    def __init__(self, labels: Tensor) -> None:
        self.rows = labels.argsort(stable=True)
        self.labels, self.counts = torch.unique_consecutive(labels[self.rows], return_counts=True)
        self.starts = self.counts.cumsum(0) - self.counts
        self.most = int(self.counts.max())

    def of(self, asked: Tensor) -> tuple[Tensor, Tensor]:
        """Rows with the asked labels (B x the largest count) and which of them are not padding."""
        place = torch.searchsorted(self.labels, asked).clamp_(max=len(self.labels) - 1)
        counts = self.counts[place].masked_fill_(self.labels[place] != asked, 0)
        offsets = torch.arange(self.most, device=asked.device)
        valid = offsets < counts[:, None]
        return self.rows[(self.starts[place, None] + offsets).masked_fill_(~valid, 0)], valid


def sort_keys(distances: Tensor) -> Tensor:
    """One int64 per distance whose order is that of (distance, column), so that no two are equal.

    Squared distances are never negative: the bits of a float32 order like its value.
    """
    columns = torch.arange(distances.shape[1], device=distances.device)
    return distances.view(torch.int32).to(torch.int64).bitwise_left_shift_(_COLUMN_BITS).bitwise_or_(columns)


def count_ranks(distances: Tensor, items: Tensor, valid: Tensor) -> Tensor:
    """The ranks, from 1, of ``items`` (B x R columns) by ``distances`` (B x N); NEVER where not valid."""
    ranks = _by_sorting(distances, items) if distances.device.type == "cpu" else _by_counting(distances, items)
    return ranks.masked_fill_(~valid, NEVER)


def _by_sorting(distances: Tensor, items: Tensor) -> Tensor:
    """Sort the gallery row by row, in threads: a row stays in the cache, and NumPy's vectorised sort frees the GIL."""
    bits, wanted, columns = distances.numpy().view(np.int32), items.numpy(), np.arange(distances.shape[1])
    ranks, threads = np.empty_like(wanted), torch.get_num_threads()

    def rank(first: int) -> None:
        keys = np.empty_like(columns)
        for row in range(first, len(bits), threads):
            np.left_shift(bits[row], _COLUMN_BITS, out=keys, dtype=np.int64)
            keys |= columns
            own = keys[wanted[row]]
            keys.sort()
            ranks[row] = np.searchsorted(keys, own)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(rank, range(threads)))
    return torch.from_numpy(ranks).add_(1)


def _by_counting(distances: Tensor, items: Tensor) -> Tensor:
    """Sort only ``items`` and count what lies before each, all rows at once: cheaper on a GPU."""
    keys = sort_keys(distances)
    own, order = keys.gather(1, items).sort(dim=1)
    place = torch.searchsorted(own, keys, right=True)
    counts = place.new_zeros(len(own), own.shape[1] + 1).scatter_add_(1, place, torch.ones_like(place))
    return torch.empty_like(own).scatter_(1, order, counts[:, :-1].cumsum(1) + 1)


def _ranks_with_lists(distances: Tensor, items: Tensor, valid: Tensor, inside: Tensor, rest: Rest) -> Tensor:
    listed = inside.gather(1, items)
    ranks = count_ranks(distances.masked_fill(~inside, torch.inf), items, valid & listed)
    if rest == "last":
        size = (inside & distances.isfinite()).sum(1, keepdim=True)
        later = valid & ~listed
        after = count_ranks(distances.masked_fill(inside, torch.inf), items, later)
        ranks = torch.where(later, after + size, ranks)
    return ranks


def _average_precision(ranks: Tensor, relevant: Tensor) -> tuple[Tensor, Tensor]:
    """AP, and AP of the first R items for R relevant ones."""
    # The i-th relevant item, by rank, is met with precision i / rank.
    found = torch.arange(1, ranks.shape[1] + 1, device=ranks.device, dtype=torch.float64)
    ordered = ranks.sort(dim=1).values
    precision = (found / ordered).masked_fill_(ordered == NEVER, 0)
    count = relevant.clamp(min=1)
    at_r = precision.masked_fill(ordered > relevant[:, None], 0)
    return precision.sum(1) / count, at_r.sum(1) / count
