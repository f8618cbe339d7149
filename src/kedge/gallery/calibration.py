"""When a query is unknown: how far from every anchor, how unlike every item; calibrated on held-out items."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

from kedge.errors import GalleryError
from kedge.gallery.location import Location
from kedge.gallery.schema import seal_json, unseal_json
from kedge.io import atomic_write
from kedge.model.calibration import Calibration

__all__ = ["FILE", "Calibration", "CalibrationFile", "save_calibration"]

FILE = "calibration.json"


def save_calibration(where: Location | Path, calibration: Calibration) -> None:
    """Write it into the gallery."""
    location = Location.of(where)
    with atomic_write(location.folder / FILE) as stream:
        stream.write(seal_json(calibration.to_json()))
    location.upload(FILE)


class CalibrationFile:
    """The calibration of a gallery, read again only where its file was replaced."""

    def __init__(self, location: Location) -> None:
        self._file = location.folder / FILE
        self._max_age = location.max_age
        self._calibration: Calibration | None = None
        self._state: tuple[int, int] | None = None
        self._polled = -math.inf

    def load(self) -> Calibration | None:
        """The calibration, if there is one; as old as a snapshot may be."""
        if (now := time.monotonic()) - self._polled >= self._max_age:
            try:
                stat = os.stat(self._file)  # noqa: PTH116 - asked by every search; Path.stat costs twice as much
                state = stat.st_ino, stat.st_mtime_ns
            except FileNotFoundError:
                state = None
            if state != self._state:
                self._calibration = None if state is None else self._read()
            self._state, self._polled = state, now
        return self._calibration

    def invalidate(self) -> None:
        """Look at the file at the next call, however soon it comes: this process has written."""
        self._polled = -math.inf

    def _read(self) -> Calibration:
        try:
            # The first release wrote no checksum.
            return Calibration(**unseal_json(self._file.read_bytes(), optional=True))
        except (OSError, ValueError, TypeError) as error:
            raise GalleryError(f"{self._file} is damaged; run kedge calibrate again.") from error
