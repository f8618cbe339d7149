from __future__ import annotations

import pytest

from kedge.evaluation import METHODS, METRICS
from kedge.reproduce.paper import METRICS as PAPER_METRICS
from kedge.reproduce.paper import ROWS, PaperTable, PaperValue, metric_path, paper_rows, paper_values

DATASETS = ("cifar100", "food101", "svhn", "tiny_imagenet")
ENCODERS = ("resnet18", "resnet50", "resnet101", "swin_t")
LOSSES = ("cross_entropy", "contrastive", "cam")


def cells(table: PaperTable) -> list[PaperValue]:
    return [cell for row in paper_rows(table) for cell in paper_values(table, *row).values()]


def test_every_cell_of_the_four_tables_is_there() -> None:
    assert {table: len(paper_rows(table)) for table in ROWS} == {
        "retrieval": 4 * 3 * 4,
        "two_stage": 4 * 2 * 4,
        "ablation": 8,
        "classification": 4 * 2 * 2,
    }
    for dataset in DATASETS:
        for encoder in ENCODERS:
            assert all(
                paper_values("retrieval", dataset, encoder, loss).keys() == {"mAP", "P@20", "P@100"} for loss in LOSSES
            )
            assert all(
                paper_values("two_stage", dataset, encoder, name).keys() == {"mAP", "ms"}
                for name in ("brute_force", "two_stage")
            )
        for encoder in ("resnet18", "resnet50"):
            assert all(
                paper_values("classification", dataset, encoder, loss).keys() == {"accuracy"}
                for loss in ("cross_entropy", "cam")
            )
    switches = (False, True)
    rows = [(repel, norm, init) for repel in switches for norm in switches for init in ("random", "base")]
    assert paper_rows("ablation") == rows
    assert all(paper_values("ablation", *row).keys() == {"mAP", "accuracy"} for row in rows)


def test_numbers_quoted_from_the_paper() -> None:
    assert paper_values("retrieval", "cifar100", "resnet18", "cam") == {
        "mAP": PaperValue(0.622, 0.005),
        "P@20": PaperValue(0.560, 0.007),
        "P@100": PaperValue(0.553, 0.007),
    }
    assert paper_values("retrieval", "svhn", "resnet50", "contrastive")["P@100"] == PaperValue(0.437, 0.364)
    assert paper_values("retrieval", "tiny_imagenet", "resnet101", "cross_entropy")["P@20"] == PaperValue(0.299, 0.002)
    assert paper_values("retrieval", "food101", "swin_t", "cam")["mAP"] == PaperValue(0.873, 0.001)
    assert paper_values("two_stage", "food101", "resnet50", "brute_force") == {
        "mAP": PaperValue(0.609, 0.017),
        "ms": PaperValue(23.2, 2.0, 1),
    }
    assert paper_values("two_stage", "svhn", "swin_t", "two_stage")["ms"] == PaperValue(7.7, 0.9, 1)
    assert paper_values("ablation", True, False, "base") == {
        "mAP": PaperValue(0.901),
        "accuracy": PaperValue(0.9405, None, 4),
    }
    assert paper_values("ablation", False, False, "random")["accuracy"] == PaperValue(0.1956, None, 4)
    assert paper_values("classification", "svhn", "resnet50", "cam")["accuracy"] == PaperValue(0.9663, 0.0007, 4)
    assert paper_values("classification", "food101", "resnet50", "cross_entropy")["accuracy"] == PaperValue(
        0.7684, 0.0037, 4
    )


def test_nothing_where_the_paper_has_no_cell() -> None:
    assert paper_values("retrieval", "cifar100", "resnet10", "cam").get("mAP") is None
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
            assert paper_values("retrieval", dataset, encoder, "cam")["mAP"] == routed["mAP"]
            every = paper_values("two_stage", dataset, encoder, "brute_force")
            assert routed["ms"].mean < every["ms"].mean
            assert routed["mAP"].mean > every["mAP"].mean
            if accuracy := paper_values("classification", dataset, encoder, "cam").get("accuracy"):
                above.append(routed["mAP"].mean - accuracy.mean)
    # What tells that the two-stage mAP ranks the rest after the list: see metric_path.
    assert len(above) == 8
    assert all(0.0003 < gap < 0.0031 for gap in above)
    full = paper_values("ablation", True, True, "base")
    assert full["mAP"].mean == paper_values("retrieval", "svhn", "resnet18", "cam")["mAP"].mean
    assert full["accuracy"].mean == paper_values("classification", "svhn", "resnet18", "cam")["accuracy"].mean


@pytest.mark.parametrize("table", list(ROWS))
def test_numbers_are_possible_and_as_precise_as_printed(table: PaperTable) -> None:
    for row in paper_rows(table):
        for metric, cell in paper_values(table, *row).items():
            assert 0 < cell.mean < (100 if metric == "ms" else 1)
            assert cell.digits == {"ms": 1, "accuracy": 4}.get(metric, 3)
            assert (cell.std is None) == (table == "ablation")
            for number in (cell.mean, cell.std or 0.0):
                assert number >= 0
                assert round(number, cell.digits) == number
    assert len(cells(table)) == len(paper_rows(table)) * len(PAPER_METRICS[table])


def test_which_number_of_ours_answers_which_cell() -> None:
    rest_last, brute = ("label_lists_rest_last", "mAP"), ("brute_force", "mAP")
    assert metric_path("retrieval", "mAP", "cam") == rest_last
    assert metric_path("retrieval", "mAP", "cifar100", "resnet18", "cam") == rest_last
    assert metric_path("retrieval", "mAP", "cross_entropy") == brute
    assert metric_path("retrieval", "mAP", "contrastive") == brute
    for loss in LOSSES:
        assert metric_path("retrieval", "P@20", loss) == ("brute_force", "P@20")
        assert metric_path("retrieval", "P@100", loss) == ("brute_force", "P@100")
    assert metric_path("two_stage", "mAP", "two_stage") == rest_last
    assert metric_path("two_stage", "mAP", "brute_force") == brute
    assert metric_path("two_stage", "ms", "two_stage") is None
    rows = paper_rows("ablation")
    assert [metric_path("ablation", "mAP", *row) for row in rows] == [brute] * 7 + [rest_last]
    assert {metric_path("ablation", "accuracy", *row) for row in rows} == {("accuracy",)}
    assert metric_path("classification", "accuracy", "cam") == ("accuracy",)


def test_answers_are_columns_of_a_report() -> None:
    for table, metrics in PAPER_METRICS.items():
        for row in paper_rows(table):
            for metric in metrics:
                answer = metric_path(table, metric, *row)
                assert answer in (None, ("accuracy",), *((method, one) for method in METHODS for one in METRICS))
