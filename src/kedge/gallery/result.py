"""What a search found: hits, read from the inverted lists when somebody looks at them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from kedge.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "Columns",
    "Hit",
    "Item",
    "Nearest",
    "NearestRows",
    "Result",
    "described",
    "results_to_pandas",
    "similarity",
]


class Hit(NamedTuple):
    """One item that was found."""

    id: int
    path: str | None
    label: str | None
    distance: float
    anchor: str | None


class Item(NamedTuple):
    """One item of a gallery."""

    id: int
    path: str | None
    label: str | None
    metadata: dict[str, Any]


def similarity(distance: float, length: float) -> float:
    """How alike vectors at a distance are, from 0 to 1: max(0, 1 - d² / 2|q|²), with the `length` |q| of the query.

    Of vectors of length 1 that is their cosine (0 where it is negative). Others have the cosine of two vectors as long
    as the query and as far apart, so that the order is that of the distances.
    """
    if length == 0:
        return float(distance == 0)
    return max(0.0, 1 - (distance / length) ** 2 / 2)


class Columns(NamedTuple):
    """Hits, nearest first, a sequence for each of their fields."""

    ids: Sequence[int]
    paths: Sequence[str | None]
    labels: Sequence[str | None]
    distances: Sequence[float]
    anchors: Sequence[str | None]


@dataclass(slots=True)
class NearestRows:
    """Rows of a snapshot, nearest first; what they hold is read when somebody looks at it."""

    describe: Callable[[np.ndarray, np.ndarray], Columns]
    rows: np.ndarray
    squares: np.ndarray


Nearest = Columns | NearestRows


def described(nearest: Nearest) -> Columns:
    """The hits by field."""
    return nearest if isinstance(nearest, Columns) else nearest.describe(nearest.rows, nearest.squares)


class Result:
    """What a search found: iterate it for hits, nearest first."""

    __slots__ = ("_hits", "_nearest", "anchors", "compared", "length", "rank", "seconds", "unknown")

    def __init__(
        self,
        nearest: Nearest,
        anchors: list[str | None],
        unknown: bool | None,
        seconds: float = 0.0,
        rank: Literal["class", "looks"] = "class",
        compared: Literal["embedding", "features"] = "embedding",
        length: float = 1.0,
    ) -> None:
        self._nearest = nearest
        self._hits: list[Hit] | None = None
        self.anchors = anchors
        """The anchors whose lists were searched, nearest first; none where items were ranked by looks."""
        self.unknown = unknown
        """Whether the query is unlike every trained class; None where nothing was calibrated."""
        self.seconds = seconds
        self.rank = rank
        """Whether items were ranked by class, in the lists of the nearest anchors, or by looks, whatever the label."""
        self.compared = compared
        """Which vectors the distances are between."""
        self.length = length
        """The length of the query's vector, which the similarities are relative to."""

    @property
    def columns(self) -> Columns:
        """The hits by field."""
        self._nearest = columns = described(self._nearest)
        return columns

    @property
    def hits(self) -> list[Hit]:
        """The hits, nearest first."""
        if self._hits is None:
            # What Hit(*values) does, at half the price: a search makes hundreds.
            self._hits = list(map(tuple.__new__, repeat(Hit), zip(*self.columns, strict=True)))
        return self._hits

    @property
    def ids(self) -> list[int]:
        """The ids of the hits."""
        return list(self.columns.ids)

    @property
    def distances(self) -> list[float]:
        """The distances of the hits."""
        return list(self.columns.distances)

    @property
    def similarities(self) -> list[float]:
        """How alike each hit is, from 0 to 1; see `similarity`."""
        return [similarity(distance, self.length) for distance in self.columns.distances]

    def __iter__(self) -> Iterator[Hit]:
        return iter(self.hits)

    def __len__(self) -> int:
        return len(self.columns.ids)

    def __repr__(self) -> str:
        first = next(iter(self), None)
        nearest = "" if first is None else f", nearest: {first.path or first.id} ({first.label}, {first.distance:.4g})"
        unknown = ", unknown" if self.unknown else ""
        return f"Result({len(self):,} hits by {self.rank}{nearest}{unknown}, {self.seconds * 1000:.3g} ms)"

    def to_pandas(self) -> pd.DataFrame:
        """The hits as a table, a row each, nearest first; the index is their rank, from 1."""
        import pandas as pd

        return pd.DataFrame(self.hits, pd.RangeIndex(1, len(self) + 1, name="rank"), Hit._fields)


def results_to_pandas(results: Iterable[Result], queries: Iterable[object] | None = None) -> pd.DataFrame:
    """The hits of several results as one table; a column `query` has the name or, without `queries`, the number."""
    import pandas as pd

    tables = [result.to_pandas() for result in results]
    names = range(len(tables)) if queries is None else [str(query) for query in queries]
    if len(names) != len(tables):
        raise ConfigError(f"There are {len(tables)} results but {len(names)} queries; give one name for each result.")
    if not tables:
        return pd.DataFrame(columns=["query", "rank", *Hit._fields])
    return pd.concat(tables, keys=names, names=["query"]).reset_index()
