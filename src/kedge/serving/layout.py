"""A gallery as a map: every anchor an island, every item at a place in the plane that its embedding alone decides.

Anchors that were trained apart are about equally far from one another, and a projection onto two directions throws
them on one heap. So islands are laid out by who is whose neighbour, and an item is placed by its nearest anchors: on
an island, or between those it lies between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from kedge.errors import ConfigError
from kedge.serving.islands import TINY, WARMEST, alike, islands, principal, starts_of
from kedge.serving.nearness import ROWS, completed, distances_in_blocks, nearest, parts_of, squared_distances

__all__ = ["Layout"]

_DIGITS = 5
"""Of a coordinate. The digits that are cut off are those that the shape of a matrix product changes."""
_FEW = 4
"""So many anchors have a say in where an item is."""
_ENOUGH = 5
"""An island of fewer items has no directions of its own."""
_FILL = 0.55
"""Half of an island's items are nearer to its middle than about this share of its radius."""
_COLDEST = 1 / 60
"""How narrow borders may be, as a share of the squared distance between neighbouring anchors."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Where anchors and embeddings are on a map that reaches from -1 to 1 both ways. Make one with `of`."""

    anchors: np.ndarray
    """The middle of each anchor's island, anchors × 2. Anchors that are equal share one."""
    _centre: np.ndarray
    _unit: float
    """The distance between neighbouring anchors, in which all others are measured."""
    _vectors: np.ndarray
    """The anchors that differ, and below them two directions for each chart: all an item is multiplied with."""
    _squares: np.ndarray
    _middles: np.ndarray
    _radius: float
    _warmth: float
    _charts: np.ndarray
    """Which chart shows the inside of each island: its own, or 0, the common one."""
    _origins: np.ndarray
    """What each island's chart shows at its middle."""
    _reaches: np.ndarray
    """How far from each anchor most of its items lie."""

    @classmethod
    def of(cls, anchors: np.ndarray, sample: np.ndarray, places: np.ndarray) -> Layout:
        """A map for these anchors; `places` names the anchor in whose list each row of `sample` sits.

        The sample tells which lists are taken for one another, how sharp their borders are and what they are like
        inside. It may be empty.
        """
        anchors = _checked(anchors, "anchors", None)
        if not anchors.size:
            raise ConfigError(f"anchors must have at least one row and one column, found {_shape(anchors)}.")
        sample = _checked(sample, "sample", anchors.shape[1])
        places = _checked_places(places, len(sample), len(anchors))
        kept, which = np.unique(anchors + 0.0, axis=0, return_inverse=True)
        which = which.reshape(-1)
        centre = kept.mean(axis=0)
        kept -= centre
        sample -= centre
        unit = _unit_of(kept, sample)
        kept /= unit
        squares = np.square(kept).sum(axis=1)
        sample = _held(sample / unit, squares)

        near, far = _nearest_anchors(sample, kept, squares)
        middles, radius = np.zeros((1, 2)), 0.95
        warmth = WARMEST
        if len(kept) > 1:
            pairs = alike(_confusion(sample, which[places], kept), len(kept))
            middles, radius = islands(starts_of(kept), pairs)
            if len(sample):
                # As sharp as leaves four of five items on an island, and one on its way.
                gap = float(np.quantile(far[:, 1] - far[:, 0], 0.2))
                warmth = float(np.clip(gap / 3, _COLDEST, WARMEST))
        charts, directions, origins, reaches = _charted(sample, kept, near, far, _leaning(middles, near, far, warmth))
        vectors = np.concatenate([kept, directions])
        spots = np.round(middles[which], _DIGITS) + 0.0
        found = cls(spots, centre, unit, vectors, squares, middles, radius, warmth, charts, origins, reaches)
        for field in fields(found):
            value = getattr(found, field.name)
            if isinstance(value, np.ndarray):
                value.setflags(write=False)
        return found

    def place(self, embeddings: np.ndarray) -> np.ndarray:
        """Where embeddings are, one row each, whichever others come in the same call."""
        rows = _checked(embeddings, "embeddings", len(self._centre))
        spots = np.empty((len(rows), 2))
        for part in parts_of(len(rows)):
            spots[part] = self._place(_held((rows[part] - self._centre) / self._unit, self._squares))
        return np.round(np.clip(spots, -1, 1), _DIGITS) + 0.0

    def _place(self, rows: np.ndarray) -> np.ndarray:
        count = len(self._middles)
        products = rows @ self._vectors.T
        near, far = nearest(completed(products[:, :count], rows, self._squares), _FEW + 1, self._warmth)
        weights = _weights(far, self._warmth)
        near, far = near[:, : weights.shape[1]], far[:, : weights.shape[1]]
        columns = count + 2 * self._charts[near, None] + np.arange(2)
        inside = np.take_along_axis(products, columns.reshape(len(rows), -1), axis=1).reshape(*near.shape, 2)
        inside -= self._origins[near]
        # A far item goes to the rim, even if its island's chart does not show in which way it is far.
        excess = np.maximum(np.sqrt(far) / self._reaches[near] - 1, 0)
        shown = np.square(inside).sum(axis=2)
        length = shown + np.square(excess)
        inside *= (self._radius * np.sqrt(length / (1 + length) / (shown + 1e-3)))[..., None]
        placed: np.ndarray = np.einsum("ij,ijk->ik", weights, self._middles[near] + inside)
        return placed


