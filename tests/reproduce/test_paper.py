from __future__ import annotations

import itertools
from typing import get_args

import pytest

from kedge.evaluation import METHODS, METRICS
from kedge.reproduce.paper import PaperTable, PaperValue, paper_rows, paper_values

DATASETS = ("cifar100", "food101", "svhn", "tiny_imagenet")
CLASSES = {"cifar100": 100, "food101": 101, "svhn": 10, "tiny_imagenet": 200}
ENCODERS = ("resnet18", "resnet50", "resnet101", "swin_t")
LOSSES = ("cross_entropy", "contrastive", "cam")


BRUTE_FORCE, LISTS = "brute_force.mAP", "label_lists.mAP"


def test_every_cell_is_there_and_answered_by_the_right_metric_of_ours() -> None:
    assert {table: len(paper_rows(table)) for table in get_args(PaperTable)} == {
        "retrieval": 4 * 3 * 4,
        "two_stage": 4 * 2 * 4,
        "ablation": 8,
        "classification": 4 * 2 * 2,
    }
    for dataset, encoder in itertools.product(DATASETS, ENCODERS):
        for loss in LOSSES:
            metrics = {LISTS if loss == "cam" else BRUTE_FORCE, "brute_force.P@20", "brute_force.P@100"}
            assert paper_values("retrieval", dataset, encoder, loss).keys() == metrics
        assert paper_values("two_stage", dataset, encoder, "brute_force").keys() == {BRUTE_FORCE, "brute_force_ms"}
        assert paper_values("two_stage", dataset, encoder, "two_stage").keys() == {LISTS, "two_stage_ms"}
    for row in itertools.product(DATASETS, ("resnet18", "resnet50"), ("cross_entropy", "cam")):
        assert paper_values("classification", *row).keys() == {"accuracy"}
    rows = list(itertools.product((False, True), (False, True), ("random", "base")))
    assert paper_rows("ablation") == rows
    assert [paper_values("ablation", *row).keys() for row in rows] == [
        *[{BRUTE_FORCE, "accuracy"}] * 7,
        {LISTS, "accuracy"},
    ]
    ours = {f"{method}.{metric}" for method in METHODS for metric in METRICS}
    ours |= {"accuracy", "brute_force_ms", "two_stage_ms"}
    assert all(paper_values(table, *row).keys() <= ours for table in get_args(PaperTable) for row in paper_rows(table))


def test_numbers_quoted_from_the_paper() -> None:
    assert paper_values("retrieval", "cifar100", "resnet18", "cam") == {
        LISTS: PaperValue(0.622, 0.005),
        "brute_force.P@20": PaperValue(0.560, 0.007),
        "brute_force.P@100": PaperValue(0.553, 0.007),
    }
    assert paper_values("retrieval", "svhn", "resnet50", "contrastive")["brute_force.P@100"] == PaperValue(0.437, 0.364)
    assert paper_values("retrieval", "tiny_imagenet", "resnet101", "cross_entropy")["brute_force.P@20"] == PaperValue(
        0.299, 0.002
    )
    assert paper_values("retrieval", "food101", "swin_t", "cam")[LISTS] == PaperValue(0.873, 0.001)
    assert paper_values("two_stage", "food101", "resnet50", "brute_force") == {
        BRUTE_FORCE: PaperValue(0.609, 0.017),
        "brute_force_ms": PaperValue(23.2, 2.0, 1),
    }
    assert paper_values("two_stage", "svhn", "swin_t", "two_stage")["two_stage_ms"] == PaperValue(7.7, 0.9, 1)
    assert paper_values("ablation", True, False, "base") == {
        BRUTE_FORCE: PaperValue(0.901),
        "accuracy": PaperValue(0.9405, None, 4),
    }
    assert paper_values("ablation", False, False, "random")["accuracy"] == PaperValue(0.1956, None, 4)
    assert paper_values("classification", "svhn", "resnet50", "cam")["accuracy"] == PaperValue(0.9663, 0.0007, 4)
    assert paper_values("classification", "food101", "resnet50", "cross_entropy")["accuracy"] == PaperValue(
        0.7684, 0.0037, 4
    )


def test_nothing_where_the_paper_has_no_cell() -> None:
    assert paper_values("retrieval", "cifar100", "resnet10", "cam") == {}
    assert paper_values("classification", "cifar100", "resnet18", "contrastive") == {}
    assert paper_values("two_stage", "cifar100", "resnet18", "anchor_lists") == {}
    assert paper_values("ablation", True, True, "lattice") == {}
    paper_values("retrieval", "cifar100", "resnet18", "cam").clear()
    assert paper_values("retrieval", "cifar100", "resnet18", "cam"), (
        "what one caller does to its cells is seen by the next"
    )


def test_the_tables_agree_with_each_other() -> None:
    above = []
    for dataset in DATASETS:
        for encoder in ENCODERS:
            routed = paper_values("two_stage", dataset, encoder, "two_stage")
            assert paper_values("retrieval", dataset, encoder, "cam")[LISTS] == routed[LISTS]
            every = paper_values("two_stage", dataset, encoder, "brute_force")
            assert routed["two_stage_ms"].mean < every["brute_force_ms"].mean
            assert routed[LISTS].mean > every[BRUTE_FORCE].mean
            if accuracy := paper_values("classification", dataset, encoder, "cam").get("accuracy"):
                excess = (routed[LISTS].mean - accuracy.mean) / (1 - accuracy.mean)
                above.append(excess * CLASSES[dataset])
    # The mean AP of misrouted queries, as a multiple of chance: far below 1.9, the least of ours with the rest last.
    assert [round(excess, 2) for excess in above] == [0.68, 0.55, 0.32, 0.56, 0.81, 0.80, 0.53, 0.17]
    full = paper_values("ablation", True, True, "base")
    assert full[LISTS].mean == paper_values("retrieval", "svhn", "resnet18", "cam")[LISTS].mean
    assert full["accuracy"].mean == paper_values("classification", "svhn", "resnet18", "cam")["accuracy"].mean


@pytest.mark.parametrize("table", get_args(PaperTable))
def test_numbers_are_possible_and_as_precise_as_printed(table: PaperTable) -> None:
    for row in paper_rows(table):
        for metric, cell in paper_values(table, *row).items():
            timed = metric.endswith("_ms")
            assert 0 < cell.mean < (100 if timed else 1)
            assert cell.digits == (1 if timed else 4 if metric == "accuracy" else 3)
            assert (cell.std is None) == (table == "ablation")
            for number in (cell.mean, cell.std or 0.0):
                assert number >= 0
                assert round(number, cell.digits) == number
