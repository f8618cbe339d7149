"""Where a gallery is: a local folder, or a URL of an object store with a local folder as its cache."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import lance
import pyarrow as pa

from kedge.errors import GalleryError, KedgeError
from kedge.io import Folder, atomic_write, is_url

__all__ = ["LOCK", "Location", "wrap_url_errors"]

LOCK = "writer.lock"
"""The file in a gallery's folder that its writer locks."""
_COUNTER = "next_id"
_RETRIES = 100
_MAX_ID = 1 << 62


@dataclass(frozen=True)
class Location:
    """The local `folder` of a gallery; where it has a `url`, the cache of what is there.

    Inverted lists and the writer's lock are always in the folder.
    """

    folder: Path
    url: str | None = None

    @classmethod
    def of(cls, path: str | Path | Location) -> Location:
        """From a path, or a URL such as `s3://bucket/images`."""
        if isinstance(path, Location):
            return path
        if not is_url(str(path)):
            return cls(Path(path))
        url = str(path).rstrip("/")
        root = Path(os.environ.get("KEDGE_GALLERIES") or "~/.cache/kedge/galleries").expanduser()
        return cls(root / hashlib.sha256(url.encode()).hexdigest()[:16], url)

    def __str__(self) -> str:
        return self.url or str(self.folder)

    @property
    def name(self) -> str:
        """The last part of the path or URL."""
        return self.url.rpartition("/")[2] if self.url is not None else self.folder.resolve().name

    @property
    def table_uri(self) -> str:
        """The URI of the Lance table."""
        return f"{self}/record.lance"

    @property
    def max_age(self) -> float:
        """Seconds for which a version counts as the newest without a look: asking an object store is slow."""
        return 0.001 if self.url is None else 1.0

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if it does not exist."""
        return Folder(str(self)).read(name)

    def upload(self, *names: str) -> None:
        """Copy files of the folder to the URL, if there is one, in this order."""
        for name in names if self.url is not None else ():
            Folder(str(self)).write(name, (self.folder / name).read_bytes())

    def download(self, *names: str) -> None:
        """Copy files from the URL into the folder; those that do not exist there are removed here too."""
        for name in names:
            content, file = self.read(name), self.folder / name
            if content is None:
                file.unlink(missing_ok=True)
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(file) as stream:
                stream.write(content)

    def reserve_ids(self, count: int, lowest: int = 0) -> int:
        """The first of `count` ids that were never used and never will be, not even after a kill; at least `lowest`.

        A counter that is missing or stale, as in a backup of a live gallery, must not give an id twice: `lowest` is
        what the table says.
        """
        if self.url is not None:
            return self._reserve_remote_ids(count, lowest)
        counter = self.folder / _COUNTER
        first = max(lowest, _read_counter(counter))
        with atomic_write(counter) as stream:
            stream.write(str(first + count).encode())
        return first

    def _reserve_remote_ids(self, count: int, lowest: int) -> int:
        """The same among machines: compare and swap, repeated where another machine was faster."""
        for _ in range(_RETRIES):
            try:
                counter = lance.dataset(f"{self}/{_COUNTER}.lance")
            except ValueError:
                self.create_counter(lowest)
                continue
            current = int(counter.to_table().column("next")[0].as_py())
            first = max(lowest, current)
            update = counter.merge_insert("name").when_matched_update_all(f"target.next = {current}")
            if update.execute(_counter_row(first + count))["num_updated_rows"] == 1:
                return first
        raise GalleryError(f"Too many machines are adding to {self} at once; try again.")

    def create_counter(self, first: int = 0) -> None:
        """Start the id counter of a gallery at a URL."""
        lance.write_dataset(_counter_row(first), f"{self}/{_COUNTER}.lance")


@contextmanager
def wrap_url_errors(location: Location) -> Iterator[None]:
    """A URL that cannot be reached is one sentence."""
    try:
        yield
    except (OSError, ValueError) as error:
        if location.url is None or isinstance(error, KedgeError):
            raise
        reason = str(error).partition("\n")[0]
        raise GalleryError(
            f"{location} cannot be reached: check the address and its credentials ({reason})."
        ) from error


def _read_counter(file: Path) -> int:
    """The number in the counter file; 0 where there is none."""
    try:
        text = file.read_text()
        if not (text.isascii() and text.isdigit() and int(text) < _MAX_ID):
            raise ValueError(text)
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:
        raise GalleryError(f"{file} is damaged; delete it, and the next id is counted from the items.") from error
    return int(text)


def _counter_row(number: int) -> pa.Table:
    return pa.table({"name": ["id"], "next": pa.array([number], pa.int64())})
