"""The base class of experiments: which runs it needs, and which tables and figures are made of their results."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from matplotlib.figure import Figure

from kedge.evaluation.report import METHODS, TITLES
from kedge.reproduce.jobs import DataFiles, Job
from kedge.reproduce.names import display
from kedge.reproduce.plots import write_figure
from kedge.reproduce.results import Getter, Results
from kedge.reproduce.tables import Cell, Column, Table, write_table

__all__ = ["LOSSES", "PLOTTED_METHODS", "Experiment", "Selection", "metric", "swept_value"]

LOSSES = ("cross_entropy", "contrastive", "cam")
DATASETS = ("cifar100", "food101", "svhn", "tiny_imagenet")
ENCODERS = ("resnet18", "resnet50", "resnet101", "swin_t")

PLOTTED_METHODS = ("brute_force", "label_lists_rest_last")
"""The search methods that have a figure."""

Group = tuple[str, str, str, tuple[str, ...]]
"""Dataset, encoder, loss and changes: what the seeds of a cell share."""


@dataclass(frozen=True)
class Selection:
    """Which part of an experiment; None is all of it."""

    datasets: tuple[str, ...] | None = None
    encoders: tuple[str, ...] | None = None
    losses: tuple[str, ...] | None = None
    recipes: tuple[str, ...] = ("paper",)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    sweep: tuple[int, ...] | None = None
    """Dimensions or shots."""
    settings: tuple[str, ...] = ()
    data_files: DataFiles = field(default_factory=dict)


class Experiment:
    """A part of the paper; a subclass says which."""

    name: ClassVar[str]
    title: ClassVar[str]
    datasets: ClassVar[tuple[str, ...]] = DATASETS
    encoders: ClassVar[tuple[str, ...]] = ENCODERS
    losses: ClassVar[tuple[str, ...]] = LOSSES
    measures: ClassVar[tuple[str, ...]] = ("scores",)
    sweeps: ClassVar[str | None] = None
    """The configuration key whose values are compared, if one is."""
    needs_images: ClassVar[bool] = False
    """Whether its figures show the dataset's images."""
    accepts_any_loss: ClassVar[bool] = False
    """Whether losses that it does not name belong to it."""

    def jobs(self, selection: Selection) -> list[Job]:
        """All runs."""
        combinations = itertools.product(
            selection.recipes,
            selection.datasets or self.datasets,
            selection.encoders or self.encoders,
            selection.losses or self.losses,
            selection.seeds,
        )
        jobs = []
        for recipe, dataset, encoder, loss, seed in combinations:
            job = Job(dataset, encoder, loss, recipe, seed, settings=selection.settings, measures=self.measures)
            jobs += [replace(job, changes=changes) for changes in self.variants(job, selection)]
        return jobs

    def variants(self, job: Job, selection: Selection) -> Sequence[tuple[str, ...]]:
        """The overrides of each run with this dataset, encoder, loss and seed."""
        del job, selection
        return ((),)

    def is_specific(self, job: Job) -> bool:
        """Whether this run shows that the experiment was run, and not only another that shares the run."""
        del job
        return True

    def tables(self, results: Results, selection: Selection) -> list[Table]:
        """The tables of every recipe."""
        return [
            table
            for recipe in selection.recipes
            for table in self.recipe_tables(results, replace(selection, recipes=(recipe,)))
        ]

    def recipe_tables(self, results: Results, selection: Selection) -> list[Table]:
        """The tables of one recipe; unless a subclass has others, one of all search methods."""
        return [self.methods_table(results, selection)]

    def figures(self, results: Results, selection: Selection) -> dict[str, Figure]:
        """Figures by name; only those for which something ran."""
        del results, selection
        return {}

    def write(self, results: Results, selection: Selection, out: Path) -> tuple[list[Table], list[Path]]:
        """Write all tables and figures below `out`; the tables, and the files."""
        tables = self.tables(results, selection)
        paths = [path for table in tables for path in write_table(table, out / "tables")]
        for name, figure in self.figures(results, selection).items():
            paths += write_figure(figure, out / "figures", name)
        return tables, paths

    # ------------------------------------------------------------------ for subclasses

    def groups(self, selection: Selection) -> dict[Group, list[Job]]:
        """The seeds of each dataset, encoder, loss and variant."""
        groups: dict[Group, list[Job]] = {}
        for job in self.jobs(selection):
            groups.setdefault((job.dataset, job.encoder, job.loss, job.changes), []).append(job)
        return groups

    def table(
        self,
        selection: Selection,
        labels: Sequence[str],
        columns: Sequence[Column],
        rows: dict[tuple[str, ...], tuple[Cell | None, ...]],
        *,
        suffix: str = "",
        subtitle: str = "",
        notes: Sequence[str] = (),
    ) -> Table:
        """A table of this experiment for one recipe."""
        (recipe,) = selection.recipes
        name = "-".join(part for part in (self.name, suffix, recipe) if part)
        settings = [f"With {' '.join(selection.settings)}."] if selection.settings else []
        title = f"{self.title}{subtitle}, recipe {recipe}"
        return Table(name, title, tuple(labels), tuple(columns), rows, (*notes, *settings))

    def methods_table(self, results: Results, selection: Selection, swept: str | None = None) -> Table:
        """mAP under every search method, accuracy and 1-NN: compare losses within one column only."""
        columns = [Column(f"mAP, {TITLES[method]}") for method in METHODS]
        columns += [Column("accuracy", "percent"), Column("1-NN", "percent")]
        getters = [metric((method, "mAP")) for method in METHODS] + [metric(("accuracy",)), metric(("knn1",))]
        rows: dict[tuple[str, ...], tuple[Cell | None, ...]] = {}
        for (dataset, encoder, loss, changes), jobs in self.groups(selection).items():
            labels = (dataset, encoder, *([swept_value(changes)] if swept else []), loss)
            rows[labels] = tuple(results.cell(jobs, getter) for getter in getters)
        labels = ("dataset", "encoder", *([swept] if swept else []), "loss")
        return self.table(selection, labels, columns, rows, suffix="all", subtitle=": all ways to search")

    def by_encoder(
        self, results: Results, selection: Selection, measure: str
    ) -> Iterator[tuple[str, str, str, dict[str, list[Any]]]]:
        """Of each recipe, dataset and encoder the measurements of every loss, seed by seed; only where some ran."""
        for recipe in selection.recipes:
            measured: dict[tuple[str, str], dict[str, list[Any]]] = {}
            for (dataset, encoder, loss, _), jobs in self.groups(replace(selection, recipes=(recipe,))).items():
                if values := results.values(jobs, measure):
                    measured.setdefault((dataset, encoder), {})[loss] = values
            for (dataset, encoder), by_loss in measured.items():
                yield recipe, dataset, encoder, by_loss

    def caption(self, dataset: str, encoder: str, recipe: str) -> str:
        """The title of a figure."""
        return f"{self.title}: {display(dataset)} · {display(encoder)}, recipe {recipe}"


def metric(path: Sequence[str] | None) -> Getter:
    """A function that gets the value at the end of a path of names; None where there is none."""

    def get(values: Mapping[str, Any]) -> float | None:
        value: Any = values
        for name in path or ():
            value = value.get(name, {})
        return value if isinstance(value, float | int) else None

    return get


def swept_value(changes: Sequence[str]) -> str:
    """`encoder.dim=32` → 32."""
    return changes[0].partition("=")[2]
