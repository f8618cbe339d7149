"""The paper's nine experiments, and the benchmarks of more losses, of unseen classes and of unknown images."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kedge.datasets import shot_counts
from kedge.errors import ConfigError
from kedge.evaluation import retrieval_grid
from kedge.evaluation.report import TITLES
from kedge.reproduce.experiment import ACCURACY, KNN1, LOSSES, METHOD_COLUMNS, Experiment, LinesByLoss, Row, Selection
from kedge.reproduce.jobs import DataFiles, Job, Results, dataset_info, load_dataset, value_at
from kedge.reproduce.measures import UNKNOWN
from kedge.reproduce.paper import display, paper_rows, paper_speedup, paper_values
from kedge.reproduce.plots import plot_curves, plot_embeddings, plot_loss_benchmark
from kedge.reproduce.tables import Column, Table

__all__ = ["EXPERIMENTS", "select"]

_TWO_DIMENSIONS: dict[str | None, tuple[str, ...]] = {
    "cam": ("encoder.dim=2", "loss.margin=4", "loss.min_norm=1"),
    None: ("encoder.dim=2",),
}
"""The overrides of runs that are drawn in the plane, by loss; None: any other."""


class Table1(Experiment):
    """Retrieval with all training images."""

    name = "table1"
    title = "Retrieval on the full sets (Table 1)"
    columns = (
        *(METHOD_COLUMNS[0], METHOD_COLUMNS[2]),
        Column("P@20, brute force", metric="brute_force.P@20"),
        Column("P@100, brute force", metric="brute_force.P@100"),
    )
    notes = (
        "The paper's one mAP column holds two-stage search for CAM (here: label lists, whose mAP is accuracy) and "
        "brute force for the other losses.",
    )

    def rows(self, job: Job) -> list[Row]:
        """CAM's brute-force mAP is printed in the second table."""
        [(labels, columns, paper)] = super().rows(job)
        second = paper_values("two_stage", job.dataset, job.encoder, "brute_force") if job.loss == "cam" else {}
        return [(labels, columns, second | paper)]


class Table2(Experiment):
    """Brute force against two-stage search."""

    name = "table2"
    title = "Brute force and two-stage search (Table 2)"
    losses = ("cam",)
    measures = ("scores", "speed")
    labels = ("dataset", "encoder", "loss", "search")
    columns = (
        Column("mAP", metric="{list}.mAP"),
        Column("encoder and search (ms)", "ms", "low", "{search}_ms", "speed"),
        Column("search alone (ms)", "ms", "low", "{search}_search_ms", "speed"),
        Column("times faster", "times", None, "brute_force_ms/{search}_ms", "speed"),
    )
    notes = (
        "Milliseconds per query, one query at a time, the nearest 100, on the machine of the result lines. The paper's "
        "were taken on another, so that only ratios are compared: how many times faster two-stage search is, encoder "
        "included. Two-stage mAP is that of label lists, which is accuracy.",
    )
    all_methods = False

    def rows(self, job: Job) -> list[Row]:
        """One for each search."""
        rows: list[Row] = []
        for search, lists in {"brute_force": "brute_force", "two_stage": "label_lists"}.items():
            paper = paper_values("two_stage", job.dataset, job.encoder, search) if job.loss == "cam" else {}
            if search == "two_stage" and paper and (speedup := paper_speedup(job.dataset, job.encoder)):
                paper["brute_force_ms/two_stage_ms"] = speedup
            columns = (
                replace(column, metric=column.metric.format(list=lists, search=search)) for column in self.columns
            )
            rows.append(((*self.row(job), search), tuple(columns), paper))
        return rows


