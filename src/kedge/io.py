"""Files that are there as a whole or not at all, here or behind an address such as `s3://bucket/folder`."""

from __future__ import annotations

import io
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Folder", "atomic_write", "filesystem_of", "is_url"]


@contextmanager
def atomic_write(final: Path, *, at_once: bool = True) -> Iterator[io.BufferedRandom]:
    """A stream to write; the file gets its name when the block ends well, and vanishes otherwise.

    Unless it may reach the disk later than `at_once`, it outlives a power cut from then on.
    """
    part = final.with_name(f".{final.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("x+b") as stream:
            yield stream
            stream.flush()
            if at_once:
                os.fsync(stream.fileno())
        part.replace(final)
    finally:
        part.unlink(missing_ok=True)


def is_url(source: str) -> bool:
    """Whether this is no path of this machine."""
    return "://" in source


def filesystem_of(source: str) -> tuple[Any, str]:
    """The file system behind a path or an address, and the path there."""
    from pyarrow.fs import FileSystem, LocalFileSystem

    if is_url(source):
        server = os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT")
        if server and source.startswith("s3://"):
            # Arrow would look for another server than Amazon's only once, when it is loaded.
            from pyarrow.fs import S3FileSystem

            scheme, _, host = server.rpartition("://")
            return S3FileSystem(endpoint_override=host, scheme=scheme or "https"), source.removeprefix("s3://")
        system, path = FileSystem.from_uri(source)
        return system, path
    return LocalFileSystem(), str(Path(source).expanduser().absolute())


@dataclass(frozen=True)
class Folder:
    """A folder; its files are written whole or not at all."""

    root: str

    def read(self, name: str) -> bytes | None:
        """What a file holds; None if it is not there."""
        system, root = filesystem_of(self.root)
        try:
            with system.open_input_stream(f"{root}/{name}") as stream:
                content: bytes = stream.read()
        except FileNotFoundError:
            return None
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write a file, in place of the one that is there."""
        system, root = filesystem_of(self.root)
        final = f"{root}/{name}"
        system.create_dir(final.rpartition("/")[0], recursive=True)
        # On a disk a name is given at the end; an object store shows nothing before that anyway.
        part = f"{final}.{secrets.token_hex(4)}.part" if system.type_name == "local" else final
        with system.open_output_stream(part) as stream:
            stream.write(content)
        if part != final:
            system.move(part, final)

    def names(self, folder: str) -> list[str]:
        """The names of the files in a folder, sorted; none if it is not there."""
        from pyarrow.fs import FileSelector, FileType

        system, root = filesystem_of(self.root)
        found = system.get_file_info(FileSelector(f"{root}/{folder}", allow_not_found=True))
        return sorted(one.base_name for one in found if one.type == FileType.File)

    def remove(self, folder: str) -> None:
        """Remove a folder, if it is there."""
        from pyarrow.fs import FileType

        system, root = filesystem_of(self.root)
        if system.get_file_info(f"{root}/{folder}").type == FileType.Directory:
            system.delete_dir(f"{root}/{folder}")

    def remove_file(self, name: str) -> None:
        """Remove a file."""
        system, root = filesystem_of(self.root)
        system.delete_file(f"{root}/{name}")
