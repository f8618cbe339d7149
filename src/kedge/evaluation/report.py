"""The reports of evaluations: saved as ``metrics.json``, shown as tables, compared with others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from kedge.errors import DataError
from kedge.io import atomic_write

if TYPE_CHECKING:
    import pandas as pd

    from kedge.evaluation.classes import ClassScores

METHODS = ("brute_force", "brute_force_cosine", "label_lists", "label_lists_rest_last", "anchor_lists")
METRICS = ("mAP", "P@20", "P@100")
TITLES = {
    "brute_force": "brute force",
    "brute_force_cosine": "brute force, cosine",
    "label_lists": "label lists",
    "label_lists_rest_last": "label lists, rest last",
    "anchor_lists": "anchor lists",
    "two_stage": "two-stage",
}
"""What the methods are called in tables."""


class BaseReport:
    """What a report of a model and one of a gallery have in common: scores for each of its search methods."""

    methods: ClassVar[tuple[str, ...]]
    meta: dict[str, Any]
    classes: ClassScores | None

    def scores(self, method: str) -> dict[str, float]:
        """The scores of one search method."""
        values: dict[str, float] = getattr(self, method)
        return values

    def to_pandas(self) -> pd.DataFrame:
        """A row for each search method and a column for each score."""
        import pandas as pd

        rows = {method: scores for method in self.methods if (scores := self.scores(method))}
        return pd.DataFrame.from_dict(rows, orient="index").rename_axis("search")

    def to_json(self) -> dict[str, Any]:
        """The content of ``metrics.json``."""
        names = [entry.name for entry in fields(self)]  # type: ignore[arg-type]
        return {name: getattr(self, name) for name in names if name != "classes"}

    def save(self, path: str | Path) -> None:
        """Write ``metrics.json``, all or nothing; the scores of the classes have files of their own."""
        path = Path(path)
        text = json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n"
        try:
            with atomic_write(path) as stream:
                stream.write(text.encode())
        except OSError as error:
            raise DataError(f"The report cannot be saved as {path}: {error.strerror}; choose another place.") from error

    def _score_table(self, title: str, *caption: str) -> Table:
        rows = {method: scores for method in self.methods if (scores := self.scores(method))}
        table = new_table("search", *next(iter(rows.values())), title=escape(title) or None, caption="\n".join(caption))
        for method, scores in rows.items():
            table.add_row(TITLES[method], *(f"{score:.4f}" for score in scores.values()))
        return table


@dataclass(frozen=True)
class Report(BaseReport):
    """The scores of one model on one dataset; each method maps mAP, P@20 and P@100 to a number."""

    methods: ClassVar[tuple[str, ...]] = METHODS

    brute_force: dict[str, float]
    label_lists: dict[str, float]
    label_lists_rest_last: dict[str, float]
    anchor_lists: dict[str, float]
    accuracy: float
    knn1: float
    queries: int
    left_out: int
    meta: dict[str, Any] = field(default_factory=dict)
    brute_force_cosine: dict[str, float] = field(default_factory=dict)
    """By cosine instead of Euclidean distance; empty in a report of 0.1, which did not measure it."""
    unseen: dict[str, Any] = field(default_factory=dict)
    """Of classes kept out of training, searched among themselves or in their gallery: R@k, R-precision, MAP@R and NMI
    by embedding and by raw features."""
    open_set: dict[str, Any] = field(default_factory=dict)
    """Open-set detection, unknown against test images, by the source of the unknown: AUROC, FPR at 95 % TPR, OSCR."""
    classes: ClassScores | None = field(default=None, compare=False, repr=False)
    """Scores of each class and the confusion matrix; None in a report that was read from ``metrics.json``."""

    def to_json(self) -> dict[str, Any]:
        """The content of ``metrics.json``."""
        content = super().to_json()
        return {name: part for name, part in content.items() if part or name not in ("unseen", "open_set")}

    @classmethod
    def from_json(cls, content: Any) -> Self:
        """The report with this content; DataError where it is none."""
        names = {entry.name for entry in fields(cls)} - {"classes"}
        if isinstance(content, dict):
            content = {"brute_force_cosine": {}, "unseen": {}, "open_set": {}, **content}
        if not isinstance(content, dict) or content.keys() != names:
            raise DataError(f"This is not a report of kedge evaluate, whose keys are {', '.join(sorted(names))}.")
        for method in METHODS:
            scores = content[method]
            unmeasured = method == "brute_force_cosine" and scores == {}
            if not unmeasured and (not isinstance(scores, dict) or scores.keys() != set(METRICS)):
                raise DataError(f"{method} of a report must have the scores {', '.join(METRICS)}.")
        return cls(**content)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read the ``metrics.json`` that :meth:`save` wrote."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read as metrics.json: {error}.") from error
        return cls.from_json(content)

    def __rich__(self) -> RenderableType:
        title = " · ".join(str(self.meta[key]) for key in ("dataset", "model", "loss") if key in self.meta)
        source = f" from {self.meta['against']}" if "against" in self.meta else ""
        caption = f"classification {self.accuracy:.4f} · 1-NN {self.knn1:.4f} · {self.queries:,} queries{source}"
        notes = left_out_note(self.left_out)
        if in_gallery := self.meta.get("in_gallery"):
            notes.append(f"{in_gallery:,} of them are training images, which score higher than new images do")
        table = self._score_table(title, caption, *notes)
        return Group(table, *self._other_tables()) if self.unseen or self.open_set else table

    def _other_tables(self) -> Iterator[Table]:
        if self.unseen:
            title = f"{self.unseen['queries']:,} images of {self.unseen['classes']:,} classes that were not trained on"
            spaces = {name: part for name, part in self.unseen.items() if isinstance(part, dict)}
            yield _score_rows("ranked by", spaces, title)
        if self.open_set:
            yield _score_rows("open set", self.open_set, "Unknown against test images, by their familiarity")


def _score_rows(kind: str, rows: Mapping[str, Mapping[str, float]], title: str) -> Table:
    """A row of scores for each name; those of the first say which."""
    table = new_table(kind, *next(iter(rows.values())), title=title)
    for name, scores in rows.items():
        values = (f"{score:,}" if isinstance(score, int) else f"{score:.4f}" for score in scores.values())
        table.add_row(escape(name), *values)
    return table


def left_out_note(count: int) -> list[str]:
    """A line on the queries without a score."""
    return [f"{count:,} left out: no item of the gallery has their class"] if count else []


def compare(reports: Mapping[str, Report]) -> RenderableType:
    """Several reports, one row each in every group; the best of a column within its group is bold.

    Only numbers in one column of one group are comparable: losses are never ranked across search methods.
    """
    searches = new_table("search", "loss", *METRICS, left=2)
    for method in METHODS:
        if not all(report.scores(method) for report in reports.values()):
            continue  # a report of 0.1 lacks cosine
        columns = [[report.scores(method)[metric] for report in reports.values()] for metric in METRICS]
        _add_group(searches, (TITLES[method],), reports, columns)
    classes = new_table("loss", "classification", "1-NN")
    columns = [[report.accuracy for report in reports.values()], [report.knn1 for report in reports.values()]]
    _add_group(classes, (), reports, columns)
    return Group(searches, classes)


def _add_group(table: Table, label: tuple[str, ...], reports: Mapping[str, Report], columns: list[list[float]]) -> None:
    cells = [_mark_best(column) for column in columns]
    for row, name in enumerate(reports):
        table.add_row(*(text if row == 0 else "" for text in label), escape(name), *(column[row] for column in cells))
    table.add_section()


def _mark_best(values: list[float]) -> list[str]:
    shown = [f"{value:.4f}" for value in values]
    best = max(shown, default="")
    return [f"[bold]{text}[/bold]" if text == best and len(shown) > 1 else text for text in shown]


def new_table(*names: str, left: int = 1, title: str | None = None, caption: str | None = None) -> Table:
    """An empty table whose columns are numbers, but for the first ones (`left`)."""
    table = Table(box=box.SIMPLE_HEAD, title=title, caption=caption, title_justify="left", caption_justify="left")
    for position, name in enumerate(names):
        table.add_column(name, justify="left" if position < left else "right", no_wrap=position >= left)
    return table
