"""The report of an evaluation: saved as ``metrics.json``, shown as a table, compared with others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from kedge.errors import DataError
from kedge.io import atomic_write

METHODS = ("brute_force", "brute_force_cosine", "label_lists", "label_lists_rest_last", "anchor_lists")
METRICS = ("mAP", "P@20", "P@100")
TITLES = {
    "brute_force": "brute force",
    "brute_force_cosine": "brute force, cosine",
    "label_lists": "label lists",
    "label_lists_rest_last": "label lists, rest last",
    "anchor_lists": "anchor lists",
}
"""What the methods are called in tables."""


@dataclass(frozen=True)
class Report:
    """The scores of one model on one dataset; each method maps mAP, P@20 and P@100 to a number."""

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
    """Of classes kept out of training, searched among themselves: R@1 and MAP@R by embedding and by raw features."""

    def scores(self, method: str) -> dict[str, float]:
        """The scores of one of ``METHODS``."""
        values: dict[str, float] = getattr(self, method)
        return values

    def to_json(self) -> dict[str, Any]:
        """The content of ``metrics.json``."""
        content = asdict(self)
        return content if self.unseen else {name: content[name] for name in content if name != "unseen"}

    @classmethod
    def from_json(cls, content: Any) -> Self:
        """The report with this content; DataError where it is none."""
        names = {entry.name for entry in fields(cls)}
        if isinstance(content, dict):
            content = {"brute_force_cosine": {}, "unseen": {}, **content}
        if not isinstance(content, dict) or content.keys() != names:
            raise DataError(f"A report has the keys {', '.join(sorted(names))}; this content has others.")
        for method in METHODS:
            scores = content[method]
            unmeasured = method == "brute_force_cosine" and scores == {}
            if not unmeasured and (not isinstance(scores, dict) or scores.keys() != set(METRICS)):
                raise DataError(f"{method} of a report needs the scores {', '.join(METRICS)}.")
        return cls(**content)

    def save(self, path: str | Path) -> None:
        """Write ``metrics.json``, all or nothing."""
        path = Path(path)
        text = json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n"
        try:
            with atomic_write(path) as stream:
                stream.write(text.encode())
        except OSError as error:
            raise DataError(f"The report cannot be saved as {path}: {error.strerror}.") from error

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what :meth:`save` wrote."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read as metrics.json: {error}.") from error
        return cls.from_json(content)

    def __rich__(self) -> RenderableType:
        title = " · ".join(str(self.meta[key]) for key in ("dataset", "model", "loss") if key in self.meta)
        caption = f"classification {self.accuracy:.4f} · 1-NN {self.knn1:.4f} · {self.queries:,} queries"
        if self.left_out:
            caption += f"\n{self.left_out:,} left out: nothing relevant in the gallery"
        table = _table("search", *METRICS, title=escape(title) or None, caption=caption)
        for method in METHODS:
            if scores := self.scores(method):
                table.add_row(TITLES[method], *(f"{scores[metric]:.4f}" for metric in METRICS))
        return Group(table, self._unseen_table()) if self.unseen else table

    def _unseen_table(self) -> Table:
        title = f"{self.unseen['queries']:,} images of {self.unseen['classes']:,} classes that were not trained on"
        table = _table("ranked by", "R@1", "MAP@R", title=title)
        for name, scores in self.unseen.items():
            if isinstance(scores, dict):
                table.add_row(name, f"{scores['R@1']:.4f}", f"{scores['MAP@R']:.4f}")
        return table


def compare(reports: Mapping[str, Report]) -> RenderableType:
    """Several reports, one row each in every group; the best of a column within its group is bold.

    Only numbers in one column of one group are comparable: losses are never ranked across search methods.
    """
    searches = _table("search", "loss", *METRICS, left=2)
    for method in METHODS:
        if not all(report.scores(method) for report in reports.values()):
            continue  # a report of 0.1 lacks cosine
        columns = [[report.scores(method)[metric] for report in reports.values()] for metric in METRICS]
        _add_group(searches, (TITLES[method],), reports, columns)
    classes = _table("loss", "classification", "1-NN")
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


def _table(*names: str, left: int = 1, title: str | None = None, caption: str | None = None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, caption=caption, title_justify="left", caption_justify="left")
    for position, name in enumerate(names):
        table.add_column(name, justify="left" if position < left else "right", no_wrap=position >= left)
    return table
