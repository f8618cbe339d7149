"""Reports as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from kedge.evaluation.report import METHODS, METRICS, Report

TITLES = {
    "brute_force": "brute force",
    "brute_force_cosine": "brute force, cosine",
    "label_lists": "label lists",
    "label_lists_rest_last": "label lists, rest last",
    "anchor_lists": "anchor lists",
}


def show(report: Report) -> RenderableType:
    """One report: a row for each way to search."""
    meta = report.meta
    title = " · ".join(str(meta[key]) for key in ("dataset", "model", "loss") if key in meta)
    caption = f"classification {report.accuracy:.4f} · 1-NN {report.knn1:.4f} · {report.queries:,} queries"
    if report.left_out:
        caption += f"\n{report.left_out:,} left out: nothing relevant in the gallery"
    table = _table("search", *METRICS, title=escape(title) or None, caption=caption)
    for method in METHODS:
        if scores := report.scores(method):
            table.add_row(TITLES[method], *(f"{scores[metric]:.4f}" for metric in METRICS))
    return table


def compare(reports: Mapping[str, Report]) -> RenderableType:
    """Several reports, one row each in every group; the best of a column within its group is bold.

    Only numbers in one column of one group are comparable: losses are never ranked across ways to search.
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