class Ablation(Experiment):
    """Without repeller, minimum norm or base vectors."""

    name = "ablation"
    title = "Ablation of the loss (Table 3)"
    datasets = ("svhn",)
    encoders = ("resnet18",)
    losses = ("cam",)
    labels = ("dataset", "encoder", "head", "repeller", "minimum norm", "anchors start")
    columns = (ACCURACY, *METHOD_COLUMNS)
    notes = (
        "The last printed mAP is that of two-stage search (here: label lists, whose mAP is accuracy), the others are "
        "brute force.",
        "Head none: the pooled features after their ReLU behind an ImageNet stem, as the paper most likely had them.",
    )
    all_methods = False
    HEADS: ClassVar = {"bounded": (), "none": ("encoder.head=none", "encoder.stem=imagenet")}
    ROWS: ClassVar = {
        (
            *overrides,
            *(
                f"loss.{name}={value}".lower()
                for name, value, usual in zip(("repel", "keep_norm", "init"), row, (True, True, "base"), strict=True)
                if value != usual
            ),
        ): (head, row)
        for head, overrides in HEADS.items()
        for row in paper_rows("ablation")
    }
    """Head and row of the paper by their overrides; the last row is the loss as it is."""

    def variants(self, job: Job, selection: Selection) -> Sequence[tuple[str, ...]]:  # noqa: ARG002
        """The eight rows with each head."""
        return list(self.ROWS)

    def is_specific(self, job: Job) -> bool:
        """The loss as it is is in the first table, too."""
        return bool(job.changes)

    def row(self, job: Job) -> tuple[str, ...]:
        """What is switched on."""
        head, (repel, keep_norm, init) = self.ROWS[job.changes]
        return job.dataset, job.encoder, head, "yes" if repel else "no", "yes" if keep_norm else "no", str(init)

    def rows(self, job: Job) -> list[Row]:
        """Printed for one dataset and encoder."""
        is_printed = (job.dataset, job.encoder) == (self.datasets[0], self.encoders[0])
        paper = paper_values("ablation", *self.ROWS[job.changes][1]) if is_printed else {}
        return [(self.row(job), self.columns, paper)]


class Classification(Experiment):
    """The nearest anchor as a classifier."""

    name = "classification"
    title = "Classification accuracy (Table 4)"
    encoders = ("resnet18", "resnet50")
    losses = ("cross_entropy", "cam")
    columns = (ACCURACY, KNN1)
    paper_table = "classification"
    all_methods = False


class Curves(Experiment):
    """Runs that differ in one number, and mAP over it: brute force and two-stage search in a figure each."""

    x_label: ClassVar[str]
    log2_x: ClassVar[bool] = True

    def numbers(self, dataset: str, selection: Selection) -> Sequence[int]:
        """What is compared, unless the selection says so."""
        raise NotImplementedError

    def variants(self, job: Job, selection: Selection) -> Sequence[tuple[str, ...]]:
        """One for each number."""
        return [(f"{self.sweeps}={number}",) for number in selection.sweep or self.numbers(job.dataset, selection)]

    def row(self, job: Job) -> tuple[str, ...]:
        """With the number, as in `encoder.dim=32`."""
        return job.dataset, job.encoder, job.changes[0].partition("=")[2], job.loss

    def points(self, job: Job, values: Any, selection: Selection) -> Iterable[tuple[float, Any]]:  # noqa: ARG002
        """The numbers of a run, and what was measured there."""
        return [(float(self.row(job)[2]), values)]

    def figures(self, results: Results, selection: Selection) -> dict[str, Figure]:
        """One for each search method."""
        figures = {}
        for method in ("brute_force", "label_lists"):
            curves = pd.DataFrame(
                [
                    (job.dataset, job.encoder, job.loss, x, value_at(values, f"{method}.mAP"))
                    for job in self.jobs(selection)
                    for line in results.lines([job], self.measures[-1])
                    for x, values in self.points(job, line.values, selection)
                ],
                columns=["dataset", "encoder", "loss", "x", "value"],
            )
            if not curves.empty:
                (dataset, encoder), *others = curves[["dataset", "encoder"]].drop_duplicates().to_numpy().tolist()
                recipe = selection.recipe
                title = f"{self.title}, recipe {recipe}" if others else self.caption(dataset, encoder, recipe)
                figures[f"{self.name}-{method}-{recipe}"] = plot_curves(
                    curves, x_label=self.x_label, y_label=f"mAP, {TITLES[method]}", title=title, log2_x=self.log2_x
                )
        return figures


