"""A folder of pictures into a gallery, a chunk at a time, so that an interrupted run continues."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kedge.errors import DataError, GalleryError
from kedge.files import whole_file
from kedge.gallery.gallery import Gallery
from kedge.gallery.pictures import listed

__all__ = ["UNREADABLE", "Summary", "existing_folder", "index_folder"]

UNREADABLE = "unreadable.txt"
"""In the gallery's folder: path and reason of every picture that the last run could not read."""
_CHUNK = 512


@dataclass
class Summary:
    """How far a run is, and what became of the pictures."""

    total: int
    added: int = 0
    present: int = 0
    """So many were there already."""
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    """Path and reason."""

    @property
    def done(self) -> int:
        """How many pictures have been looked at."""
        return self.added + self.present + len(self.unreadable)

    def __str__(self) -> str:
        return f"{self.added:,} added, {self.present:,} already there, {len(self.unreadable):,} unreadable"


def index_folder(gallery: Gallery, folder: str | Path, *, progress: Callable[[Summary], None] | None = None) -> Summary:
    """Add the pictures of a folder, whose first-level folders are labels, and optimise the gallery.

    Each chunk is there for good once it is added: started again, a run that was interrupted goes on behind the last
    one. `progress` is called at the start and after every chunk.
    """
    files, labels = listed(existing_folder(folder), None)
    if not files:
        raise DataError(f"{folder} holds no pictures: give the folder that holds them.")
    summary = Summary(len(files))
    report = progress or (lambda _: None)
    report(summary)
    try:
        for start in range(0, len(files), _CHUNK):
            _add(gallery, files[start : start + _CHUNK], labels[start : start + _CHUNK], summary)
            report(summary)
        gallery.optimize()
    except OSError as error:
        reason = error.strerror or (str(error).splitlines() or [type(error).__name__])[0]
        raise GalleryError(
            f"{gallery.path} could not be written ({reason}): what was added before stays, run it again to continue."
        ) from error
    finally:
        _tell_unreadable(gallery.path / UNREADABLE, summary.unreadable)
    return summary


def existing_folder(folder: str | Path) -> Path:
    """The folder, which must be there."""
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "is not there"
        raise DataError(f"The folder {folder} {what}: give the folder that holds the pictures.")
    return folder


def _add(gallery: Gallery, files: list[Path], labels: list[str | None], summary: Summary) -> None:
    # A name that is not UTF-8 cannot stand in the record.
    named = [_is_text(str(file)) for file in files]
    rows = [row for row, fine in enumerate(named) if fine]
    added = gallery.add([files[row] for row in rows], [labels[row] for row in rows])
    summary.added += len(added)
    summary.present += added.present
    summary.unreadable += added.skipped
    summary.unreadable += [
        (str(file), "Its name is not valid UTF-8: rename it.")
        for file, fine in zip(files, named, strict=True)
        if not fine
    ]


def _tell_unreadable(file: Path, unreadable: list[tuple[str, str]]) -> None:
    if not unreadable:
        file.unlink(missing_ok=True)
        return
    with whole_file(file) as stream:
        for path, reason in unreadable:
            stream.write(f"{path}\t{reason}".replace("\n", "\\n").encode("utf-8", "surrogateescape") + b"\n")


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
