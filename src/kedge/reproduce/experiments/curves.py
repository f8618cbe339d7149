"""The experiments that are curves: over dimensions, epochs, pictures of each class."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from matplotlib.figure import Figure

from kedge.datasets import shot_counts
from kedge.errors import DataError
from kedge.evaluation.tables import TITLES
from kedge.reproduce import figures
from kedge.reproduce.experiments.base import DRAWN, Choice, Experiment, Results, number_of, value_at
from kedge.reproduce.jobs import Job, Source, load_pictures
from kedge.reproduce.names import display
from kedge.reproduce.tables import Table

__all__ = ["Convergence", "Dimensions", "FewShot", "Sweep"]

_PER_CLASS = {"cifar100": 500, "food101": 750, "svhn": 13861, "tiny_imagenet": 500}
"""The most training pictures of a class, so that a plan needs no download."""


class Sweep(Experiment):
    """Runs that differ in one number, and curves over it."""

    number: ClassVar[str]
    """What it is called in a table."""
    x_label: ClassVar[str]
    """What it is called in a figure."""

    def numbers(self, dataset: str, choice: Choice) -> Sequence[int]:
        """All of them."""
        raise NotImplementedError

    def variants(self, job: Job, choice: Choice) -> Sequence[tuple[str, ...]]:
        """One for each number."""
        return [(f"{self.varies}={number}",) for number in choice.at or self.numbers(job.dataset, choice)]

    def tables_of(self, results: Results, choice: Choice) -> list[Table]:
        """All ways to search."""
        return [self.four_ways(results, choice, self.number)]

    def figures(self, results: Results, choice: Choice) -> dict[str, Figure]:
        """mAP over the number, brute force and two-stage apart."""
        found = {}
        for recipe, method in itertools.product(choice.recipes, DRAWN):
            series: dict[tuple[str, str], dict[str, dict[float, list[float]]]] = {}
            for (dataset, encoder, loss, changes), jobs in self.groups(replace(choice, recipes=(recipe,))).items():
                cell = results.cell(jobs, value_at((method, "mAP")))
                if cell.values:
                    panel = series.setdefault((dataset, encoder), {})
                    panel.setdefault(loss, {})[float(number_of(changes))] = list(cell.values)
            if not series:
                continue
            options: dict[str, Any] = {
                "x_label": self.x_label,
                "y_label": f"mAP, {TITLES[method]}",
                "labels": {loss: display(loss) for panel in series.values() for loss in panel},
                "log2_x": True,
            }
            if len(series) == 1:
                ((place, panel),) = series.items()
                drawn = figures.curves(panel, title=self.caption(*place, recipe), **options)
            else:
                grid = {(display(dataset), display(encoder)): panel for (dataset, encoder), panel in series.items()}
                drawn = figures.panels(grid, title=f"{self.title}, recipe {recipe}", **options)
            found[f"{self.name}-{method}-{recipe}"] = drawn
        return found


class Dimensions(Sweep):
    """Embeddings from small to large."""

    name = "dimensions"
    title = "Size of the embedding"
    datasets = ("cifar100",)
    encoders = ("resnet50",)
    varies = "encoder.dim"
    number = x_label = "dimensions"

    def numbers(self, dataset: str, choice: Choice) -> Sequence[int]:
        """Powers of two."""
        del dataset, choice
        return [32, 64, 128, 256, 512, 1024, 2048]


class Convergence(Experiment):
    """mAP while training goes on."""

    name = "convergence"
    title = "mAP over epochs"
    datasets = ("cifar100",)
    encoders = ("resnet50",)
    measures = ("scores", "curve")
    POINTS: ClassVar = 20

    def variants(self, job: Job, choice: Choice) -> Sequence[tuple[str, ...]]:
        """One that keeps weights on its way."""
        del choice
        return [(f"trainer.keep_every={max(1, int(job.config().recipe.epochs) // self.POINTS)}",)]

    def figures(self, results: Results, choice: Choice) -> dict[str, Figure]:
        """One for each dataset, encoder and way to search."""
        found = {}
        for recipe, dataset, encoder, by_loss in self.by_place(results, choice, "curve"):
            for method in DRAWN:
                panel: dict[str, dict[float, list[float]]] = {loss: {} for loss in by_loss}
                for loss, seeds in by_loss.items():
                    for epoch, values in itertools.chain.from_iterable(seed.items() for seed in seeds):
                        panel[loss].setdefault(float(epoch), []).append(values[method]["mAP"])
                found[f"{self.name}-{dataset}-{encoder}-{method}-{recipe}"] = figures.curves(
                    panel,
                    x_label="epoch",
                    y_label=f"mAP, {TITLES[method]}",
                    title=self.caption(dataset, encoder, recipe),
                    labels={loss: display(loss) for loss in panel},
                )
        return found


class FewShot(Sweep):
    """From one picture of each class to all."""

    name = "fewshot"
    title = "Few pictures of each class"
    varies = "split.shots"
    number = "shots"
    x_label = "pictures of each class"

    def numbers(self, dataset: str, choice: Choice) -> Sequence[int]:
        """1, 2, 4 … until all pictures are used."""
        return _shots(dataset, choice.sources)


def _shots(dataset: str, sources: Source) -> list[int]:
    if dataset in _PER_CLASS:
        return shot_counts(np.zeros(_PER_CLASS[dataset], dtype=np.int64))
    pictures = load_pictures(dataset, sources)
    if pictures is None:
        raise DataError(
            f"{dataset} cannot be loaded, so that nobody knows how many pictures its classes have: give --at."
        )
    return shot_counts(np.asarray(pictures.train.labels))
