"""Results: one JSON line for each measurement of a run, in a file that several processes append to."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from kedge.errors import ConfigError, DataError
from kedge.reproduce.jobs import KEY_VERSION, Job
from kedge.reproduce.paper import PaperValue
from kedge.reproduce.tables import Cell, Column

__all__ = ["ResultLine", "ResultStore", "Results", "value_at"]


@dataclass(frozen=True)
class ResultLine:
    """One measurement of one run."""

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
    """Of the training, in this and in earlier sessions; of the measuring where nothing was trained for it."""
    machine: dict[str, Any] = field(default_factory=dict)
    key_version: int = 1

    @classmethod
    def of(cls, job: Job, measure: str, **rest: Any) -> ResultLine:
        """The line of a job."""
        description = job.to_json() | {"changes": list(job.changes), "settings": list(job.settings)}
        del description["measures"]
        return cls(key=job.key, key_version=KEY_VERSION, measure=measure, **description, **rest)

    @property
    def job(self) -> Job:
        """The run it was measured of."""
        return Job.from_json(vars(self) | {"measures": [self.measure]})


class ResultStore:
    """The file of result lines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, line: ResultLine) -> None:
        """Add a line, whole or not at all, whichever processes write at the same time."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(line), ensure_ascii=False) + "\n"
        with FileLock(f"{self.path}.lock"), self.path.open("a+b") as stream:
            # A kill or a full disk may have left half a line: the next one must not become part of it.
            if stream.tell():
                stream.seek(-1, os.SEEK_END)
                if stream.read(1) != b"\n":
                    stream.write(b"\n")
            stream.write(text.encode())
            stream.flush()
            os.fsync(stream.fileno())

    def lines(self) -> list[ResultLine]:
        """All lines; the last of those with one key and measure. Incomplete lines are left out."""
        return list({(line.key, line.measure): line for line in self._read()}.values())

    def missing(self, jobs: Iterable[Job]) -> list[Job]:
        """The jobs with a measure that has no line yet, each once and reduced to such measures."""
        measured = {(line.key, line.measure) for line in self._read()}
        left = (replace(job, measures=tuple(m for m in job.measures if (job.key, m) not in measured)) for job in jobs)
        return list({job.key: job for job in left if job.measures}.values())

    def _read(self) -> Iterator[ResultLine]:
        if not self.path.exists():
            return
        try:
            raw = self.path.read_bytes().splitlines()
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror}.") from error
        for text in raw:
            try:
                yield _with_current_key(ResultLine(**json.loads(text)))
            except (ValueError, TypeError):
                continue


class Results:
    """Result lines by run and measure."""

    def __init__(self, lines: Iterable[ResultLine]) -> None:
        self._lines = {(line.key, line.measure): line for line in lines}

    def lines(self, jobs: Iterable[Job], measure: str) -> list[ResultLine]:
        """The lines of those jobs that ran."""
        return [self._lines[job.key, measure] for job in jobs if (job.key, measure) in self._lines]

    def cell(self, jobs: Iterable[Job], column: Column, paper: PaperValue | None = None) -> Cell:
        """One value of each run, and the paper's."""
        values = [value_at(line.values, column.metric) for line in self.lines(jobs, column.measure)]
        return Cell(tuple(value for value in values if value is not None), paper)


def value_at(values: Any, metric: str) -> float | None:
    """The number that the values of a run have for a metric such as `brute_force.mAP`; None where it is not finite.

    >>> value_at({"brute_force": {"mAP": 0.5}}, "brute_force.mAP"), value_at({"accuracy": math.nan}, "accuracy")
    (0.5, None)
    """
    for name in metric.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values if isinstance(values, float | int) and math.isfinite(values) else None


def _with_current_key(line: ResultLine) -> ResultLine:
    """A line of an earlier key version is identified by the job it describes, if that still exists."""
    if line.key_version == KEY_VERSION:
        return line
    try:
        return replace(line, key=line.job.key, key_version=KEY_VERSION)
    except ConfigError:
        return line
