"""The four printed tables."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

from kedge.evaluation import METHODS
from kedge.evaluation.tables import TITLES
from kedge.reproduce import printed
from kedge.reproduce.experiments.base import Choice, Experiment, Results, notes_of, value_at
from kedge.reproduce.jobs import Job
from kedge.reproduce.tables import Column, Row, Table

__all__ = ["Ablation", "Classification", "Table1", "Table2"]


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
            cells = [results.cell(jobs, value_at(path), answers.get(path)) for path in self.SHOWN.values()]
            rows.append(Row((dataset, encoder, loss), tuple(cells)))
        note = (
            "The paper's one mAP column holds two-stage search for CAM (here: label lists, the rest last) and brute "
            "force for the other losses."
        )
        title = f"{self.title}, recipe {choice.recipes[0]}"
        columns, stub = tuple(Column(name) for name in self.SHOWN), ("dataset", "encoder", "loss")
        asked = Table(self._name("", choice), title, stub, columns, tuple(rows), (note, *notes_of(choice)))
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
                    results.cell(jobs, value_at(printed.answered_by("two_stage", "mAP", method)), known.get("mAP")),
                    results.cell(jobs, value_at((f"{method}_ms",)), known.get("ms"), "speed"),
                    results.cell(jobs, value_at((f"{method}_search_ms",)), None, "speed"),
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
            *notes_of(choice),
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

    def tells(self, job: Job) -> bool:
        """The loss as it is is in the first table, too."""
        return bool(job.changes)

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
            cells = [results.cell(jobs, value_at(("accuracy",)), known.get("accuracy"))]
            for method in METHODS:
                ours = (method, "mAP")
                cells.append(results.cell(jobs, value_at(ours), known.get("mAP") if ours == answer else None))
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
            (note, *notes_of(choice)),
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
                results.cell(jobs, value_at(("accuracy",)), known.get("accuracy")),
                results.cell(jobs, value_at(("knn1",))),
            )
            rows.append(Row((dataset, encoder, loss), cells))
        columns = (Column("accuracy", "percent"), Column("1-NN", "percent"))
        title = f"{self.title}, recipe {choice.recipes[0]}"
        stub = ("dataset", "encoder", "loss")
        return [Table(self._name("", choice), title, stub, columns, tuple(rows), notes_of(choice))]


def _ablated(repel: bool, keep_norm: bool, init: str) -> tuple[str, ...]:
    changes = {"repel": (repel, True), "keep_norm": (keep_norm, True), "init": (init, "base")}
    return tuple(f"loss.{name}={str(value).lower()}" for name, (value, usual) in changes.items() if value != usual)
