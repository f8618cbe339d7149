from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from kedge.errors import DataError
from kedge.evaluation import Report, compare


def scores(value: float) -> dict[str, float]:
    return {"mAP": value, "P@20": value + 0.01, "P@100": value + 0.02}


CAM = Report(
    scores(0.5),
    scores(0.6),
    scores(0.61),
    scores(0.55),
    0.62,
    0.58,
    100,
    2,
    {"loss": "cam", "dataset": "sea"},
    scores(0.52),
)
CE = replace(CAM, brute_force=scores(0.3), accuracy=0.65, left_out=0, meta={"loss": "ce"})


def printed(renderable: RenderableType | Report, *, styled: bool = False) -> str:
    console = Console(file=StringIO(), width=80, force_terminal=styled, color_system="standard" if styled else None)
    console.print(renderable)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_metrics_json_has_the_agreed_shape(tmp_path: Path) -> None:
    CAM.save(tmp_path / "metrics.json")
    content = json.loads((tmp_path / "metrics.json").read_text())
    assert list(content) == [
        "brute_force",
        "label_lists",
        "label_lists_rest_last",
        "anchor_lists",
        "accuracy",
        "knn1",
        "queries",
        "left_out",
        "meta",
        "brute_force_cosine",
    ]
    assert content["label_lists"] == {"mAP": 0.6, "P@20": 0.61, "P@100": 0.62}
    assert Report.load(tmp_path / "metrics.json") == CAM
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.json"]


def test_a_report_of_the_first_release_lacks_cosine(tmp_path: Path) -> None:
    content = CAM.to_json()
    del content["brute_force_cosine"]
    (tmp_path / "metrics.json").write_text(json.dumps(content))
    old = Report.load(tmp_path / "metrics.json")
    assert old == replace(CAM, brute_force_cosine={})
    for table in (old, compare({"old": old, "new": CAM})):
        assert "brute force" in printed(table)
        assert "cosine" not in printed(table)
    old.save(tmp_path / "metrics.json")
    assert Report.load(tmp_path / "metrics.json") == old


def test_scores_of_unseen_classes_are_there_where_they_were_measured(tmp_path: Path) -> None:
    assert "unseen" not in CAM.to_json()
    assert "not trained on" not in printed(CAM)
    spaces = {"embedding": {"R@1": 0.1234, "MAP@R": 0.2345}, "features": {"R@1": 0.3456, "MAP@R": 0.4567}}
    report = replace(CAM, unseen={"classes": 7, "queries": 1200, **spaces})
    report = replace(report, open_set={"svhn": {"images": 26032, "AUROC": 0.9123, "FPR@95": 0.3211, "OSCR": 0.8012}})
    assert "open_set" not in CAM.to_json()
    report.save(tmp_path / "metrics.json")
    assert Report.load(tmp_path / "metrics.json") == report
    text = printed(report)
    assert "1,200 images of 7 classes" in text
    assert all(cell in text for cell in ("svhn", "26,032", "0.9123", "0.3211", "0.8012"))
    assert all(f"{value:.4f}" in text for scores in spaces.values() for value in scores.values())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "cannot be read"),
        ("[]", "not a report"),
        (json.dumps(CAM.to_json() | {"extra": 1}), "not a report"),
        (json.dumps(CAM.to_json() | {"anchor_lists": {"mAP": 1.0}}), "anchor_lists of a report must have"),
    ],
)
def test_a_foreign_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "metrics.json"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        Report.load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        Report.load(tmp_path / "nowhere.json")


def test_a_report_that_cannot_be_saved_says_so(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    for path in (tmp_path / "taken", tmp_path / "missing" / "metrics.json"):
        with pytest.raises(DataError, match="cannot be saved"):
            CAM.save(path)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_one_report_shows_every_number() -> None:
    text = printed(CAM)
    for method in ("brute_force", "brute_force_cosine", "label_lists", "label_lists_rest_last", "anchor_lists"):
        assert all(f"{value:.4f}" in text for value in CAM.scores(method).values())
    assert "sea · cam" in text
    assert "0.6200" in text
    assert "2 left out" in text
    assert "left out" not in printed(CE)


def test_the_best_of_each_column_is_bold() -> None:
    text = printed(compare({"cam": CAM, "ce": CE}), styled=True)
    bold = "\x1b[1m{}\x1b[0m".format
    assert bold("0.5000") in text
    assert bold("0.3000") not in text
    assert bold("0.6500") in text
    assert bold("0.6200") in text  # a tie, in label lists: both are best
    assert max(len(line) for line in printed(compare({"cam": CAM, "ce": CE})).splitlines()) <= 80


def test_one_report_alone_has_no_best() -> None:
    assert "\x1b[1m0." not in printed(compare({"cam": CAM}), styled=True)
