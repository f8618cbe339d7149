"""How far from every anchor a query is unknown: a threshold from held-out items instead of a guess."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from kedge.errors import ConfigError, GalleryError
from kedge.gallery.checksums import CHECKSUM, json_checksum
from kedge.gallery.place import Place
from kedge.io import atomic_write

__all__ = ["Calibration", "fetch_calibration", "load_calibration", "save_calibration"]

_FILE = "calibration.json"


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


def save_calibration(where: Place | Path, calibration: Calibration) -> None:
    """Keep it with the gallery."""
    place = Place.of(where)
    with atomic_write(place.folder / _FILE) as stream:
        values = asdict(calibration)
        stream.write(json.dumps({**values, CHECKSUM: json_checksum(values)}).encode())
    place.publish(_FILE)


def fetch_calibration(place: Place) -> None:
    """Take over what somebody else has learned at the gallery's address."""
    place.fetch_file(_FILE)


def load_calibration(folder: Path) -> Calibration | None:
    """What was kept, if anything."""
    file = folder / _FILE
    if not file.exists():
        return None
    try:
        values = json.loads(file.read_text())
        # Earlier releases wrote no checksum.
        if values.pop(CHECKSUM, None) not in (None, json_checksum(values)):
            raise ValueError("The checksum differs.")
        return Calibration(**values)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise GalleryError(f"{file} is damaged: calibrate again.") from error
