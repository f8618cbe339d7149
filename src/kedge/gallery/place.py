"""Where a gallery is: a folder here, or an address of an object store with a folder here beside it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import lance
import pyarrow as pa

from kedge.errors import GalleryError
from kedge.io import Folder, atomic_write, is_url

__all__ = ["Place"]

_COUNTER = "next_id"
_TRIES = 100
_MOST_IDS = 1 << 62


@dataclass(frozen=True)
class Place:
    """The `folder` of a gallery or, where it has an `address`, the folder for what this machine keeps of it.

    Lists and the writer's lock are always in the folder; what an address holds besides is copied there.
    """

    folder: Path
    address: str | None = None

    @classmethod
    def of(cls, where: str | Path | Place) -> Place:
        """From a path, or an address such as `s3://bucket/pictures`."""
        if isinstance(where, Place):
            return where
        if not is_url(str(where)):
            return cls(Path(where))
        address = str(where).rstrip("/")
        home = Path(os.environ.get("KEDGE_GALLERIES") or "~/.cache/kedge/galleries").expanduser()
        return cls(home / hashlib.sha256(address.encode()).hexdigest()[:16], address)

    def __str__(self) -> str:
        return self.address or str(self.folder)

    @property
    def name(self) -> str:
        """The last part of the path or address."""
        return self.address.rpartition("/")[2] if self.address is not None else self.folder.resolve().name

    @property
    def record(self) -> str:
        """Where Lance finds the record."""
        return f"{self}/record.lance"

    @property
    def fresh(self) -> float:
        """Seconds for which what was seen of the record counts as the newest: to ask an object store takes long."""
        return 0.001 if self.address is None else 1.0

    def read(self, name: str) -> bytes | None:
        """What a file holds; None if it is not there."""
        return Folder(str(self)).read(name)

    def publish(self, *names: str) -> None:
        """Copy files of the folder to the address, the last one last."""
        if self.address is not None:
            for name in names:
                Folder(self.address).write(name, (self.folder / name).read_bytes())

    def fetch(self, folder: str) -> None:
        """Copy the files of a folder at the address into the one here."""
        if self.address is None:
            return
        there = Folder(self.address)
        for name in there.names(folder):
            self._keep(f"{folder}/{name}" if folder else name)

    def fetch_file(self, name: str) -> None:
        """Copy a file, if it is at the address; if not, it is gone here too."""
        if self.address is not None:
            self._keep(name)

    def _keep(self, name: str) -> None:
        content, file = self.read(name), self.folder / name
        if content is None:
            file.unlink(missing_ok=True)
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as stream:
            stream.write(content)

    def reserve(self, count: int, lowest: int = 0) -> int:
        """The first of `count` ids that nobody has had or will have, not even after a kill; at least `lowest`.

        A counter that is missing or stale, as in a backup of a live gallery, must not give an id twice: `lowest` is
        what the table says.
        """
        if self.address is not None:
            return self._reserve_there(count, lowest)
        counter = self.folder / _COUNTER
        first = max(lowest, _counted(counter))
        with atomic_write(counter) as stream:
            stream.write(str(first + count).encode())
        return first

    def _reserve_there(self, count: int, lowest: int) -> int:
        """The same among machines: whoever finds that the number has changed meanwhile begins again."""
        for _ in range(_TRIES):
            try:
                counter = lance.dataset(f"{self}/{_COUNTER}.lance")
            except ValueError:
                self.begin_counting(lowest)
                continue
            known = int(counter.to_table().column("next")[0].as_py())
            first = max(lowest, known)
            new = _row(first + count)
            done = counter.merge_insert("name").when_matched_update_all(f"target.next = {known}").execute(new)
            if done["num_updated_rows"] == 1:
                return first
        raise GalleryError(f"Too many machines are adding to {self} at a time: try again.")

    def begin_counting(self, first: int = 0) -> None:
        """The first id of an empty gallery, or of one that has lost its counter."""
        if self.address is not None:
            lance.write_dataset(_row(first), f"{self}/{_COUNTER}.lance")


def _counted(counter: Path) -> int:
    """The number in a file; 0 where there is no file."""
    try:
        text = counter.read_text()
        if not (text.isascii() and text.isdigit() and int(text) < _MOST_IDS):
            raise ValueError(text)
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:
        raise GalleryError(
            f"{counter} is damaged, it holds no number of an item: remove it, and ids go on behind the largest in use."
        ) from error
    return int(text)


def _row(number: int) -> pa.Table:
    return pa.table({"name": ["id"], "next": pa.array([number], pa.int64())})
