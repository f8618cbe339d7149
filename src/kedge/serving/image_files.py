"""Allow-list of folders whose image files may be shown: a gallery's table can name any file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kedge.errors import ConfigError
from kedge.serving.catalogue import UPLOADS

__all__ = ["ImageFiles"]


class ImageFiles:
    """Files below the folders named at start, and those uploaded to the gallery."""

    def __init__(self, gallery: Path, folders: Sequence[Path]) -> None:
        for folder in folders:
            if not folder.is_dir():
                raise ConfigError(f"--images must name a folder of this machine, found {folder}.")
        # Whoever made the gallery may have made its uploads a link to anywhere, so that only the gallery is resolved.
        self._folders = [gallery.resolve() / UPLOADS, *(folder.resolve() for folder in folders)]

    def find(self, path: str | None) -> Path | None:
        """The file at a path of the table; None unless it lies, links followed, in one of the folders."""
        if path is None:
            return None
        try:
            file = Path(path).resolve()
            is_shown = any(file.is_relative_to(folder) for folder in self._folders) and file.is_file()
        except (OSError, ValueError):  # a path that no file can have
            return None
        return file if is_shown else None
