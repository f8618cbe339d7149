"""How far from every anchor a query is unknown: a threshold calibrated on held-out items."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from kedge.errors import ConfigError, GalleryError
from kedge.gallery.checksums import CHECKSUM, json_checksum
from kedge.gallery.location import Location
from kedge.io import atomic_write

__all__ = ["FILE", "Calibration", "CalibrationFile", "save_calibration"]

FILE = "calibration.json"
_MAX_AGE = 0.001
_MTIME_RESOLUTION = 50_000_000
"""Nanoseconds: coarser than any file system's clock."""


@dataclass(frozen=True)
class Calibration:
    """Queries farther than `threshold` from their nearest anchor are unknown."""

    threshold: float
    accept: float
    items: int

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


def save_calibration(where: Location | Path, calibration: Calibration) -> None:
    """Write it into the gallery."""
    location, values = Location.of(where), asdict(calibration)
    with atomic_write(location.folder / FILE) as stream:
        stream.write(json.dumps({**values, CHECKSUM: json_checksum(values)}).encode())
    location.upload(FILE)


class CalibrationFile:
    """The calibration of a gallery, read again only where something in its folder was replaced."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._file = folder / FILE
        self._mtime = 0
        self._checked = -math.inf
        self._calibration: Calibration | None = None

    def load(self) -> Calibration | None:
        """The calibration, if there is one, as of a millisecond ago."""
        now = time.monotonic()
        if now - self._checked < _MAX_AGE:
            return self._calibration
        self._checked = now
        try:
            mtime = os.stat(self._folder).st_mtime_ns  # noqa: PTH116 - asked by nearly every search
        except FileNotFoundError:
            return self._calibration
        if mtime != self._mtime:
            self._calibration = self._read() if self._file.exists() else None
            # A recent mtime may still be that of the next file.
            self._mtime = mtime if time.time_ns() - mtime > _MTIME_RESOLUTION else 0
        return self._calibration

    def _read(self) -> Calibration:
        try:
            values = json.loads(self._file.read_text())
            # The first releases wrote no checksum.
            if values.pop(CHECKSUM, None) not in (None, json_checksum(values)):
                raise ValueError("The checksum differs.")
            return Calibration(**values)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise GalleryError(f"{self._file} is damaged: calibrate again.") from error
