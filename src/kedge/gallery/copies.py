"""A gallery that was copied while it was written: the copy opens at the newest version that it holds whole."""

from __future__ import annotations

import logging
import shutil
from contextlib import suppress
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
    with suppress(OSError):
        if checksums.inode in (None, place.folder.stat().st_ino):
            return  # written here, or by an earlier release
    try:
        with FileLock(place.folder / LOCK, timeout=0):
            _set_aside(place.folder, checksums)
    except (Timeout, OSError) as error:
        raise GalleryError(f"{place} is a copy that must be completed, which cannot be done now: {error}.") from error


def _set_aside(folder: Path, checksums: FileChecksums) -> None:
    uri, gone = folder / "record.lance", []
    began: float | None = None
    manifests = manifests_of(folder)
    for number in sorted(manifests, reverse=True):
        try:
            dataset = lance.dataset(str(uri), version=number)
            if missing_file(folder, dataset) is None:
                break
            versions: list[Any] = dataset.versions()
            committed = next(one["timestamp"] for one in versions if one["version"] == number).timestamp()
        except (ValueError, OSError, RuntimeError):
            break  # damaged, which whoever reads it is told
        began = began or min(file.stat().st_ctime for file in folder.rglob("*") if file.is_file())
        if committed < began - _SLACK:
            break
        gone.append(manifests[number])
    else:
        return  # not one is whole
    if gone:
        (folder / _ASIDE).mkdir(exist_ok=True)
        # Their numbers will be given again, to other states.
        checksums.add((), gone)
        (uri / "_versions" / "latest_version_hint.json").unlink(missing_ok=True)
        for name in gone:
            shutil.move(folder / name, folder / _ASIDE / Path(name).name)
        _log.warning("%s was copied while it was written: the last %d versions are incomplete.", folder, len(gone))
