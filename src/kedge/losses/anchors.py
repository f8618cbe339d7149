"""How class anchors start."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from kedge.errors import ConfigError

__all__ = ["AnchorInit", "init_anchors"]

AnchorInit = Literal["base", "random"]

_RANDOM_SCALE = 0.01
_SPREAD_STEPS = 200
_SPREAD_AT_MOST = 4096
"""Beyond so many classes, directions stay as drawn: spreading them costs classes² per step."""
_SEARCH_AT_MOST = 16384
"""Beyond so many classes, not even the closest two are searched for."""
_CHANCE = 1e-6
"""How likely two of that many drawn directions may be closer than believed."""


def init_anchors(
    num_classes: int,
    dim: int,
    *,
    margin: float = 2.0,
    min_norm: float = 1.0,
    init: AnchorInit = "base",
    generator: torch.Generator | None = None,
) -> Tensor:
    """The first anchors, `num_classes` × `dim`.

    `base` puts every two anchors at least 2·margin apart and every anchor at least `min_norm` from the origin:
    scaled base vectors, then the negative axes too, and for more than 2·dim classes a lattice (up to three
    dimensions) or spread directions, drawn ones if there are very many. `random` is a small Gaussian around the origin.

    >>> init_anchors(2, 3, margin=1.0).tolist()
    [[1.4142135381698608, 0.0, 0.0], [0.0, 1.4142135381698608, 0.0]]
    """
    if num_classes < 1 or dim < 1:
        raise ConfigError(f"num_classes and dim must be at least 1, found {num_classes} and {dim}.")
    if init == "random":
        return torch.randn(num_classes, dim, generator=generator) * _RANDOM_SCALE
    if init != "base":
        raise ConfigError(f"init must be 'base' or 'random', found {init!r}.")
    if num_classes <= 2 * dim:
        axes = torch.eye(dim) * max(math.sqrt(2) * margin, min_norm)
        return torch.cat([axes, -axes])[:num_classes].contiguous()
    if dim <= 3:
        return _lattice(num_classes, dim, spacing=2 * margin, min_norm=min_norm)
    return _spread(num_classes, dim, margin=margin, min_norm=min_norm)


# Densest packings in 1, 2 and 3 dimensions (line, triangular, face-centred cubic), nearest neighbours 1 apart.
_BASES = {
    1: [[1.0]],
    2: [[1.0, 0.0], [0.5, math.sqrt(3) / 2]],
    3: [
        [math.sqrt(0.5), math.sqrt(0.5), 0.0],
        [math.sqrt(0.5), 0.0, math.sqrt(0.5)],
        [0.0, math.sqrt(0.5), math.sqrt(0.5)],
    ],
}


def _lattice(num_classes: int, dim: int, *, spacing: float, min_norm: float) -> Tensor:
    """The innermost lattice points outside `min_norm`, around whichever centre keeps them closest."""
    basis = torch.tensor(_BASES[dim], dtype=torch.float64) * spacing
    inside = math.ceil((2 * min_norm / spacing) ** dim)
    reach = 2 + math.ceil((num_classes + inside) ** (1 / dim))
    steps = torch.arange(-reach, reach + 1, dtype=torch.float64)
    points = torch.cartesian_prod(*[steps] * dim).reshape(-1, dim) @ basis
    choices = []
    for share in (0.0, 1 / 2, 1 / 3, 1 / 4):
        shifted = points - basis.sum(0) * share
        allowed = shifted[shifted.norm(dim=1) >= min_norm]
        choices.append(allowed[allowed.norm(dim=1).argsort(stable=True)[:num_classes]])
    return min(choices, key=lambda chosen: float(chosen.norm(dim=1).max())).float()


def _spread(num_classes: int, dim: int, *, margin: float, min_norm: float) -> Tensor:
    """Directions pushed apart on the sphere, at the smallest common radius that keeps the margin."""
    fixed = torch.Generator().manual_seed(0)
    directions = torch.nn.functional.normalize(torch.randn(num_classes, dim, generator=fixed), dim=1)
    if num_classes <= _SPREAD_AT_MOST:
        directions = _push_apart(directions)
    if num_classes <= _SEARCH_AT_MOST:
        closest = float(_smallest_distance(directions.double()))
    else:
        # A cosine above c has a probability of at most (1 − c²)^((dim − 1)/2) / 2, for each of classes²/2 pairs.
        sine = (4 * _CHANCE / num_classes**2) ** (1 / (dim - 1))
        closest = sine * math.sqrt(2 / (1 + math.sqrt(1 - sine**2)))
    radius = max(2 * margin / closest, min_norm)
    # A hair more than the margin asks, so that float32 rounding does not fall short of it.
    return directions * (radius * (1 + 1e-6))


def _push_apart(directions: Tensor) -> Tensor:
    """Raise the smallest angle: each direction steps away from those nearest to it."""
    best, best_distance = directions, _smallest_distance(directions)
    for step in range(_SPREAD_STEPS):
        cosines = directions @ directions.T
        cosines.fill_diagonal_(-1.0)
        force = torch.softmax(cosines * 40.0, dim=1) @ directions
        rate = 0.2 * (1 - step / _SPREAD_STEPS)
        directions = torch.nn.functional.normalize(directions - rate * force, dim=1)
        distance = _smallest_distance(directions)
        if distance > best_distance:
            best, best_distance = directions, distance
    return best


def _smallest_distance(points: Tensor, block: int = 1024) -> Tensor:
    """The distance of the closest two rows, in row blocks of bounded memory."""
    smallest = points.new_tensor(math.inf)
    for start in range(0, len(points), block):
        distances = torch.cdist(points[start : start + block], points[start:]).fill_diagonal_(math.inf)
        smallest = torch.minimum(smallest, distances.min())
    return smallest
