"""The page of all results."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from kedge.errors import DataError
from kedge.evaluation import METHODS
from kedge.reproduce.jobs import Job, ResultLine, ResultStore
from kedge.reproduce.report import write_report

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_of_the_docs_is_that_of_its_result_lines(tmp_path: Path) -> None:
    for name in ("results.jsonl", "datasets.json"):
        shutil.copy(DOCS / name, tmp_path)
    (tmp_path / "figures").mkdir()
    for figure in (DOCS / "figures").glob("qualitative-*"):  # they show images, which are not here
        shutil.copy(figure, tmp_path / "figures")
    page = write_report(ResultStore(tmp_path / "results.jsonl").lines(), tmp_path, {})
    assert page.read_text() == (DOCS / "results.md").read_text()


def test_notes_of_datasets_that_cannot_be_read_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "datasets.json").write_text('["not what it should be"]')
    with pytest.raises(DataError, match=r"datasets\.json must map hashes"):
        write_report([], tmp_path, {})


def test_the_page_says_which_pairs_were_not_run_and_counts_a_run_once(tmp_path: Path) -> None:
    job = Job("cub200", "efficientnet_lite0", "cam", "head", 0)
    about = {
        "command": "",
        "config_hash": "",
        "dataset_hash": "abc",
        "seconds": 1.0,
        "machine": {"cpu": "a", "torch": 1},
    }
    detection = {"unknown": "unseen classes", "AUROC": 0.9, "FPR@95": 0.5, "OSCR": 0.7, "accuracy": 0.75}
    measured = {"unseen": {"embedding": {"R@1": 0.5}}, "open_set": detection}
    lines = [ResultLine.of(job, measure, values=values, **about) for measure, values in measured.items()]
    page = write_report(lines, tmp_path, {}).read_text()
    assert (
        "| CUB-200 | unseen classes | EfficientNet-Lite0 | CAM | .900 (1) | .500 (1) | .700 (1) | 75.00% (1) |" in page
    )
    assert page.rstrip().endswith("Not run: CIFAR-100 with ResNet-18.")
    assert "- 1 runs on a, torch 1, commit None." in page


def test_the_page_counts_what_is_above_within_and_below(tmp_path: Path) -> None:
    ways = {way: {"mAP": 0.99, "P@20": 0.954, "P@100": 0.1} for way in METHODS}
    lines = [
        ResultLine.of(
            Job("svhn", "resnet18", loss, "kedge", 0),
            "scores",
            values=ways | {"accuracy": 0.9, "knn1": 0.9},
            **{"command": "", "config_hash": "", "dataset_hash": "abc", "seconds": 1.0},
        )
        for loss in ("cross_entropy", "cam")
    ]
    (tmp_path / "datasets.json").write_text(
        '{"abc": {"name": "re-cropped", "description": "its digits were cut again"}}'
    )
    page = write_report(lines, tmp_path, {}).read_text()
    assert "- SVHN, re-cropped: its digits were cut again.\n" in page
    assert "- SVHN, re-cropped.\n" in page
    (overview,) = re.findall(r"## At a glance\n\n(.*?)\n\n", page, re.S)
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in overview.splitlines()[2:]]
    table1 = {row[2]: list(map(int, row[3:])) for row in rows if "Table 1" in row[0]}
    # Both ways' mAP are above, P@20 is what is printed, P@100 below; cross-entropy has one mAP printed.
    assert table1["CAM"] == [2, 1, 1]
    assert sum(table1["cross-entropy"]) == 3
    # What these runs share with other experiments is not said to be theirs.
    assert "## Ablation of the loss (Table 3)\n\nNot run." in page
    assert "## League of losses\n\nNot run." in page
    assert [row[2:] for row in rows if "Table 4" in row[0]] == [
        ["cross-entropy", "0", "0", "1"],
        ["CAM", "0", "0", "1"],
    ]
