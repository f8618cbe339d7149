"""What the workers have finished, kept beside the table until it is committed, so that a killed run resumes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from lance.fragment import FragmentMetadata

from kedge.images import prefetch
from kedge.io import Folder
from kedge.ray.sources import READERS

__all__ = ["Entry", "Journal"]

_FOLDER = "journal"
_PLAN = f"{_FOLDER}/plan.json"


@dataclass
class Entry:
    """The result for one chunk of images, the first of which is `start` in the listing."""

    start: int
    ids: list[int] = field(default_factory=list)
    replaced: list[int] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    present: int = 0
    written: list[dict[str, Any]] = field(default_factory=list)
    """Its rows, as Lance's metadata of fragments."""

    @property
    def fragments(self) -> list[FragmentMetadata]:
        """Its rows, as they can be committed."""
        return [FragmentMetadata.from_json(json.dumps(fragment)) for fragment in self.written]

    @property
    def files(self) -> set[str]:
        """The data files of the table that hold them."""
        return {file["path"] for fragment in self.written for file in fragment["files"]}


class Journal:
    """A plan (which listing has which ids) and an entry for every chunk that is finished.

    Entries lie in a folder that is named by the plan's first id. No two plans share one, so that whatever a worker
    writes late, on a machine that was believed dead, is never taken for something else.
    """

    def __init__(self, gallery: str, first: int = -1) -> None:
        self._files = Folder(gallery)
        self.first = first

    def resume(self, digest: str, version: int) -> bool:
        """Whether there is a plan for this listing that was not committed; it is taken up, any other is removed."""
        plan = self._read(_PLAN)
        # A driver killed while it committed may have succeeded: then the table has another version by now.
        if plan.get("digest") == digest and plan["committing"] in (None, version):
            self.first = int(plan["first"])
            return True
        self.remove()
        return False

    def begin(self, digest: str, first: int, *, committing: int | None = None) -> None:
        """Record which listing has which ids and, at the end, the version that is about to change."""
        self.first = first
        plan = {"digest": digest, "first": first, "committing": committing}
        self._files.write(_PLAN, json.dumps(plan).encode())

    def write(self, entry: Entry) -> None:
        """Keep what a worker has finished; the same chunk finished twice is one entry."""
        self._files.write(f"{_FOLDER}/{self.first}/{entry.start:012d}.json", json.dumps(asdict(entry)).encode())

    def entries(self) -> dict[int, Entry]:
        """Finished chunks by their start, as far as all files of the table that they name are there."""
        folder = f"{_FOLDER}/{self.first}"
        names = [f"{folder}/{name}" for name in self._files.names(folder) if name.endswith(".json")]
        data_files = set(self._files.names("record.lance/data")) if names else set()
        entries = [Entry(**values) for values in prefetch(self._read, names, workers=READERS) if values]
        return {entry.start: entry for entry in entries if entry.files <= data_files}

    def remove(self) -> None:
        """Remove everything: it is committed, or of another run."""
        self._files.remove(_FOLDER)

    def _read(self, name: str) -> dict[str, Any]:
        """Nothing where a power cut left half of it."""
        try:
            values: dict[str, Any] = json.loads(self._files.read(name) or b"{}")
        except ValueError:
            return {}
        return values
