"""Results: one JSON line for each thing measured of a run, appended by whoever measured it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from kedge.errors import DataError
from kedge.reproduce.jobs import Job

__all__ = ["Line", "Store"]


@dataclass(frozen=True)
class Line:
    """What was measured of one run."""

    key: str
    measure: str
    dataset: str
    encoder: str
    loss: str
    recipe: str
    seed: int
    changes: list[str]
    settings: list[str]
    values: Any
    command: str
    config_hash: str
    dataset_hash: str
    seconds: float
    """Of the training, in this and in earlier sittings; of the measuring where nothing was trained for it."""
    machine: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, job: Job, measure: str, **rest: Any) -> Line:
        """The line of a job."""
        known = job.to_json()
        del known["measures"]
        return cls(key=job.key, measure=measure, **known, **rest)

    @property
    def job(self) -> Job:
        """The run it was measured of."""
        return Job.from_json(
            {name: getattr(self, name) for name in Job.__dataclass_fields__ if name != "measures"}
            | {"measures": [self.measure]}
        )


class Store:
    """The file of lines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, line: Line) -> None:
        """Add a line, whole or not at all, whoever else writes meanwhile."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(line), ensure_ascii=False) + "\n"
        with FileLock(f"{self.path}.lock"), self.path.open("a+b") as stream:
            # A kill or a full disk may have left half a line: the next one must not become part of it.
            stream.seek(0, os.SEEK_END)
            if stream.tell():
                stream.seek(-1, os.SEEK_END)
                if stream.read(1) != b"\n":
                    stream.write(b"\n")
            stream.write(text.encode())
            stream.flush()
            os.fsync(stream.fileno())

    def lines(self) -> list[Line]:
        """All lines; of two for one thing the later counts. Half lines are left out."""
        return list({(line.key, line.measure): line for line in self._read()}.values())

    def missing(self, jobs: Iterable[Job]) -> list[Job]:
        """Those of which something has not been measured, reduced to that."""
        known = {(line.key, line.measure) for line in self._read()}
        found = []
        for job in jobs:
            key = job.key
            left = tuple(measure for measure in job.measures if (key, measure) not in known)
            if left:
                found.append(Job.from_json(job.to_json() | {"measures": left}))
        return found

    def _read(self) -> Iterator[Line]:
        if not self.path.exists():
            return
        try:
            raw = self.path.read_bytes().splitlines()
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror}.") from error
        for text in raw:
            try:
                yield Line(**json.loads(text))
            except (ValueError, TypeError):
                continue
