"""Beyond the paper: more losses, ranked."""

from __future__ import annotations

from dataclasses import replace

from matplotlib.figure import Figure

from kedge.evaluation.tables import TITLES
from kedge.reproduce import figures
from kedge.reproduce.experiments.base import LOSSES, Choice, Experiment, Results, value_at
from kedge.reproduce.jobs import Job
from kedge.reproduce.names import display
from kedge.reproduce.tables import Table, ranks

__all__ = ["League"]


class League(Experiment):
    """More losses, all with the same data, encoder, recipe and budget."""

    name = "league"
    title = "League of losses"
    open_to_others = True
    datasets = ("cifar100",)
    encoders = ("resnet18",)
    losses = (
        *LOSSES,
        *("triplet", "arcface", "cosface", "proxy_anchor", "supcon", "center", "multi_similarity"),
    )

    def tells(self, job: Job) -> bool:
        """The paper's losses are everywhere."""
        return job.loss not in LOSSES

    def tables_of(self, results: Results, choice: Choice) -> list[Table]:
        """Scores, and places within each column."""
        table = self.four_ways(results, choice)
        return [table, ranks(table)]

    def figures(self, results: Results, choice: Choice) -> dict[str, Figure]:
        """All losses side by side."""
        found = {}
        ways = ("brute_force", "label_lists", "anchor_lists")
        finds = {f"mAP, {TITLES[way]}": value_at((way, "mAP")) for way in ways} | {"accuracy": value_at(("accuracy",))}
        for recipe in choice.recipes:
            groups = self.groups(replace(choice, recipes=(recipe,)))
            for dataset, encoder in dict.fromkeys((dataset, encoder) for dataset, encoder, _, _ in groups):
                rows = {}
                for (their_dataset, their_encoder, loss, _), jobs in groups.items():
                    cells = [results.cell(jobs, find) for find in finds.values()]
                    if (their_dataset, their_encoder) == (dataset, encoder) and cells[0].values:
                        rows[display(loss)] = [list(cell.values) for cell in cells]
                if rows:
                    found[f"{self.name}-{dataset}-{encoder}-{recipe}"] = figures.league_chart(
                        rows,
                        list(finds),
                        x_label="mAP, accuracy",
                        title=self.caption(dataset, encoder, recipe),
                    )
        return found
