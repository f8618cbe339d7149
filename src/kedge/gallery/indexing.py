"""A folder of pictures into a gallery, a chunk at a time, so that an interrupted run continues."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kedge.errors import DataError
from kedge.gallery.adding import Added
from kedge.gallery.gallery import Gallery
from kedge.gallery.pictures import listed
from kedge.io import atomic_write

__all__ = ["UNREADABLE", "existing_folder", "index_folder", "tell_unreadable"]

UNREADABLE = "unreadable.txt"
"""In the gallery's folder: path and reason of every picture that the last run could not read."""
_STEP = 512


def index_folder(gallery: Gallery, folder: str | Path, *, progress: Callable[[Added], None] | None = None) -> Added:
    """Add the pictures of a folder, whose first-level folders are labels, and optimise the gallery.

    Some hundred pictures at a time are there for good: started again, a run that was interrupted goes on behind them.
    """
    files, labels = listed(existing_folder(folder), None)
    if not files:
        raise DataError(f"{folder} holds no pictures: give the folder that holds them.")
    seen: Added | None = None

    def report(added: Added) -> None:
        nonlocal seen
        seen = added
        if progress is not None:
            progress(added)

    try:
        added = gallery.add(files, labels, commit_every=_STEP, progress=report)
    finally:
        if seen is not None:
            tell_unreadable(gallery.path / UNREADABLE, seen.skipped)
    gallery.optimize()
    return added


def existing_folder(folder: str | Path) -> Path:
    """The folder, which must be there."""
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "is not there"
        raise DataError(f"The folder {folder} {what}: give the folder that holds the pictures.")
    return folder


def tell_unreadable(file: Path, unreadable: list[tuple[str, str]]) -> None:
    """Write path and reason of every picture that could not be read; no file where there is none."""
    if not unreadable:
        file.unlink(missing_ok=True)
        return
    with atomic_write(file) as stream:
        for path, reason in unreadable:
            stream.write(f"{path}\t{reason}".replace("\n", "\\n").encode("utf-8", "surrogateescape") + b"\n")
