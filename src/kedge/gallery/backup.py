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
from kedge.gallery.integrity import manifests_of, missing_file
from kedge.gallery.location import Location
from kedge.gallery.table import LOCK

__all__ = ["repair_copy"]

_INCOMPLETE = "incomplete"
_CLOCK_SKEW = 1.0
"""Seconds between the clock of a file system and that of a version."""
_log = logging.getLogger(__name__)


def repair_copy(location: Location) -> None:
    """Set aside the versions of a copy that were committed while it was made and whose files it lacks.

    Only these: where a file is missing for another reason, something is damaged, and an older version would hide it.
    """
    if location.url is not None:
        return
    folder, checksums = location.folder, FileChecksums(location.folder)
    if checksums.inode in (None, folder.stat().st_ino) or not _incomplete_versions(folder):
        return  # written here or by one of the first releases, or whole
    try:
        with FileLock(folder / LOCK, timeout=0):
            _set_aside(folder, checksums, _incomplete_versions(folder))
    except (Timeout, OSError) as error:
        raise GalleryError(
            f"{location} was copied while it was written, and cannot be completed now: {error}."
        ) from error


def _incomplete_versions(folder: Path) -> list[str]:
    """The manifests of the newest versions that lack files and were committed when the copy had begun."""
    incomplete: list[str] = []
    copy_began: float | None = None
    manifests = manifests_of(folder)
    for number in sorted(manifests, reverse=True):
        try:
            dataset = lance.dataset(str(folder / "record.lance"), version=number)
            if missing_file(folder, dataset) is None:
                return incomplete
            versions: list[Any] = dataset.versions()
            committed = next(entry["timestamp"] for entry in versions if entry["version"] == number).timestamp()
        except (ValueError, OSError, RuntimeError):
            return incomplete  # damaged, which its readers report
        copy_began = copy_began or min(file.stat().st_ctime for file in folder.rglob("*") if file.is_file())
        if committed < copy_began - _CLOCK_SKEW:
            return incomplete
        incomplete.append(manifests[number])
    return []  # not one is whole


def _set_aside(folder: Path, checksums: FileChecksums, manifests: list[str]) -> None:
    (folder / _INCOMPLETE).mkdir(exist_ok=True)
    # Their numbers will be used again, for other versions.
    checksums.add((), manifests)
    (folder / "record.lance" / "_versions" / "latest_version_hint.json").unlink(missing_ok=True)
    for name in manifests:
        shutil.move(folder / name, folder / _INCOMPLETE / Path(name).name)
    _log.warning("%s was copied while it was written: its last %d versions are left out.", folder, len(manifests))
