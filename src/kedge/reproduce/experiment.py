"""The base class of experiments: which runs it needs, and which tables and figures are made of their results."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from matplotlib.figure import Figure

from kedge.evaluation.report import METHODS, TITLES
from kedge.reproduce.jobs import DataFiles, Job
from kedge.reproduce.paper import PaperValue, display
from kedge.reproduce.plots import write_figure
from kedge.reproduce.results import Column, ResultLine, Results
from kedge.reproduce.tables import Rows, Table, write_table

__all__ = ["ACCURACY", "KNN1", "LOSSES", "METHOD_COLUMNS", "Experiment", "LinesByLoss", "Selection"]

LOSSES = ("cross_entropy", "contrastive", "cam")

METHOD_COLUMNS = tuple(Column(f"mAP, {TITLES[method]}", metric=f"{method}.mAP") for method in METHODS)
"""mAP under every search method: compare losses within one column only."""
ACCURACY = Column("accuracy", "percent", metric="accuracy")
KNN1 = Column("1-NN", "percent", metric="knn1")
ALL_COLUMNS = (*METHOD_COLUMNS, ACCURACY, KNN1)

LinesByLoss = dict[str, list[ResultLine]]
"""Of each loss a line for every seed."""


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
    datasets: ClassVar[tuple[str, ...]] = ("cifar100", "food101", "svhn", "tiny_imagenet")
    encoders: ClassVar[tuple[str, ...]] = ("resnet18", "resnet50", "resnet101", "swin_t")
    losses: ClassVar[tuple[str, ...]] = LOSSES
    measures: ClassVar[tuple[str, ...]] = ("scores",)
    sweeps: ClassVar[str | None] = None
    """The configuration key whose values are compared, if one is."""
    needs_images: ClassVar[bool] = False
    """Whether its figures show the dataset's images."""
    accepts_any_loss: ClassVar[bool] = False
    """Whether losses that it does not name belong to it."""
    labels: ClassVar[tuple[str, ...]] = ("dataset", "encoder", "loss")
    """What its rows are labelled by."""
    columns: ClassVar[tuple[Column, ...]] = ()
    """The columns of the paper's table, if it has one."""
    notes: ClassVar[tuple[str, ...]] = ()
    all_methods: ClassVar[bool] = True
    """Whether it has a table of all search methods."""

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

    def row(self, job: Job) -> tuple[str, ...]:
        """The labels of the row of a run."""
        return job.dataset, job.encoder, job.loss

    def paper(self, job: Job) -> dict[str, PaperValue]:
        """What the paper prints of a run, by metric."""
        del job
        return {}

    def tables(self, results: Results, selection: Selection) -> list[Table]:
        """For every recipe the paper's table and that of all search methods."""
        tables = []
        for part in (replace(selection, recipes=(recipe,)) for recipe in selection.recipes):
            if self.columns:
                tables.append(self._table(part, "", "", self.columns, self.rows(results, part), self.notes))
            if self.all_methods:
                rows: Rows = {
                    self.row(job): tuple(results.cell(seeds, column) for column in ALL_COLUMNS)
                    for job, seeds in self.groups(part).items()
                }
                tables.append(self._table(part, "-all", ": all ways to search", ALL_COLUMNS, rows))
        return tables

    def rows(self, results: Results, selection: Selection) -> Rows:
        """The rows of the paper's table: a cell for each of `columns`, beside what the paper prints."""
        rows: Rows = {}
        for job, seeds in self.groups(selection).items():
            paper = self.paper(job)
            rows[self.row(job)] = tuple(results.cell(seeds, one, paper.get(one.metric)) for one in self.columns)
        return rows

    def figures(self, results: Results, selection: Selection) -> dict[str, Figure]:
        """Figures by name: one for each recipe, dataset and encoder of which something ran, if it draws any."""
        lines: dict[tuple[str, str, str], LinesByLoss] = {}
        for job, seeds in self.groups(selection).items():
            if measured := results.lines(seeds, self.measures[-1]):
                lines.setdefault((job.dataset, job.encoder, job.recipe), {})[job.loss] = measured
        drawn = {
            "-".join([self.name, *place]): self.draw(by_loss, self.caption(*place), selection.data_files)
            for place, by_loss in lines.items()
        }
        return {name: figure for name, figure in drawn.items() if figure is not None}

    def draw(self, by_loss: LinesByLoss, title: str, data_files: DataFiles) -> Figure | None:
        """The figure of what was last measured of each loss, seed by seed; None where there is nothing to draw."""
        del by_loss, title, data_files
        return None

    def write(self, results: Results, selection: Selection, out: Path) -> tuple[list[Table], list[Path]]:
        """Write all tables and figures below `out`; the tables, and the files."""
        tables = self.tables(results, selection)
        paths = [path for table in tables for path in write_table(table, out / "tables")]
        for name, figure in self.figures(results, selection).items():
            paths += write_figure(figure, out / "figures", name)
        return tables, paths

    def groups(self, selection: Selection) -> dict[Job, list[Job]]:
        """Runs that differ in nothing but their seed, by the job with seed 0."""
        groups: dict[Job, list[Job]] = {}
        for job in self.jobs(selection):
            groups.setdefault(replace(job, seed=0), []).append(job)
        return groups

    def _table(
        self,
        selection: Selection,
        suffix: str,
        subtitle: str,
        columns: tuple[Column, ...],
        rows: Rows,
        notes: Sequence[str] = (),
    ) -> Table:
        (recipe,) = selection.recipes
        settings = [f"With {' '.join(selection.settings)}."] if selection.settings else []
        title = f"{self.title}{subtitle}, recipe {recipe}"
        return Table(f"{self.name}{suffix}-{recipe}", title, self.labels, columns, rows, (*notes, *settings))

    def caption(self, dataset: str, encoder: str, recipe: str) -> str:
        """The title of a figure."""
        return f"{self.title}: {display(dataset)} · {display(encoder)}, recipe {recipe}"
