"""The paper's nine experiments, and the benchmark of more losses."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from matplotlib.figure import Figure

from kedge.datasets import shot_counts
from kedge.errors import ConfigError
from kedge.evaluation import METHODS, retrieval_grid
from kedge.evaluation.report import TITLES
from kedge.reproduce.embedding_plot import plot_embeddings
from kedge.reproduce.experiment import LOSSES, PLOTTED_METHODS, Experiment, Selection, metric, swept_value
from kedge.reproduce.jobs import Job, dataset_info, load_dataset
from kedge.reproduce.names import display
from kedge.reproduce.paper import PaperValue, metric_path, paper_values
from kedge.reproduce.plots import plot_curves, plot_loss_benchmark
from kedge.reproduce.results import Results
from kedge.reproduce.tables import Cell, Column, Table

__all__ = ["EXPERIMENTS", "get_experiment"]

Rows = dict[tuple[str, ...], tuple[Cell | None, ...]]


class Table1(Experiment):
    """Retrieval with all training images."""

    name = "table1"
    title = "Retrieval on the full sets (Table 1)"
    COLUMNS: ClassVar = {
        f"mAP, {TITLES['brute_force']}": ("brute_force", "mAP"),
        f"mAP, {TITLES['label_lists_rest_last']}": ("label_lists_rest_last", "mAP"),
        "P@20, brute force": ("brute_force", "P@20"),
        "P@100, brute force": ("brute_force", "P@100"),
    }

    def recipe_tables(self, results: Results, selection: Selection) -> list[Table]:
        """As printed, and all search methods."""
        rows: Rows = {}
        for (dataset, encoder, loss, _), jobs in self.groups(selection).items():
            printed = paper_values("retrieval", dataset, encoder, loss)
            paper: dict[Any, PaperValue | None] = {
                metric_path("retrieval", name, loss): value for name, value in printed.items()
            }
            if loss == "cam":  # its brute-force mAP is printed in the second table
                paper["brute_force", "mAP"] = paper_values("two_stage", dataset, encoder, "brute_force").get("mAP")
            rows[dataset, encoder, loss] = tuple(
                results.cell(jobs, metric(path), paper.get(path)) for path in self.COLUMNS.values()
            )
        note = (
            "The paper's one mAP column holds two-stage search for CAM (here: label lists, the rest last) and brute "
            "force for the other losses."
        )
        columns = [Column(name) for name in self.COLUMNS]
        table = self.table(selection, ("dataset", "encoder", "loss"), columns, rows, notes=[note])
        return [table, self.methods_table(results, selection)]


class Table2(Experiment):
    """Brute force against two-stage search."""

    name = "table2"
    title = "Brute force and two-stage search (Table 2)"
    losses = ("cam",)
    measures = ("scores", "speed")

    def recipe_tables(self, results: Results, selection: Selection) -> list[Table]:
        """mAP and milliseconds."""
        rows: Rows = {}
        for (dataset, encoder, loss, _), jobs in self.groups(selection).items():
            for method in ("brute_force", "two_stage"):
                paper = paper_values("two_stage", dataset, encoder, method) if loss == "cam" else {}
                rows[dataset, encoder, loss, method] = (
                    results.cell(jobs, metric(metric_path("two_stage", "mAP", method)), paper.get("mAP")),
                    results.cell(jobs, metric((f"{method}_ms",)), paper.get("ms"), "speed"),
                    results.cell(jobs, metric((f"{method}_search_ms",)), None, "speed"),
                )
        columns = (
            Column("mAP"),
            Column("encoder and search (ms)", "ms", "low"),
            Column("search alone (ms)", "ms", "low"),
        )
        note = (
            "Milliseconds per query, one query at a time, the nearest 100, on the machine of the result lines; the "
            "paper's were taken on another, so that only the ratio of two rows means something."
        )
        return [self.table(selection, ("dataset", "encoder", "loss", "search"), columns, rows, notes=[note])]


class Ablation(Experiment):
    """Without repeller, minimum norm or base vectors."""

    name = "ablation"
    title = "Ablation of the loss (Table 3)"
    datasets = ("svhn",)
    encoders = ("resnet18",)
    losses = ("cam",)
    ROWS: ClassVar = tuple(itertools.product((False, True), (False, True), ("random", "base")))

    def variants(self, job: Job, selection: Selection) -> Sequence[tuple[str, ...]]:
        """The eight rows; the last is the loss as it is."""
        del job, selection
        return [self._changes(*row) for row in self.ROWS]

    def is_specific(self, job: Job) -> bool:
        """The loss as it is is in the first table, too."""
        return bool(job.changes)

    def recipe_tables(self, results: Results, selection: Selection) -> list[Table]:
        """Accuracy and all search methods."""
        rows: Rows = {}
        groups = self.groups(selection)
        places = dict.fromkeys((dataset, encoder) for dataset, encoder, _, _ in groups)
        for (dataset, encoder), row in itertools.product(places, self.ROWS):
            jobs = groups[dataset, encoder, "cam", self._changes(*row)]
            same = (dataset, encoder) == (self.datasets[0], self.encoders[0])
            paper = paper_values("ablation", *row) if same else {}
            compared = metric_path("ablation", "mAP", *row)
            cells = [results.cell(jobs, metric(("accuracy",)), paper.get("accuracy"))]
            for method in METHODS:
                path = (method, "mAP")
                cells.append(results.cell(jobs, metric(path), paper.get("mAP") if path == compared else None))
            switches = ("yes" if switch else "no" for switch in row[:2])
            rows[dataset, encoder, *switches, row[2]] = tuple(cells)
        columns = [Column("accuracy", "percent"), *(Column(f"mAP, {TITLES[method]}") for method in METHODS)]
        labels = ("dataset", "encoder", "repeller", "minimum norm", "anchors start")
        note = "The last printed mAP is that of two-stage search, the others are brute force."
        return [self.table(selection, labels, columns, rows, notes=[note])]

    @staticmethod
    def _changes(repel: bool, keep_norm: bool, init: str) -> tuple[str, ...]:
        values = {"repel": (repel, True), "keep_norm": (keep_norm, True), "init": (init, "base")}
        return tuple(f"loss.{name}={str(value).lower()}" for name, (value, usual) in values.items() if value != usual)


class Classification(Experiment):
    """The nearest anchor as a classifier."""

    name = "classification"
    title = "Classification accuracy (Table 4)"
    encoders = ("resnet18", "resnet50")
    losses = ("cross_entropy", "cam")

    def recipe_tables(self, results: Results, selection: Selection) -> list[Table]:
        """Accuracy."""
        rows: Rows = {}
        for (dataset, encoder, loss, _), jobs in self.groups(selection).items():
            paper = paper_values("classification", dataset, encoder, loss).get("accuracy")
            accuracy, knn1 = metric(("accuracy",)), metric(("knn1",))
            rows[dataset, encoder, loss] = (results.cell(jobs, accuracy, paper), results.cell(jobs, knn1))
        columns = (Column("accuracy", "percent"), Column("1-NN", "percent"))
        return [self.table(selection, ("dataset", "encoder", "loss"), columns, rows)]


class Sweep(Experiment):
    """Runs that differ in one number, and curves over it."""

    sweep_label: ClassVar[str]
    """What the number is called in a table."""
    x_label: ClassVar[str]
    """What it is called in a figure."""

    def sweep(self, dataset: str, selection: Selection) -> Sequence[int]:
        """All numbers."""
        raise NotImplementedError

    def variants(self, job: Job, selection: Selection) -> Sequence[tuple[str, ...]]:
        """One for each number."""
        return [(f"{self.sweeps}={number}",) for number in selection.sweep or self.sweep(job.dataset, selection)]

    def recipe_tables(self, results: Results, selection: Selection) -> list[Table]:
        """All search methods."""
        return [self.methods_table(results, selection, self.sweep_label)]

    def figures(self, results: Results, selection: Selection) -> dict[str, Figure]:
        """mAP over the number, brute force and two-stage separately."""
        figures = {}
        for recipe, method in itertools.product(selection.recipes, PLOTTED_METHODS):
            panels: dict[tuple[str, str], dict[str, dict[float, list[float]]]] = {}
            for (dataset, encoder, loss, changes), jobs in self.groups(replace(selection, recipes=(recipe,))).items():
                cell = results.cell(jobs, metric((method, "mAP")))
                if cell.values:
                    curves = panels.setdefault((dataset, encoder), {})
                    curves.setdefault(loss, {})[float(swept_value(changes))] = list(cell.values)
            if panels:
                place = next(iter(panels))
                title = self.caption(*place, recipe) if len(panels) == 1 else f"{self.title}, recipe {recipe}"
                figures[f"{self.name}-{method}-{recipe}"] = plot_curves(
                    panels, x_label=self.x_label, y_label=f"mAP, {TITLES[method]}", title=title, log2_x=True
                )
        return figures


class Dimensions(Sweep):
    """Embeddings from small to large."""

    name = "dimensions"
    title = "Size of the embedding"
    datasets = ("cifar100",)
    encoders = ("resnet50",)
    sweeps = "encoder.dim"
    sweep_label = x_label = "dimensions"

    def sweep(self, dataset: str, selection: Selection) -> Sequence[int]:
        """Powers of two."""
        del dataset, selection
        return [32, 64, 128, 256, 512, 1024, 2048]


class Convergence(Experiment):
    """mAP over the epochs of training."""

    name = "convergence"
    title = "mAP over epochs"
    datasets = ("cifar100",)
    encoders = ("resnet50",)
    measures = ("scores", "curve")
    POINTS: ClassVar = 20

    def variants(self, job: Job, selection: Selection) -> Sequence[tuple[str, ...]]:
        """One that keeps checkpoints on its way."""
        del selection
        return [(f"trainer.keep_every={max(1, int(job.config.recipe.epochs) // self.POINTS)}",)]

    def figures(self, results: Results, selection: Selection) -> dict[str, Figure]:
        """One for each dataset, encoder and search method."""
        figures = {}
        for recipe, dataset, encoder, by_loss in self.by_encoder(results, selection, "curve"):
            for method in PLOTTED_METHODS:
                curves: dict[str, dict[float, list[float]]] = {loss: {} for loss in by_loss}
                for loss, seeds in by_loss.items():
                    for epoch, values in itertools.chain.from_iterable(seed.items() for seed in seeds):
                        curves[loss].setdefault(float(epoch), []).append(values[method]["mAP"])
                figures[f"{self.name}-{dataset}-{encoder}-{method}-{recipe}"] = plot_curves(
                    {(dataset, encoder): curves},
                    x_label="epoch",
                    y_label=f"mAP, {TITLES[method]}",
                    title=self.caption(dataset, encoder, recipe),
                )
        return figures


class FewShot(Sweep):
    """From one image of each class to all."""

    name = "fewshot"
    title = "Few pictures of each class"
    sweeps = "split.shots"
    sweep_label = "shots"
    x_label = "images of each class"

    def sweep(self, dataset: str, selection: Selection) -> Sequence[int]:
        """1, 2, 4 … until all images are used."""
        largest = dataset_info(dataset, selection.data_files).largest_class
        return shot_counts(np.zeros(largest, dtype=np.int64))


class Embeddings2d(Experiment):
    """Embeddings of two dimensions, drawn."""

    name = "embeddings2d"
    title = "Embeddings in two dimensions"
    datasets = ("svhn",)
    encoders = ("resnet18",)
    measures = ("scores", "points")

    def variants(self, job: Job, selection: Selection) -> Sequence[tuple[str, ...]]:
        """Two dimensions; CAM with the margin the paper takes for them."""
        del selection
        return [("encoder.dim=2", *(["loss.margin=4", "loss.min_norm=1"] if job.loss == "cam" else []))]

    def figures(self, results: Results, selection: Selection) -> dict[str, Figure]:
        """Scatter plots and densities, of the first seed that ran."""
        figures = {}
        for recipe, dataset, encoder, by_loss in self.by_encoder(results, selection, "points"):
            embeddings: dict[str, Any] = {}
            anchors: dict[str, Any] = {}
            for loss, (first, *_) in by_loss.items():
                embeddings[loss] = {
                    split: (np.reshape(first[split]["points"], (-1, 2)), np.asarray(first[split]["labels"]))
                    for split in ("train", "test")
                }
                # The anchors of other losses are means of their classes, which attracted nothing.
                anchors[loss] = np.asarray(first["anchors"]) if loss == "cam" and first["anchors"] else None
            classes = next(iter(by_loss.values()))[0]["classes"]
            title = self.caption(dataset, encoder, recipe)
            figures[f"{self.name}-{dataset}-{encoder}-{recipe}"] = plot_embeddings(
                embeddings, anchors, classes, title=title
            )
        return figures


class Qualitative(Experiment):
    """The first hits of some queries."""

    name = "qualitative"
    title = "The first hits, looked at"
    encoders = ("resnet50",)
    measures = ("scores", "hits")
    needs_images = True

    def figures(self, results: Results, selection: Selection) -> dict[str, Figure]:
        """One for each dataset and encoder, of the first seed that ran; needs the images."""
        figures = {}
        for recipe, dataset, encoder, by_loss in self.by_encoder(results, selection, "hits"):
            images = load_dataset(dataset, selection.data_files, download=False)
            # Another copy of the dataset may have its images in another order.
            if images is None or images.fingerprint() not in results.dataset_hashes("hits"):
                continue
            queries = next(iter(by_loss.values()))[0]["queries"]
            hits = {display(loss): np.asarray(first["hits"]) for loss, (first, *_) in by_loss.items()}
            title = self.caption(dataset, encoder, recipe)
            figures[f"{self.name}-{dataset}-{encoder}-{recipe}"] = retrieval_grid(images, queries, hits, title=title)
        return figures


class LossBenchmark(Experiment):
    """More losses, all with the same data, encoder, recipe and budget."""

    name = "league"
    title = "League of losses"
    accepts_any_loss = True
    datasets = ("cifar100",)
    encoders = ("resnet18",)
    losses = (
        *LOSSES,
        *("triplet", "arcface", "cosface", "proxy_anchor", "supcon", "center", "multi_similarity"),
    )

    def is_specific(self, job: Job) -> bool:
        """The paper's losses are everywhere."""
        return job.loss not in LOSSES

    def recipe_tables(self, results: Results, selection: Selection) -> list[Table]:
        """Scores, and ranks within each column."""
        table = self.methods_table(results, selection)
        return [table, table.ranks()]

    def figures(self, results: Results, selection: Selection) -> dict[str, Figure]:
        """All losses side by side."""
        figures = {}
        paths = {f"mAP, {TITLES[name]}": (name, "mAP") for name in ("brute_force", "label_lists", "anchor_lists")}
        getters = {title: metric(path) for title, path in paths.items()} | {"accuracy": metric(("accuracy",))}
        for recipe, dataset, encoder, by_loss in self.by_encoder(results, selection, "scores"):
            losses = {
                loss: [[value for seed in seeds if (value := getter(seed)) is not None] for getter in getters.values()]
                for loss, seeds in by_loss.items()
            }
            figures[f"{self.name}-{dataset}-{encoder}-{recipe}"] = plot_loss_benchmark(
                losses, list(getters), x_label="mAP, accuracy", title=self.caption(dataset, encoder, recipe)
            )
        return figures


EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        Table1(),
        Table2(),
        Ablation(),
        Classification(),
        Dimensions(),
        Convergence(),
        FewShot(),
        Embeddings2d(),
        Qualitative(),
        LossBenchmark(),
    )
}


def get_experiment(name: str) -> Experiment:
    """The experiment with this name."""
    if name not in EXPERIMENTS:
        raise ConfigError(f"There is no experiment {name!r}: take one of {', '.join(EXPERIMENTS)}.")
    return EXPERIMENTS[name]
