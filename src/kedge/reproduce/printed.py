"""What the paper prints: its four tables by Kedge's names, and which number of ours answers which cell."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal, get_args

from kedge.errors import ConfigError

__all__ = [
    "PRINTED_METRICS",
    "PRINTED_ROWS",
    "Printed",
    "PrintedTable",
    "ablation",
    "answered_by",
    "classification",
    "printed_rows",
    "retrieval",
    "two_stage",
]

PrintedTable = Literal["retrieval", "two_stage", "ablation", "classification"]
"""The paper's tables 1 to 4."""
PrintedRow = tuple[str | bool, ...]

PRINTED_ROWS: dict[PrintedTable, tuple[str, ...]] = {
    "retrieval": ("dataset", "encoder", "loss"),
    "two_stage": ("dataset", "encoder", "method"),
    "ablation": ("repel", "keep_norm", "init"),
    "classification": ("dataset", "encoder", "loss"),
}
"""What tells the cells of a table apart."""

PRINTED_METRICS: dict[PrintedTable, tuple[str, ...]] = {
    "retrieval": ("mAP", "P@20", "P@100"),
    "two_stage": ("mAP", "ms"),
    "ablation": ("mAP", "accuracy"),
    "classification": ("accuracy",),
}
"""What a table prints; accuracies are shares here, per cent in the paper."""

# How the rows end that are two-stage; all others are brute force.
_TWO_STAGE: dict[PrintedTable, PrintedRow] = {
    "retrieval": ("cam",),
    "two_stage": ("two_stage",),
    "ablation": (True, True, "base"),
}


@dataclass(frozen=True)
class Printed:
    """A number of the paper: the mean over five trials and its standard deviation, None where it prints none."""

    mean: float
    std: float | None = None
    digits: int = 3
    """Decimals that are printed; of an accuracy, counted as a share: 96.41% has four."""


def retrieval(dataset: str, encoder: str, loss: str) -> dict[str, Printed]:
    """Table 1: mAP, P@20 and P@100 of a loss; nothing where the paper has no such row.

    >>> retrieval("cifar100", "resnet18", "cam")["mAP"]
    Printed(mean=0.622, std=0.005, digits=3)
    >>> retrieval("cifar100", "resnet10", "cam").get("mAP")
    """
    return _cells("retrieval", dataset, encoder, loss)


def two_stage(dataset: str, encoder: str, method: str) -> dict[str, Printed]:
    """Table 2: mAP and ms per query of CAM, by `brute_force` or `two_stage`; nothing where there is no such row."""
    return _cells("two_stage", dataset, encoder, method)


def ablation(repel: bool, keep_norm: bool, init: str) -> dict[str, Printed]:
    """Table 3: mAP and accuracy of CAM with parts switched off, for ResNet-18 on SVHN."""
    return _cells("ablation", repel, keep_norm, init)


def classification(dataset: str, encoder: str, loss: str) -> dict[str, Printed]:
    """Table 4: the accuracy of a loss; nothing where the paper has no such row."""
    return _cells("classification", dataset, encoder, loss)


def printed_rows(table: PrintedTable) -> list[PrintedRow]:
    """The rows of a table in the paper's order, each as the arguments of the function that looks it up."""
    _check(table)
    return list(_tables()[table])


def answered_by(table: PrintedTable, metric: str, *row: str | bool) -> tuple[str, ...] | None:
    """Where in ``metrics.json`` our answer to a printed cell stands; None for times, which are measured apart.

    `row` ends like the arguments of the function that looks the cell up: the loss in tables 1 and 4, the method in
    table 2, all three switches in table 3.

    The paper's tables are not like for like. Its mAP of CAM in table 1 is the two-stage mAP of table 2, while
    cross-entropy and contrastive loss can only be searched by brute force; P@20 and P@100 are brute force for all.
    The last row of the ablation, with everything on, is two-stage, its other rows are not. The printed two-stage mAP
    lies a little above accuracy, as it does when what was not looked at ranks after the list. Therefore:

    =====================  ===========================  =======================
    printed                row                          ours
    =====================  ===========================  =======================
    table 1 mAP            CAM                          `label_lists_rest_last`
    table 1 mAP            other losses                 `brute_force`
    table 1 P@20, P@100    all                          `brute_force`
    table 2 mAP            two-stage                    `label_lists_rest_last`
    table 2 mAP            brute force                  `brute_force`
    table 3 mAP            the last, everything on      `label_lists_rest_last`
    table 3 mAP            others                       `brute_force`
    tables 3, 4 accuracy   all                          `accuracy`
    =====================  ===========================  =======================

    >>> answered_by("retrieval", "mAP", "cam")
    ('label_lists_rest_last', 'mAP')
    >>> answered_by("ablation", "mAP", True, False, "base")
    ('brute_force', 'mAP')
    """
    _check(table)
    if metric not in PRINTED_METRICS[table]:
        known = ", ".join(PRINTED_METRICS[table])
        raise ConfigError(f"The paper's table {table} prints no {metric}; ask for one of {known}.")
    if metric == "ms":
        return None
    if metric == "accuracy":
        return ("accuracy",)
    if metric != "mAP":
        return ("brute_force", metric)
    routed = _TWO_STAGE[table]
    if len(row) < len(routed):
        needed = ", ".join(PRINTED_ROWS[table][-len(routed) :])
        raise ConfigError(f"What answers mAP in the paper's table {table} depends on its row; name the row's {needed}.")
    return ("label_lists_rest_last" if row[-len(routed) :] == routed else "brute_force", metric)


def _cells(table: PrintedTable, *row: str | bool) -> dict[str, Printed]:
    return dict(_tables()[table].get(row, {}))


def _check(table: str) -> None:
    if table not in get_args(PrintedTable):
        raise ConfigError(f"The paper has no table {table}; ask for one of {', '.join(get_args(PrintedTable))}.")


@cache
def _tables() -> dict[PrintedTable, dict[PrintedRow, dict[str, Printed]]]:
    text = resources.files("kedge.reproduce").joinpath("printed.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    digits: dict[str, int] = content["digits"]
    return {
        table: {
            tuple(record[part] for part in parts): {
                metric: _printed(*record[metric], digits=digits[metric]) for metric in PRINTED_METRICS[table]
            }
            for record in content[table]
        }
        for table, parts in PRINTED_ROWS.items()
    }


def _printed(mean: float, std: float | None = None, *, digits: int) -> Printed:
    return Printed(mean, std, digits)