def _largest_class(dataset: str, selection: Selection) -> int:
    return dataset_info(dataset, selection.data_files).largest_class


class Dimensions(Curves):
    """Embeddings from small to large."""

    name = "dimensions"
    title = "Size of the embedding"
    datasets = ("cifar100",)
    encoders = ("resnet50",)
    labels = ("dataset", "encoder", "dimensions", "loss")
    sweeps = "encoder.dim"
    x_label = "dimensions"

    def numbers(self, dataset: str, selection: Selection) -> Sequence[int]:  # noqa: ARG002
        """Powers of two."""
        return [32, 64, 128, 256, 512, 1024, 2048]

    def is_specific(self, job: Job) -> bool:
        """The runs that are drawn in the plane have two dimensions, too."""
        return job.changes not in _TWO_DIMENSIONS.values()


class FewShot(Curves):
    """From one image of each class to all."""

    name = "fewshot"
    title = "Few pictures of each class"
    labels = ("dataset", "encoder", "shots", "loss")
    sweeps = "split.shots"
    sweeps_to_all = True
    x_label = "images of each class"
    notes = (
        "The plateau is seen on a tenth of all training images, of which the shots are none. The last row, with all "
        "images, is the run of the first table.",
    )

    def numbers(self, dataset: str, selection: Selection) -> Sequence[int]:
        """1, 2, 4 … until all images are used."""
        return shot_counts(np.zeros(_largest_class(dataset, selection), dtype=np.int64))

    def variants(self, job: Job, selection: Selection) -> Sequence[tuple[str, ...]]:
        """As many shots as the largest class has images are all images: the run of the first table."""
        all_images = sys.maxsize if selection.sweep else _largest_class(job.dataset, selection)
        numbers = selection.sweep or self.numbers(job.dataset, selection)
        return [(f"{self.sweeps}={number}",) if number < all_images else () for number in numbers]

    def is_specific(self, job: Job) -> bool:
        """The run with all images is in the first table, too."""
        return bool(job.changes)

    def row(self, job: Job) -> tuple[str, ...]:
        """With the number of shots."""
        return super().row(job) if job.changes else (job.dataset, job.encoder, "all", job.loss)

    def points(self, job: Job, values: Any, selection: Selection) -> Iterable[tuple[float, Any]]:
        """All images are drawn at as many as the largest class has."""
        return [(float(self.row(job)[2]) if job.changes else _largest_class(job.dataset, selection), values)]


class Convergence(Curves):
    """mAP over the epochs of training."""

    name = "convergence"
    title = "mAP over epochs"
    datasets = ("cifar100",)
    encoders = ("resnet50",)
    measures = ("scores", "curve")
    x_label = "epoch"
    log2_x = False

    variants, row = Experiment.variants, Experiment.row  # no number is swept: a run has all of its curve

    def points(self, job: Job, values: Any, selection: Selection) -> Iterable[tuple[float, Any]]:  # noqa: ARG002
        """One for each epoch."""
        return [(float(epoch), measured) for epoch, measured in values.items()]


