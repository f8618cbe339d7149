"""The repeller among class anchors: exact in bounded memory, or estimated from a few anchors at a time."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from kedge.losses.close_pairs import close_pairs
from kedge.losses.known import own_directions, widest, with_gradient

__all__ = ["few", "repeller"]

_FEW = {"cpu": 128}
_FEW_ELSEWHERE = 4096
"""Up to so many classes, all pairs are computed."""
_CROWDED = 1 / 64
"""With a larger share of close pairs, matrix products over all cost less than a difference for each."""
_PAIRS = 2**16
_CROWD = 512, 8192
"""How many pairs are computed at a time: one by one, or as rows by columns of a crowd."""


def repeller(anchors: Tensor, margin: float, sample: int | None = None) -> Tensor:
    """½ Σ max(0, 2·margin − ‖c_y − c_y'‖)² over unordered pairs of anchors.

    With `sample`, so many anchors, drawn anew in each call from the device's generator, are compared with all:
    value and gradient are then unbiased estimates.

    >>> repeller(torch.tensor([[0.0], [3.0], [9.0]]), margin=2.0).item()
    0.5
    """
    with torch.no_grad():
        points, chosen = anchors.detach(), None
        if sample is not None and sample < len(points):
            chosen = torch.randperm(len(points), device=points.device)[:sample]
        if few(points):
            value, gradient = _all_at_once(points, margin, chosen)
        else:
            value, gradient = _tile_by_tile(points, margin, chosen)
        if chosen is not None:
            # An anchor is drawn with probability k/t, and a pair can be met from both its ends.
            scale = len(points) / (2 * len(chosen))
            value, gradient = value * scale, gradient.mul_(scale)
    return with_gradient(anchors, value, gradient)


def few(anchors: Tensor) -> bool:
    """Whether to compute everything: looking first at what matters makes the host wait for a device."""
    return len(anchors) <= _FEW.get(anchors.device.type, _FEW_ELSEWHERE)


def _all_at_once(anchors: Tensor, margin: float, chosen: Tensor | None) -> tuple[Tensor, Tensor]:
    """Value and gradient, without looking at the outcome on the way."""
    centre = anchors.mean(dim=0, dtype=widest(anchors))
    everyone = _Side(anchors - centre, own_directions(anchors))
    if chosen is None:
        value, forces = _weigh(everyone, everyone, margin)
        # Every pair is there twice, and each of its anchors as a row once.
        return value / 2, forces.gradient(everyone, everyone).to(anchors.dtype)
    drawn = _Side(everyone.points[chosen], everyone.own[chosen])
    itself = chosen[:, None] == torch.arange(len(anchors), device=anchors.device)
    value, forces = _weigh(drawn, everyone, margin, left_out=itself)
    gradient = forces.turned().gradient(everyone, drawn)
    gradient.index_add_(0, chosen, forces.gradient(drawn, everyone))
    return value, gradient.to(anchors.dtype)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _tile_by_tile(anchors: Tensor, margin: float, chosen: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same where nearly all pairs are farther apart than two margins: only the others are computed."""
    centre = anchors.mean(dim=0, dtype=widest(anchors))
    total = _Total(torch.zeros_like(centre[0]), torch.zeros_like(anchors))
    waiting: list[Tensor] = []
    for rows, columns, close in close_pairs(anchors, 2 * margin, chosen):
        if int(close.count_nonzero()) > _CROWDED * close.numel():
            height, width = _CROWD
            others = torch.arange(columns.start, columns.stop, device=rows.device)
            for top, left in itertools.product(range(0, len(rows), height), range(0, len(others), width)):
                some, with_these = slice(top, top + height), slice(left, left + width)
                total.add_crowd(anchors, centre, rows[some], others[with_these], close[some, with_these], margin)
            continue
        row, column = close.nonzero().unbind(dim=1)
        waiting.append(torch.stack([rows[row], column + columns.start]))
        if sum(pairs.shape[1] for pairs in waiting) >= _PAIRS:
            total.add_pairs(anchors, torch.cat(waiting, dim=1), margin)
            waiting = []
    if waiting:
        total.add_pairs(anchors, torch.cat(waiting, dim=1), margin)
    return total


class _Total(NamedTuple):
    """Value and gradient so far."""

    value: Tensor
    gradient: Tensor

    def add_crowd(
        self, anchors: Tensor, centre: Tensor, rows: Tensor, columns: Tensor, close: Tensor, margin: float
    ) -> None:
        """Pairs of these rows and columns, where many are close."""
        near, far = (_Side(anchors[classes] - centre, own_directions(anchors, classes)) for classes in (rows, columns))
        value, forces = _weigh(near, far, margin, left_out=~close)
        self.value.add_(value)
        self.gradient.index_add_(0, rows, forces.gradient(near, far).to(anchors.dtype))
        self.gradient.index_add_(0, columns, forces.turned().gradient(far, near).to(anchors.dtype))

    def add_pairs(self, anchors: Tensor, pairs: Tensor, margin: float) -> None:
        """Single pairs, by their differences."""
        for i, j in torch.split(pairs, _PAIRS, dim=1):
            push = anchors[i] - anchors[j]
            distances = torch.linalg.vector_norm(push, dim=1)
            shortfall = (2 * margin - distances).clamp_(min=0)
            push *= (shortfall / distances).unsqueeze(1)
            together = (distances == 0).nonzero()[:, 0]
            if len(together):
                parting = own_directions(anchors, i[together]) - own_directions(anchors, j[together])
                push[together] = parting.mul_(_parting(margin, anchors)).to(push.dtype)
            # Not index_add_, which on a GPU adds up in another order each time.
            self.gradient.index_put_((j,), push, accumulate=True)
            self.gradient.index_put_((i,), push.neg_(), accumulate=True)
            self.value.add_(torch.sum(shortfall.square_(), dtype=self.value.dtype), alpha=0.5)


class _Side(NamedTuple):
    """The rows or the columns of a tile of pairs: around their centre, so that squares keep their digits."""

    points: Tensor
    own: Tensor


class _Forces(NamedTuple):
    """How strongly each pair repels along its difference or, where that is 0, along its own directions."""

    apart: Tensor
    together: Tensor
    parting: float

    def turned(self) -> _Forces:
        return _Forces(self.apart.T, self.together.T, self.parting)

    def gradient(self, rows: _Side, columns: _Side) -> Tensor:
        """−Σ (2m − d)/d · (c_y − c_y') for each row."""
        gradient = torch.addmm(self.apart.sum(dim=1, keepdim=True) * rows.points, self.apart, columns.points, beta=-1)
        gradient.addcmul_(self.together.sum(dim=1, keepdim=True), rows.own, value=-self.parting)
        return gradient.addmm_(self.together, columns.own, alpha=self.parting)


def _weigh(rows: _Side, columns: _Side, margin: float, left_out: Tensor | None = None) -> tuple[Tensor, _Forces]:
    """½ Σ (2m − d)² and the forces, over all pairs but those left out: at least each point with itself."""
    first, second = rows.points, columns.points
    if first.dtype == torch.float64:
        squares = second.square().sum(dim=1)
        sums = squares + (squares if rows is columns else first.square().sum(dim=1)).unsqueeze(1)
        squared = torch.addmm(sums, first, second.T, alpha=-2)
        # What a sum of dim squares may be off by: nearer points count as one.
        nothing = sums.mul_(8 * math.sqrt(first.shape[1]) * torch.finfo(first.dtype).eps)
    else:
        squared = torch.cdist(first, second, compute_mode="donot_use_mm_for_euclid_dist").square_()
        nothing = squared.new_zeros(())
    squared = squared.fill_diagonal_(math.inf) if left_out is None else squared.masked_fill_(left_out, math.inf)
    together = squared <= nothing
    distances = squared.masked_fill_(together, 0).sqrt_()
    shortfall = (2 * margin - distances).clamp_(min=0)
    value = shortfall.square().sum() / 2
    apart = shortfall.div_(distances).masked_fill_(together, 0)
    return value, _Forces(apart, together.to(apart.dtype), _parting(margin, first))


def _parting(margin: float, anchors: Tensor) -> float:
    """What makes the difference of two own directions about as long as two margins."""
    return 2 * margin / math.sqrt(anchors.shape[1] / 6)
