"""Tables and figures of an experiment, as files."""

from __future__ import annotations

from pathlib import Path

from kedge.reproduce.experiments import Choice, Experiment, Results
from kedge.reproduce.figures import write_figure
from kedge.reproduce.tables import Table, write

__all__ = ["write_all"]


def write_all(experiment: Experiment, results: Results, choice: Choice, out: Path) -> tuple[list[Table], list[Path]]:
    """The tables, and all files that were written below `out`."""
    tables = experiment.tables(results, choice)
    paths = [path for table in tables for path in write(table, out / "tables")]
    for name, figure in experiment.figures(results, choice).items():
        paths += write_figure(figure, out / "figures", name)
    return tables, paths
