"""The paper's nine experiments and the league: which runs each needs, and what is made of their results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from matplotlib.figure import Figure

from kedge.datasets import shot_counts
from kedge.errors import ConfigError, DataError
from kedge.evaluation import METHODS, retrieval_grid
from kedge.evaluation.tables import TITLES
from kedge.reproduce import figures, printed
from kedge.reproduce.cells import Cell
from kedge.reproduce.jobs import Job, Source, load_pictures
from kedge.reproduce.names import display
from kedge.reproduce.store import Line
from kedge.reproduce.tables import Column, Row, Table, ranks

__all__ = ["EXPERIMENTS", "Choice", "Experiment", "Results", "experiment"]

LOSSES = ("cross_entropy", "contrastive", "cam")
DATASETS = ("cifar100", "food101", "svhn", "tiny_imagenet")
ENCODERS = ("resnet18", "resnet50", "resnet101", "swin_t")
_PER_CLASS = {"cifar100": 500, "food101": 750, "svhn": 13861, "tiny_imagenet": 500}
"""The most training pictures of a class, so that a plan needs no download."""

_DRAWN = ("brute_force", "label_lists_rest_last")
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
        finds = [_at((method, "mAP")) for method in METHODS] + [_at(("accuracy",)), _at(("knn1",))]
        rows = []
        for (dataset, encoder, loss, changes), jobs in self.groups(choice).items():
            labels = [dataset, encoder, *([_number(changes)] if variant else []), loss]
            rows.append(Row(tuple(labels), tuple(results.cell(jobs, find) for find in finds)))
        stub = ("dataset", "encoder", *([variant] if variant else []), "loss")
        title = f"{self.title}: all ways to search, recipe {choice.recipes[0]}"
        return Table(self._name("all", choice), title, stub, tuple(columns), tuple(rows), _notes(choice))

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
        for recipe, method in itertools.product(choice.recipes, _DRAWN):
            series: dict[tuple[str, str], dict[str, dict[float, list[float]]]] = {}
            for (dataset, encoder, loss, changes), jobs in self.groups(replace(choice, recipes=(recipe,))).items():
                cell = results.cell(jobs, _at((method, "mAP")))
                if cell.values:
                    panel = series.setdefault((dataset, encoder), {})
                    panel.setdefault(loss, {})[float(_number(changes))] = list(cell.values)
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


class Table1(Experiment):
    """Retrieval with all training pictures."""

    name = "table1"
    title = "Retrieval on the full sets (Table 1)"
    SHOWN: ClassVar = {
        f"mAP, {TITLES['brute_force']}": ("brute_force", "mAP"),
        f"mAP, {TITLES['label_lists_rest_last']}": ("label_lists_rest_last", "mAP"),
        "P@20, brute force": ("brute_force", "P@20"),
        "P@100, brute force": ("brute_force", "P@100"),
    }

    def tables_of(self, results: Results, choice: Choice) -> list[Table]:
        """As printed, and all ways to search."""
        rows = []
        for (dataset, encoder, loss, _), jobs in self.groups(choice).items():
            known = printed.retrieval(dataset, encoder, loss)
            answers: dict[Any, printed.Printed | None] = {
                printed.answered_by("retrieval", metric, loss): value for metric, value in known.items()
            }
            if loss == "cam":  # its brute-force mAP is printed in the second table
                answers[("brute_force", "mAP")] = printed.two_stage(dataset, encoder, "brute_force").get("mAP")
            cells = [results.cell(jobs, _at(path), answers.get(path)) for path in self.SHOWN.values()]
            rows.append(Row((dataset, encoder, loss), tuple(cells)))
        note = (
            "The paper's one mAP column holds two-stage search for CAM (here: label lists, the rest last) and brute "
            "force for the other losses."
        )
        title = f"{self.title}, recipe {choice.recipes[0]}"
        columns, stub = tuple(Column(name) for name in self.SHOWN), ("dataset", "encoder", "loss")
        asked = Table(self._name("", choice), title, stub, columns, tuple(rows), (note, *_notes(choice)))
        return [asked, self.four_ways(results, choice)]


class Table2(Experiment):
    """Brute force against two-stage search."""

    name = "table2"
    title = "Brute force and two-stage search (Table 2)"
    losses = ("cam",)
    measures = ("scores", "speed")

    def tables_of(self, results: Results, choice: Choice) -> list[Table]:
        """mAP and milliseconds."""
        rows = []
        for (dataset, encoder, loss, _), jobs in self.groups(choice).items():
            for method in ("brute_force", "two_stage"):
                known = printed.two_stage(dataset, encoder, method) if loss == "cam" else {}
                cells = (
                    results.cell(jobs, _at(printed.answered_by("two_stage", "mAP", method)), known.get("mAP")),
                    results.cell(jobs, _at((f"{method}_ms",)), known.get("ms"), "speed"),
                    results.cell(jobs, _at((f"{method}_search_ms",)), None, "speed"),
                )
                rows.append(Row((dataset, encoder, loss, method), cells))
        columns = (
            Column("mAP"),
            Column("encoder and search (ms)", "ms", "low"),
            Column("search alone (ms)", "ms", "low"),
        )
        notes = (
            "Milliseconds per query, one query at a time, the nearest 100, on the machine of the result lines; the "
            "paper's were taken on another, so that only the ratio of two rows means something.",
            *_notes(choice),
        )
        title = f"{self.title}, recipe {choice.recipes[0]}"
        return [
            Table(self._name("", choice), title, ("dataset", "encoder", "loss", "search"), columns, tuple(rows), notes)
        ]


class Ablation(Experiment):
    """Without repeller, minimum norm or base vectors."""

    name = "ablation"
    title = "Ablation of the loss (Table 3)"
    datasets = ("svhn",)
    encoders = ("resnet18",)
    losses = ("cam",)
    ROWS: ClassVar = tuple(itertools.product((False, True), (False, True), ("random", "base")))

    def variants(self, job: Job, choice: Choice) -> Sequence[tuple[str, ...]]:
        """The eight rows; the last is the loss as it is."""
        del job, choice
        return [_ablated(*row) for row in self.ROWS]

    def tables_of(self, results: Results, choice: Choice) -> list[Table]:
        """Accuracy and both searches."""
        rows = []
        groups = self.groups(choice)
        places = dict.fromkeys((dataset, encoder) for dataset, encoder, _, _ in groups)
        for (dataset, encoder), (repel, keep_norm, init) in itertools.product(places, self.ROWS):
            jobs = groups[dataset, encoder, "cam", _ablated(repel, keep_norm, init)]
            same = (dataset, encoder) == (self.datasets[0], self.encoders[0])
            known = printed.ablation(repel, keep_norm, init) if same else {}
            answer = printed.answered_by("ablation", "mAP", repel, keep_norm, init)
            cells = [results.cell(jobs, _at(("accuracy",)), known.get("accuracy"))]
            for method in METHODS:
                ours = (method, "mAP")
                cells.append(results.cell(jobs, _at(ours), known.get("mAP") if ours == answer else None))
            labels = (dataset, encoder, "yes" if repel else "no", "yes" if keep_norm else "no", init)
            rows.append(Row(labels, tuple(cells)))
        titles = ("accuracy", *(f"mAP, {TITLES[method]}" for method in METHODS))
        note = "The last printed mAP is that of two-stage search, the others are brute force."
        table = Table(
            self._name("", choice),
            f"{self.title}, recipe {choice.recipes[0]}",
            ("dataset", "encoder", "repeller", "minimum norm", "anchors start"),
            tuple(Column(title, "percent" if title == "accuracy" else "share") for title in titles),
            tuple(rows),
            (note, *_notes(choice)),
        )
        return [table]


class Classification(Experiment):
    """The nearest anchor as a classifier."""

    name = "classification"
    title = "Classification accuracy (Table 4)"
    encoders = ("resnet18", "resnet50")
    losses = ("cross_entropy", "cam")

    def tables_of(self, results: Results, choice: Choice) -> list[Table]:
        """Accuracy."""
        rows = []
        for (dataset, encoder, loss, _), jobs in self.groups(choice).items():
            known = printed.classification(dataset, encoder, loss)
            cells = (
                results.cell(jobs, _at(("accuracy",)), known.get("accuracy")),
                results.cell(jobs, _at(("knn1",))),
            )
            rows.append(Row((dataset, encoder, loss), cells))
        columns = (Column("accuracy", "percent"), Column("1-NN", "percent"))
        title = f"{self.title}, recipe {choice.recipes[0]}"
        stub = ("dataset", "encoder", "loss")
        return [Table(self._name("", choice), title, stub, columns, tuple(rows), _notes(choice))]


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
            for method in _DRAWN:
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


class Embeddings2d(Experiment):
    """Embeddings of two dimensions, drawn."""

    name = "embeddings2d"
    title = "Embeddings in two dimensions"
    datasets = ("svhn",)
    encoders = ("resnet18",)
    measures = ("scores", "points")

    def variants(self, job: Job, choice: Choice) -> Sequence[tuple[str, ...]]:
        """Two dimensions; CAM with the margin the paper takes for them."""
        del choice
        return [("encoder.dim=2", *(["loss.margin=4", "loss.min_norm=1"] if job.loss == "cam" else []))]

    def figures(self, results: Results, choice: Choice) -> dict[str, Figure]:
        """Clouds and distributions, of the first seed that ran."""
        found = {}
        for recipe, dataset, encoder, by_loss in self.by_place(results, choice, "points"):
            drawn: dict[str, Any] = {}
            anchors: dict[str, Any] = {}
            for loss, (first, *_) in by_loss.items():
                drawn[loss] = {
                    part: (
                        np.asarray(first[part]["points"], dtype=np.float64).reshape(-1, 2),
                        np.asarray(first[part]["labels"]),
                    )
                    for part in ("train", "test")
                }
                # What other losses have are means of their classes, which nothing pulled anything to.
                anchors[loss] = np.asarray(first["anchors"]) if loss == "cam" and first["anchors"] else None
            classes = next(iter(by_loss.values()))[0]["classes"]
            found[f"{self.name}-{dataset}-{encoder}-{recipe}"] = figures.embeddings_2d(
                drawn,
                anchors,
                classes,
                title=self.caption(dataset, encoder, recipe),
                labels={loss: display(loss) for loss in drawn},
            )
        return found


class Qualitative(Experiment):
    """The first hits of some queries."""

    name = "qualitative"
    title = "The first hits, looked at"
    encoders = ("resnet50",)
    measures = ("scores", "hits")

    def figures(self, results: Results, choice: Choice) -> dict[str, Figure]:
        """One for each dataset and encoder, of the first seed that ran; needs the pictures."""
        found = {}
        for recipe, dataset, encoder, by_loss in self.by_place(results, choice, "hits"):
            pictures = load_pictures(dataset, choice.sources)
            if pictures is None:
                continue
            queries = next(iter(by_loss.values()))[0]["queries"]
            rows = {display(loss): np.asarray(first["hits"]) for loss, (first, *_) in by_loss.items()}
            title = self.caption(dataset, encoder, recipe)
            found[f"{self.name}-{dataset}-{encoder}-{recipe}"] = retrieval_grid(pictures, queries, rows, title=title)
        return found


class League(Experiment):
    """More losses, all with the same data, encoder, recipe and budget."""

    name = "league"
    title = "League of losses"
    open_to_others = True
    datasets = ("cifar100",)
    encoders = ("resnet18",)
    losses = (
        *LOSSES,
        *("triplet", "arcface", "cosface", "proxy_anchor", "supcon", "center", "multi_similarity"),
    )

    def tables_of(self, results: Results, choice: Choice) -> list[Table]:
        """Scores, and places within each column."""
        table = self.four_ways(results, choice)
        return [table, ranks(table)]

    def figures(self, results: Results, choice: Choice) -> dict[str, Figure]:
        """All losses side by side."""
        found = {}
        ways = ("brute_force", "label_lists", "anchor_lists")
        finds = {f"mAP, {TITLES[way]}": _at((way, "mAP")) for way in ways} | {"accuracy": _at(("accuracy",))}
        for recipe in choice.recipes:
            groups = self.groups(replace(choice, recipes=(recipe,)))
            for dataset, encoder in dict.fromkeys((dataset, encoder) for dataset, encoder, _, _ in groups):
                rows = {}
                for (their_dataset, their_encoder, loss, _), jobs in groups.items():
                    cells = [results.cell(jobs, find) for find in finds.values()]
                    if (their_dataset, their_encoder) == (dataset, encoder) and cells[0].values:
                        rows[display(loss)] = [list(cell.values) for cell in cells]
                if rows:
                    found[f"{self.name}-{dataset}-{encoder}-{recipe}"] = figures.league_chart(
                        rows,
                        list(finds),
                        x_label="mAP, accuracy",
                        title=self.caption(dataset, encoder, recipe),
                    )
        return found


EXPERIMENTS: dict[str, Experiment] = {
    one.name: one
    for one in (
        Table1(),
        Table2(),
        Ablation(),
        Classification(),
        Dimensions(),
        Convergence(),
        FewShot(),
        Embeddings2d(),
        Qualitative(),
        League(),
    )
}


def experiment(name: str) -> Experiment:
    """The experiment called so."""
    if name not in EXPERIMENTS:
        raise ConfigError(f"There is no experiment {name!r}: take one of {', '.join(EXPERIMENTS)}.")
    return EXPERIMENTS[name]


def _at(path: Sequence[str] | None) -> Find:
    """The value at the end of a path of names; None where there is none."""

    def find(values: Mapping[str, Any]) -> float | None:
        found: Any = values
        for name in path or ():
            found = found.get(name, {})
        return found if isinstance(found, float | int) else None

    return find


def _ablated(repel: bool, keep_norm: bool, init: str) -> tuple[str, ...]:
    changes = {"repel": (repel, True), "keep_norm": (keep_norm, True), "init": (init, "base")}
    return tuple(f"loss.{name}={str(value).lower()}" for name, (value, usual) in changes.items() if value != usual)


def _number(changes: Sequence[str]) -> str:
    """`encoder.dim=32` → 32."""
    return changes[0].partition("=")[2]


def _notes(choice: Choice) -> tuple[str, ...]:
    return (f"With {' '.join(choice.settings)}.",) if choice.settings else ()


def _shots(dataset: str, sources: Source) -> list[int]:
    if dataset in _PER_CLASS:
        return shot_counts(np.zeros(_PER_CLASS[dataset], dtype=np.int64))
    pictures = load_pictures(dataset, sources)
    if pictures is None:
        raise DataError(
            f"{dataset} cannot be loaded, so that nobody knows how many pictures its classes have: give --at."
        )
    return shot_counts(np.asarray(pictures.train.labels))