class Embeddings2d(Experiment):
    """Embeddings of two dimensions, drawn."""

    name = "embeddings2d"
    title = "Embeddings in two dimensions"
    datasets = ("svhn",)
    encoders = ("resnet18",)
    measures = ("scores", "points")

    def variants(self, job: Job, selection: Selection) -> Sequence[tuple[str, ...]]:  # noqa: ARG002
        """Two dimensions; CAM with the margin the paper takes for them."""
        return [_TWO_DIMENSIONS.get(job.loss, _TWO_DIMENSIONS[None])]

    def draw(self, by_loss: LinesByLoss, title: str, data_files: DataFiles) -> Figure:  # noqa: ARG002
        """Scatter plots and densities, of the first seed that ran."""
        values = {loss: seeds[0].values for loss, seeds in by_loss.items()}
        embeddings: dict[str, Any] = {
            loss: {
                split: (np.reshape(measured[split]["points"], (-1, 2)), np.asarray(measured[split]["labels"]))
                for split in ("train", "test")
            }
            for loss, measured in values.items()
        }
        # The anchors of other losses are means of their classes, which attracted nothing.
        anchors = {"cam": np.asarray(values["cam"]["anchors"])} if "cam" in values else {}
        return plot_embeddings(embeddings, anchors, next(iter(values.values()))["classes"], title=title)


class Qualitative(Experiment):
    """The first hits of some queries."""

    name = "qualitative"
    title = "The first hits, looked at"
    encoders = ("resnet50",)
    measures = ("scores", "hits")
    needs_images = True

    def draw(self, by_loss: LinesByLoss, title: str, data_files: DataFiles) -> Figure | None:
        """The hits of the first seed that ran, where the images are."""
        lines = {loss: seeds[0] for loss, seeds in by_loss.items()}
        first = next(iter(lines.values()))
        images = load_dataset(first.dataset, data_files, download=False)
        # Another copy of the dataset may have its images in another order.
        if images is None or not all(images.matches(line.dataset_hash) for line in lines.values()):
            return None
        hits = {display(loss): np.asarray(line.values["hits"]) for loss, line in lines.items()}
        return retrieval_grid(images, first.values["queries"], hits, title=title)


class LossBenchmark(Experiment):
    """More losses, all with the same data, encoder, recipe and budget."""

    name = "league"
    title = "League of losses"
    in_paper = False
    accepts_any_loss = True
    datasets = ("cifar100",)
    encoders = ("resnet18",)
    losses = (
        *LOSSES,
        *("contrastive_normalized", "triplet", "arcface", "cosface", "proxy_anchor", "supcon", "center"),
        "multi_similarity",
    )
    DRAWN: ClassVar = (*(METHOD_COLUMNS[place] for place in (0, 2, 4)), ACCURACY)

    def is_specific(self, job: Job) -> bool:
        """The paper's losses are everywhere."""
        return job.loss not in LOSSES

    def tables(self, results: Results, selection: Selection) -> list[Table]:
        """Scores, and ranks within each column."""
        return [each for table in super().tables(results, selection) for each in (table, table.ranks())]

    def draw(self, by_loss: LinesByLoss, title: str, data_files: DataFiles) -> Figure:  # noqa: ARG002
        """All losses side by side."""
        lines = [line for seeds in by_loss.values() for line in seeds]
        scores = {column.title: [value_at(line.values, column.metric) for line in lines] for column in self.DRAWN}
        frame = pd.DataFrame(scores, index=[line.loss for line in lines], dtype=float)
        return plot_loss_benchmark(frame, x_label="mAP, accuracy", title=title)


class Unseen(Experiment):
    """Classes that were never trained on, searched among themselves or, where the dataset says so, in a gallery."""

    name = "unseen"
    title = "Classes never trained on"
    in_paper = False
    accepts_any_loss = True
    datasets = ("cub200", "cars196", "online_products", "inshop")
    encoders = ("efficientnet_lite0",)
    losses = ("cam", "proxy_anchor", "supcon")
    measures = ("unseen",)
    columns = (
        *(
            Column(score, metric=f"embedding.{score}", measure="unseen")
            for score in ("R@1", "R@2", "R@4", "R@8", "R-precision", "MAP@R", "NMI")
        ),
        *(
            Column(f"{score}, features", metric=f"features.{score}", measure="unseen")
            for score in ("R@1", "MAP@R", "NMI")
        ),
    )
    notes = (
        "Test images among themselves, without the query (In-Shop: its queries in its gallery); by embedding and, by "
        "cosine, by the encoder's features. With recipe head the encoder is frozen: its features are raw, as before "
        "any training.",
    )
    all_methods = False

    def variants(self, job: Job, selection: Selection) -> Sequence[tuple[str, ...]]:  # noqa: ARG002
        """An encoder that is not frozen is fine-tuned alike for all losses."""
        return [() if job.config.recipe.freeze else ("recipe.optimizer.name=adamw", "recipe.optimizer.lr=1.0e-4")]


