"""Scores of each class and confusions, compared with scikit-learn's and with plain loops."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from rich.console import Console
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from kedge.errors import DataError
from kedge.evaluation import ClassScores, evaluate_embeddings
from kedge.evaluation.classes import score_classes

NAMES = ["ape", "bee", "[cat]", "dog", "never asked", "never stored"]


class Asked:
    """Queries of five classes, some without a prediction, some without a relevant item."""

    rng = np.random.default_rng(0)
    labels = rng.choice([0, 1, 2, 3, 5], 200)
    predicted = np.where(rng.random(200) < 0.6, labels, rng.integers(-1, 5, 200))
    items = rng.choice([0, 1, 2, 3, 4], 300)
    scores = rng.random(200)
    relevant = np.where(labels == 5, 0, 7)
    classes = score_classes(NAMES, labels, predicted, items, {"mAP": scores, "P@20": scores / 2}, relevant)


def test_precision_recall_and_f1_are_those_of_scikit_learn() -> None:
    table = Asked.classes.table
    assert list(table.index) == NAMES
    expected = precision_recall_fscore_support(Asked.labels, Asked.predicted, labels=range(6), zero_division=np.nan)
    for column, values in zip(("precision", "recall", "F1"), expected, strict=False):
        np.testing.assert_allclose(table[column], values)
    assert table["queries"].tolist() == expected[3].tolist()
    assert table["predicted"].tolist() == [(Asked.predicted == number).sum() for number in range(6)]
    assert table["items"].tolist() == [(Asked.items == number).sum() for number in range(6)]


def test_retrieval_scores_are_means_over_queries_with_something_to_find() -> None:
    table = Asked.classes.table
    for number, name in enumerate(NAMES[:4]):
        assert table.loc[name, "mAP"] == pytest.approx(Asked.scores[Asked.labels == number].mean())
        assert table.loc[name, "P@20"] == pytest.approx(Asked.scores[Asked.labels == number].mean() / 2)
    assert table.loc[["never asked", "never stored"], "mAP"].isna().all()


def test_the_confusion_matrix_is_that_of_scikit_learn() -> None:
    expected = confusion_matrix(Asked.labels, Asked.predicted, labels=range(6))
    assert (Asked.classes.matrix().to_numpy() == expected).all()
    some = ["dog", "ape"]
    assert Asked.classes.matrix(some).to_numpy().tolist() == expected[np.ix_([3, 0], [3, 0])].tolist()
    wrong = Asked.classes.confusions()
    assert wrong["queries"].is_monotonic_decreasing
    assert wrong["queries"].sum() == (Asked.labels != Asked.predicted).sum()
    first = wrong.iloc[0]
    assert first["share"] == first["queries"] / (Asked.labels == NAMES.index(first["class"])).sum()
    assert (wrong["predicted"] == "(none)").any()
    assert Asked.classes.confusion["queries"].sum() == 200


def test_a_report_has_the_scores_of_its_classes() -> None:
    rng = np.random.default_rng(1)
    labels, items, routes = rng.integers(0, 4, 50), rng.integers(0, 4, 90), rng.integers(0, 4, 50)
    vectors = rng.normal(size=(50, 3)), rng.normal(size=(90, 3))
    report = evaluate_embeddings(
        vectors[0], labels, vectors[1], items, query_routes=routes, gallery_routes=items, classes=list("abcd")
    )
    assert report.classes is not None
    table = report.classes.table
    assert list(table.index) == list("abcd")
    assert (table["mAP"] * table["queries"]).sum() / 50 == pytest.approx(report.brute_force["mAP"])
    assert (table["P@20"] * table["queries"]).sum() / 50 == pytest.approx(report.brute_force["P@20"])
    assert np.trace(report.classes.matrix().to_numpy()) / 50 == pytest.approx(report.accuracy)
    scores = report.to_pandas()
    assert scores.loc["anchor_lists", "P@100"] == report.anchor_lists["P@100"]
    assert list(scores.columns) == ["mAP", "P@20", "P@100"]
    assert "classes" not in report.to_json()
    far = np.array([-(10**12), 0, 7, 10**12])
    unnamed = evaluate_embeddings(
        vectors[0], far[labels], vectors[1], far[items], query_routes=far[routes], gallery_routes=far[items]
    )
    assert unnamed.classes is not None
    assert list(unnamed.classes.table.index) == ["-1000000000000", "0", "7", "1000000000000"]
    assert unnamed.classes.table.to_numpy().tolist() == table.to_numpy().tolist()


def test_files(tmp_path: Path) -> None:
    files = Asked.classes.save(tmp_path, "mine_")
    assert [file.name for file in files] == ["mine_classes.csv", "mine_confusion.csv", "mine_confusion.png"]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    pd.testing.assert_frame_equal(pd.read_csv(files[0], index_col="class"), Asked.classes.table)
    pd.testing.assert_frame_equal(pd.read_csv(files[1]), Asked.classes.confusion)
    with Image.open(files[2]) as image:
        assert image.format == "PNG"
    with pytest.raises(DataError, match="cannot be saved in"):
        Asked.classes.save(tmp_path / "missing")


def test_the_plot_has_every_cell() -> None:
    (axes,) = Asked.classes.plot().axes
    expected = confusion_matrix(Asked.labels, Asked.predicted, labels=range(6))
    shown = {(text.get_position()[1], text.get_position()[0]): int(text.get_text()) for text in axes.texts}
    assert shown == {(row, column): expected[row, column] for row, column in np.argwhere(expected)}
    assert [label.get_text() for label in axes.get_yticklabels()] == NAMES


def many() -> ClassScores:
    """200 classes, of which 17 and 170 are taken for each other, and 5 for 170."""
    labels = np.repeat(np.arange(200), 10)
    predicted = labels.copy()
    predicted[170:177], predicted[1700:1704], predicted[50:53] = 170, 17, 170
    return score_classes(
        [f"c{number}" for number in range(200)], labels, predicted, labels, {"mAP": labels, "P@20": labels}, labels + 1
    )


def test_of_very_many_classes_the_most_confused_are_shown() -> None:
    classes = many()
    assert classes.most_confused(3) == ["c5", "c17", "c170"]
    assert len(classes.most_confused(30)) == 30
    (axes,) = classes.plot(3).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["c5", "c17", "c170"]
    assert "3 most confused of 200 classes" in axes.figure.get_suptitle()  # type: ignore[union-attr]
    assert list(classes.worst(3).index) == ["c17", "c170", "c5"]


def printed(classes: ClassScores) -> str:
    console = Console(file=StringIO(), width=100)
    console.print(classes)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_a_terminal_shows_the_worst() -> None:
    text = printed(many())
    lines = [line.split() for line in text.splitlines() if line.strip()]
    worst = next(number for number, words in enumerate(lines) if words == ["Worst", "classes"])
    assert lines[worst + 3][:2] == ["c17", "10"]
    assert ["c17", "c170", "7", "70%"] in lines
    assert ["c170", "c17", "4", "40%"] in lines
    assert "[cat]" in printed(Asked.classes), "names are no markup"
    right = score_classes(["a", "b"], *[np.array([0, 1])] * 3, {"mAP": np.ones(2)}, np.ones(2))
    assert "no query was given a wrong class" in printed(right)
