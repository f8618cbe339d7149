"""When a query is unknown: how far from every anchor, how unlike every item; calibrated on held-out items."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from kedge.errors import ConfigError, GalleryError
from kedge.gallery.location import FolderWatch, Location
from kedge.gallery.schema import seal_json, unseal_json
from kedge.io import atomic_write

__all__ = ["FILE", "Calibration", "CalibrationFile", "save_calibration"]

FILE = "calibration.json"


@dataclass(frozen=True)
class Calibration:
    """Queries farther than `threshold` from their nearest anchor are unknown."""

    threshold: float
    accept: float
    items: int
    cosine: float | None = None
    """With features, queries whose nearest item of a trained class has a smaller cosine are unknown."""

    @classmethod
    def from_distances(cls, distances: np.ndarray, accept: float) -> Calibration:
        """The smallest threshold that accepts a share `accept` of items like these, which were not trained on.

        The rank is raised by one item (split conformal prediction), so that the share holds for items to come and
        not only for the ones at hand.
        """
        if not 0 < accept < 1:
            raise ConfigError(f"accept must lie between 0 and 1, found {accept}.")
        count = len(distances)
        rank = math.ceil((count + 1) * accept)
        if rank > count:
            needed = math.ceil(accept / (1 - accept))
            raise ConfigError(f"To accept {accept:g} of the items, at least {needed} are needed, found {count}.")
        return cls(float(np.sort(distances)[rank - 1]), accept, count)

    def to_json(self) -> dict[str, float]:
        """Its values; without a cosine, those that earlier releases read."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def with_cosines(self, cosines: np.ndarray) -> Calibration:
        """The same with the largest cosine that accepts that share of items with these."""
        return replace(self, cosine=-self.from_distances(-cosines, self.accept).threshold)


def save_calibration(where: Location | Path, calibration: Calibration) -> None:
    """Write it into the gallery."""
    location = Location.of(where)
    with atomic_write(location.folder / FILE) as stream:
        stream.write(seal_json(calibration.to_json()))
    location.upload(FILE)


class CalibrationFile:
    """The calibration of a gallery, read again only where something in its folder was replaced."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE
        self._watch = FolderWatch(folder)
        self._calibration: Calibration | None = None

    def load(self) -> Calibration | None:
        """The calibration, if there is one."""
        with suppress(FileNotFoundError):
            self._watch.poll(self._read)
        return self._calibration

    def _read(self) -> None:
        if not self._file.exists():
            self._calibration = None
            return
        try:
            # The first release wrote no checksum.
            self._calibration = Calibration(**unseal_json(self._file.read_bytes(), optional=True))
        except (OSError, ValueError, TypeError) as error:
            raise GalleryError(f"{self._file} is damaged: calibrate again.") from error
