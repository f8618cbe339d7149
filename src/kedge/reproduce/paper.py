"""The values printed in the paper's four tables, each under the metric of ours that it is compared with."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal, get_args

from kedge.evaluation.report import TITLES

__all__ = ["PaperTable", "PaperValue", "display", "paper_rows", "paper_speedup", "paper_values"]

PaperTable = Literal["retrieval", "two_stage", "ablation", "classification"]
"""The paper's tables 1 to 4."""
PaperRow = tuple[str | bool, ...]
"""Dataset, encoder and loss or search; of the ablation, of CAM with ResNet-18 on SVHN, repel, keep_norm and init."""


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
    return str({**_content()["names"], **TITLES}.get(name, name))


def paper_values(table: PaperTable, *row: str | bool) -> dict[str, PaperValue]:
    """The values of a row, identified by its labels, by metric; empty where the paper has no such row.

    The paper's tables are not like for like. Its mAP of CAM in table 1 is the two-stage mAP of table 2, while
    cross-entropy and contrastive loss can only be searched by brute force; P@20 and P@100 are brute force for all.
    The last row of the ablation, with everything on, is two-stage, its other rows are not. A printed two-stage mAP is
    compared with our `label_lists.mAP`, which is accuracy: it lies .0004 to .003 above that, less than a search that
    ranks everything else after the list would add. Every other mAP is compared with `brute_force.mAP`.

    >>> paper_values("retrieval", "cifar100", "resnet18", "cam")["label_lists.mAP"]
    PaperValue(mean=0.622, std=0.005, digits=3)
    >>> paper_values("retrieval", "cifar100", "resnet10", "cam")
    {}
    """
    return dict(_tables()[table].get(row, {}))


def paper_speedup(dataset: str, encoder: str) -> PaperValue | None:
    """How many times as long brute force takes as two-stage search, encoder included; the deviations are combined.

    >>> paper_speedup("cifar100", "resnet18")
    PaperValue(mean=2.6, std=0.7, digits=1)
    """
    times = [
        paper_values("two_stage", dataset, encoder, search).get(f"{search}_ms")
        for search in ("brute_force", "two_stage")
    ]
    match times:
        case [PaperValue(slow, slow_std), PaperValue(fast, fast_std)]:
            relative = math.hypot((slow_std or 0.0) / slow, (fast_std or 0.0) / fast)
            return PaperValue(round(slow / fast, 1), round(slow / fast * relative, 1), 1)
    return None


def paper_rows(table: PaperTable) -> list[PaperRow]:
    """The rows of a table in the paper's order, each as the arguments of `paper_values`."""
    return list(_tables()[table])


@cache
def _content() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(resources.files("kedge.reproduce").joinpath("paper.json").read_text("utf-8"))
    return content


@cache
def _tables() -> dict[PaperTable, dict[PaperRow, dict[str, PaperValue]]]:
    tables: dict[PaperTable, dict[PaperRow, dict[str, PaperValue]]] = {table: {} for table in get_args(PaperTable)}
    digits = _content()["digits"]
    for table, rows in tables.items():
        for record in _content()[table]:
            numbers = {name: value for name, value in record.items() if isinstance(value, list)}
            row = rows.setdefault(tuple(record[name] for name in record if name not in numbers), {})
            for name, (mean, *std) in numbers.items():
                row[name] = PaperValue(mean, std[0] if std else None, digits.get(name, 3))
    return tables
