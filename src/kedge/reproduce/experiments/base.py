"""What every experiment is: a set of runs, and what is made of their results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from matplotlib.figure import Figure

from kedge.evaluation import METHODS
from kedge.evaluation.tables import TITLES
from kedge.reproduce import printed
from kedge.reproduce.cells import Cell
from kedge.reproduce.jobs import Job, Source
from kedge.reproduce.names import display
from kedge.reproduce.store import Line
from kedge.reproduce.tables import Column, Row, Table

__all__ = ["DRAWN", "LOSSES", "Choice", "Experiment", "Results", "notes_of", "number_of", "value_at"]

LOSSES = ("cross_entropy", "contrastive", "cam")
DATASETS = ("cifar100", "food101", "svhn", "tiny_imagenet")
ENCODERS = ("resnet18", "resnet50", "resnet101", "swin_t")

DRAWN = ("brute_force", "label_lists_rest_last")
"""The ways to search that have a curve."""

Find = Callable[[Mapping[str, Any]], float | None]


@dataclass(frozen=True)
class Choice:
    """Which part of an experiment; None is all of it."""

    datasets: tuple[str, ...] | None = None
    encoders: tuple[str, ...] | None = None
    losses: tuple[str, ...] | None = None
    recipes: tuple[str, ...] = ("paper",)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    at: tuple[int, ...] | None = None
    """Dimensions or shots."""
    settings: tuple[str, ...] = ()
    sources: Source = field(default_factory=dict)


class Results:
    """Lines by run and measure."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self._lines = {(line.key, line.measure): line for line in lines}

    def values(self, jobs: Iterable[Job], measure: str) -> list[Any]:
        """What was measured of those jobs that ran."""
        return [line.values for job in jobs if (line := self._lines.get((job.key, measure))) is not None]

    def datasets(self, measure: str) -> set[str]:
        """The hashes of the datasets of which it was measured."""
        return {line.dataset_hash for (_, name), line in self._lines.items() if name == measure}

    def cell(
        self, jobs: Iterable[Job], find: Find, known: printed.Printed | None = None, measure: str = "scores"
    ) -> Cell:
        """One value of each run."""
        found = [find(values) for values in self.values(jobs, measure)]
        return Cell(tuple(value for value in found if value is not None), known)


class Experiment:
    """Part of the paper; a subclass says which."""

    name: ClassVar[str]
    title: ClassVar[str]
    datasets: ClassVar[tuple[str, ...]] = DATASETS
    encoders: ClassVar[tuple[str, ...]] = ENCODERS
    losses: ClassVar[tuple[str, ...]] = LOSSES
    measures: ClassVar[tuple[str, ...]] = ("scores",)
    varies: ClassVar[str | None] = None
    """The setting whose numbers are compared, if one is."""
    shows_pictures: ClassVar[bool] = False
    """Whether its figures can only be drawn where the dataset's pictures are."""
    open_to_others: ClassVar[bool] = False
    """Whether losses that it does not name belong to it."""

    def jobs(self, choice: Choice) -> list[Job]:
        """All runs."""
        combinations = itertools.product(
            choice.recipes,
            choice.datasets or self.datasets,
            choice.encoders or self.encoders,
            choice.losses or self.losses,
            choice.seeds,
        )
        found = []
        for recipe, dataset, encoder, loss, seed in combinations:
            job = Job(dataset, encoder, loss, recipe, seed, settings=choice.settings, measures=self.measures)
            found += [replace(job, changes=changes) for changes in self.variants(job, choice)]
        return found

    def variants(self, job: Job, choice: Choice) -> Sequence[tuple[str, ...]]:
        """The overrides of each run with this dataset, encoder, loss and seed."""
        del job, choice
        return ((),)

    def tells(self, job: Job) -> bool:
        """Whether this run shows that the experiment was meant, and not only another that shares the run."""
        del job
        return True

    def tables(self, results: Results, choice: Choice) -> list[Table]:
        """For every recipe."""
        return [
            table for recipe in choice.recipes for table in self.tables_of(results, replace(choice, recipes=(recipe,)))
        ]

    def tables_of(self, results: Results, choice: Choice) -> list[Table]:
        """For one recipe; if a subclass does not say otherwise, all ways to search."""
        return [self.four_ways(results, choice)]

    def figures(self, results: Results, choice: Choice) -> dict[str, Figure]:
        """By name; only those for which something ran."""
        del results, choice
        return {}

    # ------------------------------------------------------------------ what several have in common

    def groups(self, choice: Choice) -> dict[tuple[str, str, str, tuple[str, ...]], list[Job]]:
        """The seeds of each dataset, encoder, loss and variant."""
        found: dict[tuple[str, str, str, tuple[str, ...]], list[Job]] = {}
        for job in self.jobs(choice):
            found.setdefault((job.dataset, job.encoder, job.loss, job.changes), []).append(job)
        return found

    def four_ways(self, results: Results, choice: Choice, variant: str | None = None) -> Table:
        """mAP under every way to search, accuracy and 1-NN: what may be compared is one column."""
        columns = [Column(f"mAP, {TITLES[method]}") for method in METHODS]
        columns += [Column("accuracy", "percent"), Column("1-NN", "percent")]
        finds = [value_at((method, "mAP")) for method in METHODS] + [value_at(("accuracy",)), value_at(("knn1",))]
        rows = []
        for (dataset, encoder, loss, changes), jobs in self.groups(choice).items():
            labels = [dataset, encoder, *([number_of(changes)] if variant else []), loss]
            rows.append(Row(tuple(labels), tuple(results.cell(jobs, find) for find in finds)))
        stub = ("dataset", "encoder", *([variant] if variant else []), "loss")
        title = f"{self.title}: all ways to search, recipe {choice.recipes[0]}"
        return Table(self._name("all", choice), title, stub, tuple(columns), tuple(rows), notes_of(choice))

    def _name(self, what: str, choice: Choice) -> str:
        return "-".join(part for part in (self.name, what, choice.recipes[0]) if part)

    def by_place(
        self, results: Results, choice: Choice, measure: str
    ) -> Iterator[tuple[str, str, str, dict[str, list[Any]]]]:
        """Of each recipe, dataset and encoder what was measured of every loss, seed by seed; only where some ran."""
        for recipe in choice.recipes:
            found: dict[tuple[str, str], dict[str, list[Any]]] = {}
            for (dataset, encoder, loss, _), jobs in self.groups(replace(choice, recipes=(recipe,))).items():
                if measured := results.values(jobs, measure):
                    found.setdefault((dataset, encoder), {})[loss] = measured
            for (dataset, encoder), by_loss in found.items():
                yield recipe, dataset, encoder, by_loss

    def caption(self, dataset: str, encoder: str, recipe: str) -> str:
        """What a figure shows."""
        return f"{self.title}: {display(dataset)} · {display(encoder)}, recipe {recipe}"


def value_at(path: Sequence[str] | None) -> Find:
    """The value at the end of a path of names; None where there is none."""

    def find(values: Mapping[str, Any]) -> float | None:
        found: Any = values
        for name in path or ():
            found = found.get(name, {})
        return found if isinstance(found, float | int) else None

    return find


def number_of(changes: Sequence[str]) -> str:
    """`encoder.dim=32` → 32."""
    return changes[0].partition("=")[2]


def notes_of(choice: Choice) -> tuple[str, ...]:
    """What a reader of its tables should know."""
    return (f"With {' '.join(choice.settings)}.",) if choice.settings else ()