def _unit_of(kept: np.ndarray, sample: np.ndarray) -> float:
    """The distance between neighbouring anchors."""
    if len(kept) > 1:
        largest = float(np.sqrt(np.square(kept).sum(axis=1).max()))
        least = np.concatenate([distances.min(axis=1) for _, distances in distances_in_blocks(kept)])
        unit = max(float(np.sqrt(np.median(least))), TINY * largest)
    else:
        lengths = np.sqrt(np.square(sample).sum(axis=1))
        unit = float(np.median(lengths)) if len(lengths) else 0.0
        unit = unit or float(lengths.max(initial=0))
    return unit or 1.0


def _held(rows: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """Rows that are absurdly far away drawn nearer, so that digits are left for their other distances."""
    most = 100 * (1 + np.sqrt(squares.max()))
    lengths = np.sqrt(np.square(rows).sum(axis=1, keepdims=True))
    return np.asarray(rows / np.maximum(lengths / most, 1))


def _weights(far: np.ndarray, warmth: float) -> np.ndarray:
    """How much each of the nearest anchors has to say, from squared distances, nearest first."""
    weights: np.ndarray = np.exp((far[:, :1] - far) / warmth)
    if weights.shape[1] > _FEW:
        # Who drops out of the nearest has nothing to say by then, so that nothing jumps.
        weights = weights[:, :_FEW] - weights[:, _FEW:]
    weights[:, 0] += TINY
    weights /= weights.sum(axis=1, keepdims=True)
    return weights


def _nearest_anchors(sample: np.ndarray, kept: np.ndarray, squares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The anchors nearest to each item, and their squared distances."""
    near = np.empty((len(sample), min(_FEW + 1, len(kept))), np.intp)
    far = np.empty(near.shape)
    for part in parts_of(len(sample)):
        near[part], far[part] = nearest(squared_distances(sample[part], kept, squares), near.shape[1])
    return near, far


def _confusion(
    sample: np.ndarray, places: np.ndarray, kept: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Blocks for `alike`: never more than some rows of the matrix of all anchors at a time."""
    squares = np.square(kept).sum(axis=1)
    own = np.square(sample - kept[places]).sum(axis=1)[:, None]
    # The anchor itself is one item of its list.
    sizes = 1 + np.bincount(places, minlength=len(kept))

    def shares(items: np.ndarray, anchors: slice) -> np.ndarray:
        distances = squared_distances(sample[items], kept[anchors], squares[anchors]) - own[items]
        found: np.ndarray = np.exp(np.maximum(distances, 0) / -WARMEST)
        return found

    for part, between in distances_in_blocks(kept):
        confusion = np.exp(between / -WARMEST)
        confused = confusion.copy()
        members = np.flatnonzero((places >= part.start) & (places < part.stop))
        for some in np.array_split(members, len(members) // ROWS + 1):
            np.add.at(confusion, places[some] - part.start, shares(some, slice(None)))
        for items in parts_of(len(sample)):
            np.add.at(confused.T, places[items], shares(np.arange(items.start, items.stop), part))
        yield between, confusion / sizes[part, None], confused / sizes


def _charted(
    sample: np.ndarray, kept: np.ndarray, near: np.ndarray, far: np.ndarray, leaning: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The insides of islands: each one's chart, the directions of all charts, each one's origin and reach."""
    charts = np.zeros(len(kept), np.intp)
    if len(sample) < _ENOUGH:
        common = 2 * principal(kept, 2)
        return charts, common, kept @ common.T, np.full(len(kept), 0.5)
    own = near[:, 0]
    rests = sample - kept[own]
    lengths = np.sqrt(far[:, 0])
    common, middle = _directions(rests, leaning)
    directions = [common]
    origins = kept @ common.T + middle
    reaches = np.full(len(kept), np.quantile(lengths, 0.9))
    order = np.argsort(own, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(own[order])) + 1):
        if len(members) >= _ENOUGH:
            island = own[members[0]]
            found, middle = _directions(rests[members], leaning[members])
            charts[island] = len(directions)
            directions.append(found)
            origins[island] = found @ kept[island] + middle
            reaches[island] = np.quantile(lengths[members], 0.9)
    return charts, np.concatenate(directions), origins, np.maximum(reaches, 1e-3)


def _leaning(middles: np.ndarray, near: np.ndarray, far: np.ndarray, warmth: float) -> np.ndarray:
    """Which way on the map the other anchors draw each item."""
    if near.shape[1] == 1:
        return np.zeros((len(near), 2))
    others = np.exp((far[:, 1:2] - far[:, 1:]) / warmth)
    others /= others.sum(axis=1, keepdims=True)
    ways = middles[near[:, 1:]] - middles[near[:, :1]]
    ways /= np.maximum(np.linalg.norm(ways, axis=2, keepdims=True), TINY)
    drawn: np.ndarray = np.einsum("ij,ijk->ik", others, ways)
    return drawn


def _directions(rests: np.ndarray, leaning: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two principal directions, scaled to an island and turned so that items face the islands they resemble.

    And what they show in the middle of the items.
    """
    found = principal(rests - rests.mean(axis=0), 2)
    scores = rests @ found.T
    middle = (np.median(scores, axis=0) + scores.mean(axis=0)) / 2
    scores -= middle
    # Half-way between the true proportions and a round island; the many fill it, not the few that lie far out.
    widths = np.maximum(np.median(np.abs(scores), axis=0), 1e-3)
    widths = np.sqrt(widths * widths.max())
    widths *= max(float(np.median(np.linalg.norm(scores / widths, axis=1))), 1.0) / _FILL
    left, _, right = np.linalg.svd((scores / widths).T @ leaning)
    turn = (left @ right).T / widths
    return turn @ found, turn @ middle


def _shape(matrix: np.ndarray) -> str:
    return " × ".join(str(size) for size in matrix.shape) or "a single number"


def _checked(matrix: np.ndarray, name: str, dim: int | None) -> np.ndarray:
    """Rows in double precision, of numbers that single precision can hold."""
    try:
        with np.errstate(over="ignore"):
            found = np.asarray(matrix, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} must be a matrix of numbers: {error}.") from error
    if found.ndim != 2 or (dim is not None and found.shape[1] != dim):
        wanted = "rows and columns" if dim is None else f"rows of {dim} numbers"
        raise ConfigError(f"{name} must have {wanted}, found {_shape(found)}.")
    if not np.isfinite(found).all():
        raise ConfigError(f"{name} must be finite, found NaN or infinity: leave such rows out.")
    return found.astype(np.float64)


def _checked_places(places: np.ndarray, count: int, anchors: int) -> np.ndarray:
    found = np.asarray(places)
    if found.shape != (count,) or (count and found.dtype.kind not in "iu"):
        raise ConfigError(
            f"places must be {count} whole numbers, one per row of sample, found {_shape(found)} of {found.dtype}."
        )
    if count and not 0 <= found.min() <= found.max() < anchors:
        raise ConfigError(
            f"places must lie between 0 and {anchors - 1}, the rows of anchors, found {found.min()} to {found.max()}."
        )
    return found.astype(np.intp)
