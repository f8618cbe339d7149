"""Results: one JSON line for each measurement of a run, in a file that several processes append to."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock

from kedge.errors import ConfigError, DataError
from kedge.reproduce.jobs import KEY_VERSION, Job
from kedge.reproduce.paper import PaperValue

__all__ = [
    "DECIMALS",
    "Cell",
    "Column",
    "ResultLine",
    "ResultStore",
    "Results",
    "Unit",
    "Verdict",
    "format_value",
    "value_at",
]

Unit = Literal["fraction", "percent", "ms", "rank"]
"""How a number is written: .790, 79.00%, 6.40 or 1."""
DECIMALS: dict[Unit, int] = {"fraction": 3, "percent": 4, "ms": 2, "rank": 0}
Verdict = Literal["above", "within", "below"]


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
        description = {name: value for name, value in job.to_json().items() if name != "measures"}
        lists = {name: list(description[name]) for name in ("changes", "settings")}
        return cls(key=job.key, key_version=KEY_VERSION, measure=measure, **description | lists, **rest)

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
            stream.seek(0, os.SEEK_END)
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
        """The jobs with a measure that has no line yet, reduced to such measures."""
        measured = {(line.key, line.measure) for line in self._read()}
        left = (replace(job, measures=tuple(m for m in job.measures if (job.key, m) not in measured)) for job in jobs)
        return [job for job in left if job.measures]

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


@dataclass(frozen=True)
class Cell:
    """The values of one metric, one per seed (none: it was not run), and the paper's value if it prints one."""

    values: tuple[float, ...]
    paper: PaperValue | None = None

    @property
    def mean(self) -> float | None:
        """The mean over seeds."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def std(self) -> float | None:
        """The sample standard deviation (n - 1); None for fewer than two seeds."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def verdict(self) -> Verdict | None:
        """Our mean against the paper's mean ± two standard deviations; None without one or the other.

        Our mean is first rounded to the printed decimals. So where the paper prints no deviation, as in its ablation,
        or one of .000, ours is within if it would be printed as the same number.

        >>> Cell((0.6319,), PaperValue(0.622, 0.005)).verdict, Cell((0.9664,), PaperValue(0.967)).verdict
        ('within', 'below')
        """
        if self.mean is None or self.paper is None:
            return None
        # Whole units of the last printed digit: differences of decimals as floats would miss equality.
        scale = 10**self.paper.digits
        gap = round(round(self.mean, self.paper.digits) * scale) - round(self.paper.mean * scale)
        bound = 2 * round((self.paper.std or 0.0) * scale)
        return "within" if abs(gap) <= bound else "above" if gap > 0 else "below"

    def text(self, unit: Unit = "fraction") -> str:
        """Mean and standard deviation, or that it was not run.

        >>> Cell((0.784, 0.790, 0.796)).text(), Cell((0.79,)).text(), Cell((6.4,)).text("ms"), Cell(()).text()
        ('.790 ± .006', '.790', '6.40', 'not run')
        """
        return "not run" if self.mean is None else format_value(self.mean, self.std, unit)


@dataclass(frozen=True)
class Column:
    """One metric of every row; `better` is None where no value is better than another."""

    title: str
    unit: Unit = "fraction"
    better: Literal["high", "low"] | None = "high"
    metric: str = ""
    """Where the values of a run have it: `brute_force.mAP`."""
    measure: str = "scores"
    """The measure whose values have it."""


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
    """The number that the values of a run have for a metric such as `brute_force.mAP`; None where they have none.

    >>> value_at({"brute_force": {"mAP": 0.5}}, "brute_force.mAP"), value_at({}, "accuracy")
    (0.5, None)
    """
    for name in metric.split("."):
        values = values.get(name, {})
    return values if isinstance(values, float | int) else None


def format_value(mean: float, std: float | None, unit: Unit = "fraction", decimals: int | None = None) -> str:
    """Mean ± standard deviation; `decimals` are those of the fraction where the unit is percent.

    >>> format_value(0.64, 0.008), format_value(0.9641, None, "percent")
    ('.640 ± .008', '96.41%')
    """
    decimals = DECIMALS[unit] if decimals is None else decimals

    def number(value: float) -> str:
        value = round(value, decimals) + 0.0  # adding zero takes the sign off a negative zero
        if unit == "percent":
            return f"{100 * value:.{max(0, decimals - 2)}f}"
        text = f"{value:.{decimals}f}"
        return text.replace("0.", ".", 1) if unit == "fraction" and abs(value) < 1 else text

    sign = "%" if unit == "percent" else ""
    return number(mean) + sign + ("" if std is None else f" ± {number(std)}")


def _with_current_key(line: ResultLine) -> ResultLine:
    """A line of an earlier key version is identified by the job it describes, if that still exists."""
    if line.key_version == KEY_VERSION:
        return line
    try:
        return replace(line, key=line.job.key, key_version=KEY_VERSION)
    except ConfigError:
        return line
