"""List the images of a folder, and the classes of class folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from kedge.errors import DataError

__all__ = ["EXTENSIONS", "list_classes", "list_images"]

EXTENSIONS = frozenset(
    {".avif", ".bmp", ".gif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm"}
    | {".ppm", ".tga", ".tif", ".tiff", ".webp"}
)


def list_images(folder: str | Path) -> list[Path]:
    """All images under a folder, at any depth, sorted by path; hidden files and folders are left out.

    Links are followed, each folder is entered once. A link that leads nowhere is listed when its name is an
    image's, so that reading it reports it.
    """
    return list(_walk(_existing(folder), entered=set()))


def list_classes(folder: str | Path) -> tuple[list[str], list[Path], list[int]]:
    """Classes, files and their labels: every first-level folder that holds images is a class, sorted."""
    classes: list[str] = []
    files: list[Path] = []
    labels: list[int] = []
    for entry in _entries(_existing(folder)):
        if images := (list_images(entry.path) if Path(entry.path).is_dir() else []):
            if entry.name != entry.name.encode(errors="replace").decode():
                raise DataError(f"The folder name {entry.name!a} in {folder} cannot be a class name: rename it.")
            labels.extend([len(classes)] * len(images))
            files.extend(images)
            classes.append(entry.name)
    return classes, files, labels


def _existing(folder: str | Path) -> Path:
    folder = Path(folder).expanduser()
    if not folder.exists():
        raise DataError(f"Folder {folder} does not exist; check the path.")
    if not folder.is_dir():
        raise DataError(f"{folder} is a file; pass the folder that holds the images.")
    return folder


def _walk(folder: Path, entered: set[tuple[int, int]]) -> Iterator[Path]:
    status = folder.stat()
    if (status.st_dev, status.st_ino) in entered:
        return
    entered.add((status.st_dev, status.st_ino))
    for entry in _entries(folder):
        path = Path(entry.path)
        # Path takes a link to itself for one that leads nowhere; an entry would raise, but needs no look at the disk.
        target = path if entry.is_symlink() else entry
        if target.is_dir():
            yield from _walk(path, entered)
        # Not pipes and sockets, which are there but no files: opening one would wait for ever.
        elif path.suffix.lower() in EXTENSIONS and (target.is_file() or not path.exists()):
            yield path


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda e: e.name)
    except OSError as error:
        raise DataError(f"The folder {folder} cannot be opened ({error.strerror}).") from error
