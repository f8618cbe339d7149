"""A gallery that was copied while it was written: the copy opens at the newest version that it holds whole."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import lance
from filelock import FileLock, Timeout

from kedge.errors import GalleryError
from kedge.gallery.checksums import FileChecksums
from kedge.gallery.place import Place
from kedge.gallery.record import LOCK, manifests_of, missing_file

__all__ = ["settle_copy"]

_ASIDE = "incomplete"
_SLACK = 1.0
"""Seconds between the clock of a file system and that of a version."""
_log = logging.getLogger(__name__)


def settle_copy(place: Place) -> None:
    """Set aside the versions of a copy that were committed while it was made and whose files it lacks.

    Only these: where a file is missing for another reason, something is damaged, and a state from before would hide it.
    """
    if place.address is not None:
        return
    checksums = FileChecksums(place.folder)
    if checksums.inode in (None, place.folder.stat().st_ino) or not _incomplete(place.folder):
        return  # written here or by an earlier release, or whole
    try:
        with FileLock(place.folder / LOCK, timeout=0):
            _set_aside(place.folder, checksums, _incomplete(place.folder))
    except (Timeout, OSError) as error:
        raise GalleryError(f"{place} was copied while it was written, and cannot be completed now: {error}.") from error


def _incomplete(folder: Path) -> list[str]:
    """The manifests of the newest versions that lack files and were committed when the copy had begun."""
    found: list[str] = []
    began: float | None = None
    manifests = manifests_of(folder)
    for number in sorted(manifests, reverse=True):
        try:
            dataset = lance.dataset(str(folder / "record.lance"), version=number)
            if missing_file(folder, dataset) is None:
                return found
            versions: list[Any] = dataset.versions()
            committed = next(one["timestamp"] for one in versions if one["version"] == number).timestamp()
        except (ValueError, OSError, RuntimeError):
            return found  # damaged, which whoever reads it is told
        began = began or min(file.stat().st_ctime for file in folder.rglob("*") if file.is_file())
        if committed < began - _SLACK:
            return found
        found.append(manifests[number])
    return []  # not one is whole


def _set_aside(folder: Path, checksums: FileChecksums, manifests: list[str]) -> None:
    (folder / _ASIDE).mkdir(exist_ok=True)
    # Their numbers will be given again, to other states.
    checksums.add((), manifests)
    (folder / "record.lance" / "_versions" / "latest_version_hint.json").unlink(missing_ok=True)
    for name in manifests:
        shutil.move(folder / name, folder / _ASIDE / Path(name).name)
    _log.warning("%s was copied while it was written: its last %d versions are left out.", folder, len(manifests))
