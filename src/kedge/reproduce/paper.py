"""The values printed in the paper's four tables, each under the metric of ours that it is compared with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

from kedge.evaluation.report import TITLES

__all__ = ["ROWS", "PaperTable", "PaperValue", "display", "paper_rows", "paper_values"]

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

_TWO_STAGE: dict[PaperTable, PaperRow] = {
    "retrieval": ("cam",),
    "two_stage": ("two_stage",),
    "ablation": (True, True, "base"),
}
"""How the rows end whose mAP is that of two-stage search; all others are brute force."""

_NAMES = {
    "resnet10": "ResNet-10",
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
    "resnet101": "ResNet-101",
    "swin_t": "Swin-T",
    "cifar100": "CIFAR-100",
    "food101": "Food-101",
    "svhn": "SVHN",
    "tiny_imagenet": "Tiny ImageNet",
    "cross_entropy": "cross-entropy",
    "cam": "CAM",
    "arcface": "ArcFace",
    "cosface": "CosFace",
    "supcon": "SupCon",
    "multi_similarity": "multi-similarity",
    "proxy_anchor": "proxy anchor",
    "base": "base vectors",
    "two_stage": "two-stage",
    **TITLES,
}


@dataclass(frozen=True)
class PaperValue:
    """A number of the paper: the mean over five trials and its standard deviation, None where it prints none."""

    mean: float
    std: float | None = None
    digits: int = 3
    """Decimals that are printed; of an accuracy, counted as a fraction: 96.41% has four."""


def display(name: str) -> str:
    """The name that the paper prints for one of Kedge's; an unknown one as it is.

    >>> display("resnet18"), display("my_loss")
    ('ResNet-18', 'my_loss')
    """
    return _NAMES.get(name, name)


def paper_values(table: PaperTable, *row: str | bool) -> dict[str, PaperValue]:
    """The values of a row, identified as in `ROWS`, by metric; empty where the paper has no such row.

    A metric is where the values of a run have it: `brute_force.mAP` in ``metrics.json``, `two_stage_ms` in the speed.
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

    >>> paper_values("retrieval", "cifar100", "resnet18", "cam")["label_lists_rest_last.mAP"]
    PaperValue(mean=0.622, std=0.005, digits=3)
    >>> paper_values("retrieval", "cifar100", "resnet10", "cam")
    {}
    """
    return dict(_tables()[table].get(row, {}))


def paper_rows(table: PaperTable) -> list[PaperRow]:
    """The rows of a table in the paper's order, each as the arguments of `paper_values`."""
    return list(_tables()[table])


@cache
def _tables() -> dict[PaperTable, dict[PaperRow, dict[str, PaperValue]]]:
    content = json.loads(resources.files("kedge.reproduce").joinpath("paper.json").read_text(encoding="utf-8"))
    tables: dict[PaperTable, dict[PaperRow, dict[str, PaperValue]]] = {table: {} for table in ROWS}
    for table, names in ROWS.items():
        for record in content[table]:
            row = tuple(record[name] for name in names)
            for printed in record.keys() - names:
                mean, std = (*record[printed], None)[:2]
                value = PaperValue(mean, std, content["digits"][printed])
                tables[table].setdefault(row, {})[_metric(table, row, printed)] = value
    return tables


def _metric(table: PaperTable, row: PaperRow, printed: str) -> str:
    if printed == "accuracy":
        return printed
    if printed == "ms":
        return f"{row[-1]}_ms"
    ending = _TWO_STAGE[table]
    two_stage = printed == "mAP" and row[-len(ending) :] == ending
    return f"{'label_lists_rest_last' if two_stage else 'brute_force'}.{printed}"
