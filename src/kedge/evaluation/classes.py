"""Scores of each class, and the confusion matrix: as tables, as files and as a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Group, RenderableType
from rich.markup import escape

from kedge.errors import DataError
from kedge.evaluation.plots import confusion_plot
from kedge.evaluation.report import new_table
from kedge.io import atomic_write

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["ClassScores", "score_classes"]

_NONE = "(none)"
"""In the place of a predicted class where there is none."""


@dataclass(frozen=True, eq=False)
class ClassScores:
    """How well each class is recognised and retrieved."""

    table: pd.DataFrame
    """A row for each class: its items in the gallery, its queries, how often it was predicted, precision, recall and F1
    of the prediction, and the means of its queries' retrieval scores (brute force); NaN where there is nothing to
    divide by."""
    confusion: pd.DataFrame
    """The cells of the confusion matrix that are not zero, the largest first: class, predicted class, queries, and
    their share of the class's queries."""

    def worst(self, count: int = 5) -> pd.DataFrame:
        """The classes with the lowest F1, of those that have queries."""
        tested = self.table[self.table["queries"] > 0]
        return tested.sort_values("F1", kind="stable").head(count)

    def confusions(self, count: int | None = None) -> pd.DataFrame:
        """The most frequent wrong predictions; by default all."""
        wrong = self.confusion[self.confusion["class"] != self.confusion["predicted"]]
        return wrong.head(len(wrong) if count is None else count)

    def matrix(self, classes: Sequence[str] | None = None) -> pd.DataFrame:
        """Queries by class (rows) and predicted class (columns); of some classes only, where all would be too many."""
        names = list(self.table.index) if classes is None else list(classes)
        shown = self.confusion[["class", "predicted"]].isin(set(names)).all(axis=1)
        cells = self.confusion[shown].pivot_table("queries", "class", "predicted", "sum")
        return cells.reindex(index=names, columns=names).fillna(0).astype(int)

    def most_confused(self, count: int) -> list[str]:
        """The classes of the most frequent wrong predictions, at most so many, in the order of the table."""
        if len(self.table) <= count:
            return list(self.table.index)
        pairs = self.confusions()[["class", "predicted"]].to_numpy().ravel().tolist()
        chosen = list(dict.fromkeys(name for name in [*pairs, *self.worst(count).index] if name != _NONE))[:count]
        return [name for name in self.table.index if name in set(chosen)]

    def plot(self, count: int = 30) -> Figure:
        """The confusion matrix; of more than `count` classes, that of the most confused."""
        names = self.most_confused(count)
        return confusion_plot(self.matrix(names), self.table["queries"][names].to_numpy(), len(self.table))

    def save(self, folder: str | Path, prefix: str = "") -> list[Path]:
        """Write ``classes.csv``, ``confusion.csv`` and ``confusion.png``, each with the prefix; returns their paths."""
        files = [Path(folder, prefix + name) for name in ("classes.csv", "confusion.csv", "confusion.png")]
        try:
            for file, frame in zip(files, (self.table.reset_index(), self.confusion), strict=False):
                with atomic_write(file) as stream:
                    stream.write(frame.to_csv(index=False).encode())
            with atomic_write(files[-1]) as stream:
                self.plot().savefig(stream, format="png")
        except OSError as error:
            reason = f"{error.strerror}; choose another place."
            raise DataError(f"The scores of the classes cannot be saved in {folder}: {reason}") from error
        return files

    def __rich__(self) -> RenderableType:
        """The worst classes and the most frequent confusions."""
        wrong = self.confusions(5)
        if wrong.empty:
            return f"All {len(self.table):,} classes: no query was given a wrong class."
        last = self.table.columns[-2:]
        classes = new_table("class", "queries", "precision", "recall", "F1", *last, title="Worst classes")
        worst = self.worst().query("F1 < 1")[["queries", "precision", "recall", "F1", *last]]
        for name, queries, *scores in worst.itertuples():
            shown = ("–" if np.isnan(score) else f"{score:.4f}" for score in scores)
            classes.add_row(escape(name), f"{queries:,}", *shown)
        confusions = new_table("class", "taken for", "queries", "share", left=2, title="Most frequent confusions")
        for name, predicted, queries, share in wrong.itertuples(index=False):
            confusions.add_row(escape(name), escape(predicted), f"{queries:,}", f"{share:.0%}")
        return Group(classes, confusions)


def score_classes(
    names: Sequence[str],
    labels: np.ndarray,
    predicted: np.ndarray,
    items: np.ndarray,
    scores: Mapping[str, np.ndarray],
    relevant: np.ndarray,
) -> ClassScores:
    """The scores of the classes `names`, of which each query has one (`labels`, a number) and is given one.

    Args:
        names: of the classes.
        labels: the class of each query.
        predicted: the class that each query is given; -1 for none.
        items: the class of each item of the gallery.
        scores: retrieval scores of each query, by the name of their column.
        relevant: how many items are relevant to each query; those without any do not count in its class's scores.
    """
    import pandas as pd

    count = len(names)
    queries, right = (np.bincount(rows, minlength=count) for rows in (labels, labels[labels == predicted]))
    guesses, stored = (np.bincount(rows[rows >= 0], minlength=count) for rows in (predicted, items))
    judged = relevant > 0
    of_class = labels[judged]
    with np.errstate(invalid="ignore"):  # 0 / 0 is NaN
        table = pd.DataFrame(
            {
                "items": stored,
                "queries": queries,
                "predicted": guesses,
                "precision": right / guesses,
                "recall": right / queries,
                "F1": 2 * right / (queries + guesses),
                **{
                    name: np.bincount(of_class, values[judged], count) / np.bincount(of_class, minlength=count)
                    for name, values in scores.items()
                },
            },
            index=pd.Index(names, name="class"),
        )
    cells, sizes = np.unique(np.stack([labels, predicted], axis=1), axis=0, return_counts=True)
    order = np.argsort(-sizes, kind="stable")
    titles = np.array([*names, _NONE], dtype=object)  # -1 is the last
    confusion = pd.DataFrame(
        {
            "class": titles[cells[order, 0]],
            "predicted": titles[cells[order, 1]],
            "queries": sizes[order],
            "share": sizes[order] / queries[cells[order, 0]],
        }
    )
    return ClassScores(table, confusion)
