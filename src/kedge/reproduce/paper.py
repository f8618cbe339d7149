"""The values printed in the paper's four tables, and which of our metrics each of them is compared with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

__all__ = ["METRICS", "ROWS", "PaperTable", "PaperValue", "metric_path", "paper_rows", "paper_values"]

PaperTable = Literal["retrieval", "two_stage", "ablation", "classification"]
"""The paper's tables 1 to 4."""
PaperRow = tuple[str | bool, ...]

ROWS: dict[PaperTable, tuple[str, ...]] = {
    "retrieval": ("dataset", "encoder", "loss"),
    "two_stage": ("dataset", "encoder", "method"),
    "ablation": ("repel", "keep_norm", "init"),
    "classification": ("dataset", "encoder", "loss"),
}
"""What identifies a row of each table; the ablation is of CAM with ResNet-18 on SVHN."""

METRICS: dict[PaperTable, tuple[str, ...]] = {
    "retrieval": ("mAP", "P@20", "P@100"),
    "two_stage": ("mAP", "ms"),
    "ablation": ("mAP", "accuracy"),
    "classification": ("accuracy",),
}
"""What each table prints; accuracies are fractions here, per cent in the paper."""

# How the rows end whose mAP is of two-stage search; all others are brute force.
_TWO_STAGE: dict[PaperTable, PaperRow] = {
    "retrieval": ("cam",),
    "two_stage": ("two_stage",),
    "ablation": (True, True, "base"),
}


@dataclass(frozen=True)
class PaperValue:
    """A number of the paper: the mean over five trials and its standard deviation, None where it prints none."""

    mean: float
    std: float | None = None
    digits: int = 3
    """Decimals that are printed; of an accuracy, counted as a fraction: 96.41% has four."""


def paper_values(table: PaperTable, *row: str | bool) -> dict[str, PaperValue]:
    """The metrics of a row, identified as in `ROWS`; empty where the paper has no such row.

    >>> paper_values("retrieval", "cifar100", "resnet18", "cam")["mAP"]
    PaperValue(mean=0.622, std=0.005, digits=3)
    >>> paper_values("retrieval", "cifar100", "resnet10", "cam")
    {}
    """
    return dict(_tables()[table].get(row, {}))


def paper_rows(table: PaperTable) -> list[PaperRow]:
    """The rows of a table in the paper's order, each as the arguments of `paper_values`."""
    return list(_tables()[table])


def metric_path(table: PaperTable, metric: str, *row: str | bool) -> tuple[str, ...] | None:
    """Where ``metrics.json`` has the metric to compare a printed value with; None for times, measured separately.

    `row` ends like the arguments of `paper_values`: the loss in tables 1 and 4, the method in table 2, all three
    switches in table 3.

    The paper's tables are not like for like. Its mAP of CAM in table 1 is the two-stage mAP of table 2, while
    cross-entropy and contrastive loss can only be searched by brute force; P@20 and P@100 are brute force for all.
    The last row of the ablation, with everything on, is two-stage, its other rows are not. The printed two-stage mAP
    lies a little above accuracy, as it does when what was not searched ranks after the list. Therefore:

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

    >>> metric_path("retrieval", "mAP", "cam")
    ('label_lists_rest_last', 'mAP')
    >>> metric_path("ablation", "mAP", True, False, "base")
    ('brute_force', 'mAP')
    """
    if metric == "ms":
        return None
    if metric == "accuracy":
        return ("accuracy",)
    suffix = _TWO_STAGE[table]
    two_stage = metric == "mAP" and row[-len(suffix) :] == suffix
    return ("label_lists_rest_last" if two_stage else "brute_force", metric)


@cache
def _tables() -> dict[PaperTable, dict[PaperRow, dict[str, PaperValue]]]:
    text = resources.files("kedge.reproduce").joinpath("paper.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    tables: dict[PaperTable, dict[PaperRow, dict[str, PaperValue]]] = {}
    for table, names in ROWS.items():
        tables[table] = {}
        for record in content[table]:
            values = {}
            for metric in METRICS[table]:
                mean, std = (*record[metric], None)[:2]
                values[metric] = PaperValue(mean, std, content["digits"][metric])
            tables[table][tuple(record[name] for name in names)] = values
    return tables
