"""The base class of experiments: which runs it needs, and which tables and figures are made of their results."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from matplotlib.figure import Figure

from kedge.evaluation.report import METHODS, TITLES
from kedge.reproduce.jobs import DataFiles, Job, ResultLine, Results
from kedge.reproduce.paper import PaperTable, PaperValue, display, paper_values
from kedge.reproduce.plots import write_figure
from kedge.reproduce.tables import Column, Rows, Table, write_table

__all__ = ["ACCURACY", "KNN1", "LOSSES", "METHOD_COLUMNS", "Experiment", "LinesByLoss", "Row", "Selection"]

LOSSES = ("cross_entropy", "contrastive", "cam")

METHOD_COLUMNS = tuple(Column(f"mAP, {TITLES[method]}", metric=f"{method}.mAP") for method in METHODS)
"""mAP under every search method: compare losses within one column only."""
ACCURACY = Column("accuracy", "percent", metric="accuracy")
KNN1 = Column("1-NN", "percent", metric="knn1")
ALL_COLUMNS = (*METHOD_COLUMNS, ACCURACY, KNN1)

LinesByLoss = dict[str, list[ResultLine]]
"""Of each loss a line for every seed."""
Row = tuple[tuple[str, ...], tuple[Column, ...], dict[str, PaperValue]]
"""Labels, columns, and what the paper prints by metric."""


@dataclass(frozen=True)
class Selection:
    """Which part of an experiment; None is all of it."""

    datasets: tuple[str, ...] | None = None
    encoders: tuple[str, ...] | None = None
    losses: tuple[str, ...] | None = None
    recipe: str = "paper"
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
    sweeps_to_all: ClassVar[bool] = False
    """Whether a run without that key is the last of the comparison; `sys.maxsize` in a selection stands for it."""
    needs_images: ClassVar[bool] = False
    """Whether its figures show the dataset's images."""
    in_paper: ClassVar[bool] = True
    """Whether it is one of the paper's."""
    accepts_any_loss: ClassVar[bool] = False
    """Whether losses that it does not name belong to it."""
    labels: ClassVar[tuple[str, ...]] = ("dataset", "encoder", "loss")
    """What its rows are labelled by."""
    columns: ClassVar[tuple[Column, ...]] = ()
    """The columns of the paper's table, if it has one."""
    paper_table: ClassVar[PaperTable] = "retrieval"
    notes: ClassVar[tuple[str, ...]] = ()
    all_methods: ClassVar[bool] = True
    """Whether it has a table of all search methods."""

    def own_part(self, selection: Selection) -> Selection | None:
        """What of a selection this experiment has by itself; None if nothing."""
        pairs = zip(
            (self.datasets, self.encoders, self.losses),
            (selection.datasets, selection.encoders, selection.losses),
            strict=True,
        )
        datasets, encoders, losses = (
            tuple(name for name in own if chosen is None or name in chosen) for own, chosen in pairs
        )
        if not (datasets and encoders and losses):
            return None
        return replace(selection, datasets=datasets, encoders=encoders, losses=losses)

    def encoders_of(self, dataset: str) -> tuple[str, ...]:  # noqa: ARG002
        """The encoders that are trained on a dataset, unless the selection names others."""
        return self.encoders

    def jobs(self, selection: Selection) -> list[Job]:
        """All runs."""
        pairs = (
            (dataset, encoder)
            for dataset in selection.datasets or self.datasets
            for encoder in selection.encoders or self.encoders_of(dataset)
        )
        jobs = []
        for (dataset, encoder), loss, seed in itertools.product(
            pairs, selection.losses or self.losses, selection.seeds
        ):
            job = Job(dataset, encoder, loss, selection.recipe, seed, (), selection.settings, self.measures)
            jobs += [replace(job, changes=changes) for changes in self.variants(job, selection)]
        return jobs

    def groups(self, selection: Selection) -> dict[Job, list[Job]]:
        """Runs that differ in nothing but their seed, by the job with seed 0."""
        groups: dict[Job, list[Job]] = {}
        for job in self.jobs(selection):
            groups.setdefault(replace(job, seed=0), []).append(job)
        return groups

    def epochs(self, selection: Selection) -> str:
        """How long its runs are, in words."""
        lengths = {int(job.config.recipe.epochs) for job in self.groups(selection)}
        return " to ".join(map(str, sorted({min(lengths), max(lengths)}))) + " epochs"

    def variants(self, job: Job, selection: Selection) -> Sequence[tuple[str, ...]]:  # noqa: ARG002
        """The overrides of each run with this dataset, encoder, loss and seed."""
        return ((),)

    def is_specific(self, job: Job) -> bool:  # noqa: ARG002
        """Whether this run shows that the experiment was run, and not only another that shares the run."""
        return True

    def row(self, job: Job) -> tuple[str, ...]:
        """The labels of the row of a run."""
        return job.dataset, job.encoder, job.loss

    def rows(self, job: Job) -> list[Row]:
        """The rows of a run in the paper's table."""
        return [(self.row(job), self.columns, paper_values(self.paper_table, job.dataset, job.encoder, job.loss))]

    def tables(self, results: Results, selection: Selection) -> list[Table]:
        """The paper's table, and that of all search methods."""
        paper: Rows = {}
        every: Rows = {}
        for job, seeds in self.groups(selection).items():
            for labels, columns, values in self.rows(job):
                paper[labels] = tuple(results.cell(seeds, column, values.get(column.metric)) for column in columns)
            every[self.row(job)] = tuple(results.cell(seeds, column) for column in ALL_COLUMNS)
        settings = (f"With {' '.join(selection.settings)}.",) if selection.settings else ()
        tables, recipe = [], f"recipe {selection.recipe}, {self.epochs(selection)}"
        if self.columns:
            name, notes = f"{self.name}-{selection.recipe}", (*self.notes, *settings)
            tables.append(Table(name, f"{self.title}, {recipe}", self.labels, self.columns, paper, notes))
        if self.all_methods:
            name, title = f"{self.name}-all-{selection.recipe}", f"{self.title}: all ways to search, {recipe}"
            notes = settings if self.columns else (*self.notes, *settings)
            tables.append(Table(name, title, self.labels, ALL_COLUMNS, every, notes))
        return tables

    def figures(self, results: Results, selection: Selection) -> dict[str, Figure]:
        """Figures by name: one for each dataset and encoder of which something ran, if it draws any."""
        lines: dict[tuple[str, str, str], LinesByLoss] = {}
        for job, seeds in self.groups(selection).items():
            if measured := results.lines(seeds, self.measures[-1]):
                lines.setdefault((job.dataset, job.encoder, job.recipe), {})[job.loss] = measured
        drawn = {
            "-".join([self.name, *place]): self.draw(by_loss, self.caption(*place), selection.data_files)
            for place, by_loss in lines.items()
        }
        return {name: figure for name, figure in drawn.items() if figure is not None}

    def draw(self, by_loss: LinesByLoss, title: str, data_files: DataFiles) -> Figure | None:  # noqa: ARG002
        """The figure of what was last measured of each loss, seed by seed; None where there is nothing to draw."""
        return None

    def caption(self, dataset: str, encoder: str, recipe: str) -> str:
        """The title of a figure."""
        return f"{self.title}: {display(dataset)} · {display(encoder)}, recipe {recipe}"

    def write(self, results: Results, selection: Selection, out: Path) -> tuple[list[Table], list[Path]]:
        """Write all tables and figures below `out`; the tables, and the files."""
        tables = self.tables(results, selection)
        paths = [path for table in tables for path in write_table(table, out / "tables")]
        for name, figure in self.figures(results, selection).items():
            paths += write_figure(figure, out / "figures", name)
        return tables, paths