class OpenSet(Experiment):
    """Open-set detection: known images against unknown ones, by the score that says *unknown* in searches."""

    name = "open_set"
    title = "Open-set detection"
    in_paper = False
    accepts_any_loss = True
    datasets = ("cifar100", "cub200")
    encoders = ("resnet18", "efficientnet_lite0")
    measures = ("open_set",)
    labels = ("dataset", "unknown", "encoder", "loss")
    columns = tuple(
        Column(*score, measure="open_set")
        for score in (
            ("AUROC", "fraction", "high", "AUROC"),
            ("FPR at 95% TPR", "fraction", "low", "FPR@95"),
            ("OSCR", "fraction", "high", "OSCR"),
            ("accuracy", "percent", "high", "accuracy"),
        )
    )
    notes = (
        "Test images against unknown ones, by their familiarity with the training images. Unknown are the classes kept "
        "out of training or, where all are trained on, the test images of SVHN. Where all test classes are unseen, the "
        "images held out of training are the known ones; they chose the epoch, too. OSCR is at most the accuracy.",
    )
    all_methods = False

    def encoders_of(self, dataset: str) -> tuple[str, ...]:
        """Classes are kept out of training where the encoder is pretrained."""
        return self.encoders[1:] if dataset in Unseen.datasets else self.encoders[:1]

    def variants(self, job: Job, selection: Selection) -> Sequence[tuple[str, ...]]:  # noqa: ARG002
        """One, where what is unknown was not trained on."""
        if job.dataset == self.row(job)[1]:
            raise ConfigError(f"{display(UNKNOWN)} is what is unknown; keep some of its classes out: split.unseen=0.5.")
        return ((),)

    def row(self, job: Job) -> tuple[str, ...]:
        """With what is unknown."""
        has_unseen = job.dataset in Unseen.datasets or job.config.split.unseen
        return job.dataset, "unseen classes" if has_unseen else UNKNOWN, job.encoder, job.loss


EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        *(Table1(), Table2(), Ablation(), Classification(), Dimensions(), Convergence(), FewShot()),
        *(Embeddings2d(), Qualitative(), LossBenchmark(), Unseen(), OpenSet()),
    )
}


def select(names: str, selection: Selection) -> list[tuple[Experiment, Selection]]:
    """Experiments by name, with commas between, and the part of each.

    `all` stands for the paper's nine, each with the part that the paper has of the selection.
    """
    parts: dict[str, tuple[Experiment, Selection]] = {}
    for name in filter(None, map(str.strip, names.split(","))):
        if name == "all":
            of_paper = (each for each in EXPERIMENTS.values() if each.in_paper)
            own = {each.name: (each, part) for each in of_paper if (part := each.own_part(selection)) is not None}
            parts = own | parts
        elif name in EXPERIMENTS:
            parts[name] = EXPERIMENTS[name], selection
        else:
            raise ConfigError(f"Unknown experiment {name!r}; choose one of {', '.join(EXPERIMENTS)}, or all.")
    if not parts:
        raise ConfigError(f"No experiment is left; choose one of {', '.join(EXPERIMENTS)}, or all without --dataset.")
    if selection.sweep is not None and len(parts) > 1:
        raise ConfigError("--at takes dimensions or shots; choose one experiment for it.")
    return list(parts.values())
