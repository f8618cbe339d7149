"""All results in one page: what was reproduced, on what, how it compares, and what was not run."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd

from kedge.errors import DataError
from kedge.io import atomic_write
from kedge.reproduce.experiment import Experiment, Selection
from kedge.reproduce.experiments import EXPERIMENTS
from kedge.reproduce.jobs import DataFiles, Job
from kedge.reproduce.names import display
from kedge.reproduce.plots import write_figure
from kedge.reproduce.results import ResultLine, Results
from kedge.reproduce.tables import MARKS, Table

__all__ = ["write_report"]

_OPENING = """\
# The paper, reproduced

Every number on this page was written by `kedge reproduce report` from [result lines](results.jsonl), which hold the
overrides, seeds, times, machine, versions and commit of each run. A cell holds mean ± standard deviation and, in
brackets, the number of seeds; "paper" is what is printed there. ↑, = and ↓ say that ours is above, within or below the
printed mean ± two standard deviations.

The paper's tables are not like for like: its mAP of CAM is that of two-stage search, that of the other losses brute
force. So each experiment is shown as printed and, for every loss, under all ways to search; compare losses within one
column only. Label lists send a query to the list of its nearest class, and what is not in that list counts as missed;
with the rest last, everything else follows behind the list, as the paper's numbers suggest; anchor lists hold what lies
nearest to an anchor, whatever its label.

## What differs from the paper

- CAM's head is bounded, without which training can linger at the mean of the anchors ([why](recipe.md)); so is the
  recipe called `paper` here, which otherwise follows the paper: Adam, rate 1e-3, halved on a plateau.
- ResNets begin with a 3 × 3 convolution and no pooling where pictures have at most 64 pixels. The paper does not say.
- The plateau is seen on a tenth of the training pictures, which are held out with the recipe `paper`; `kedge` trains on
  all of them. On which pictures its settings were chosen is said [there](recipe.md).
- The recipe `kedge` was made for CAM. Where another loss cannot use it (SGD's rates, mixed pictures), it has Adam with
  rate 1e-3 and, for pairs and proxies, no CutMix (`config/loss/`); nothing was tuned for the other losses.
- Training is in bfloat16 on a GPU, and the gallery is the whole training set.
"""

NOTES = "datasets.json"
"""The file beside result lines that describes datasets which are not quite the official ones, by their hash."""


def write_report(lines: Sequence[ResultLine], out: Path, data_files: DataFiles) -> Path:
    """Write `results.md` and its figures below `out`."""
    report = _Report(lines, out, data_files, _dataset_notes(out / NOTES))
    sections = [part for experiment in EXPERIMENTS.values() for part in report.section(experiment)]
    parts = [_OPENING, report.machines(), report.overview(), *sections]
    path = out / "results.md"
    with atomic_write(path) as stream:
        stream.write(("\n".join(parts).rstrip() + "\n").encode())
    return path


def _dataset_notes(path: Path) -> dict[str, tuple[str, str]]:
    """Dataset hash → what the copy is called, and how it differs."""
    if not path.exists():
        return {}
    try:
        return {key: (note["name"], note["description"]) for key, note in json.loads(path.read_text("utf-8")).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f'{path} must map hashes to {{"name": …, "description": …}}: {error}.') from error


@dataclass
class _Report:
    lines: Sequence[ResultLine]
    out: Path
    data_files: DataFiles
    dataset_notes: Mapping[str, tuple[str, str]]
    verdicts: list[tuple[str, str, str, str]] = field(default_factory=list)
    """Experiment, recipe, loss and verdict of every cell that has one; times are of another machine, and left out."""

    def section(self, experiment: Experiment) -> Iterator[str]:
        """Tables and figures of an experiment, and what was not run of it."""
        yield f"## {experiment.title}\n"
        lines = _specific(experiment, [line for line in self.lines if _belongs(line, experiment, self.data_files)])
        if not lines:
            yield "Not run.\n"
            return
        results = Results(self.lines)
        for (recipe, settings), group in _by_recipe(lines).items():
            selection = Selection(
                datasets=_ordered((line.dataset for line in group), experiment.datasets),
                encoders=_ordered((line.encoder for line in group), experiment.encoders),
                losses=_ordered((line.loss for line in group), experiment.losses),
                recipes=(recipe,),
                seeds=tuple(sorted({line.seed for line in group})),
                sweep=_swept(experiment, group),
                settings=settings,
                data_files=self.data_files,
            )
            copies = {line.dataset: self.dataset_notes[line.dataset_hash][0] for line in group if self._noted(line)}
            notes = [f"{display(dataset)}, {name}." for dataset, name in copies.items()]
            for table in experiment.tables(results, selection):
                yield replace(table, notes=(*table.notes, *notes)).markdown().strip() + "\n"
                self._collect_verdicts(experiment, recipe, table)
            figures = experiment.figures(results, selection)
            if experiment.needs_images and not figures:
                yield (
                    f"Its figures show the dataset's pictures: `kedge reproduce {experiment.name} --no-run` draws them "
                    "where those are.\n"
                )
            for name, figure in figures.items():
                if settings:
                    name = f"{name}-{'-'.join(word.rpartition('.')[2].replace('=', '') for word in settings)}"
                write_figure(figure, self.out / "figures", name)
                yield f"![{experiment.title}](figures/{name}.png)\n"
        if missing := _not_run(experiment, lines):
            yield missing + "\n"

    def overview(self) -> str:
        """How many cells are above, within and below; nothing where nothing is printed."""
        if not self.verdicts:
            return ""
        frame = pd.DataFrame(self.verdicts, columns=["experiment", "recipe", "loss", "verdict"])
        names = ["experiment", "recipe", "loss"]
        counts = frame.groupby(names, sort=False)["verdict"].value_counts().unstack(fill_value=0)
        counts = counts.reindex(frame[names].drop_duplicates(), columns=list(MARKS), fill_value=0)
        rows = [
            "## At a glance\n",
            "| experiment | recipe | loss | above | within | below |",
            "|---|---|---|---:|---:|---:|",
            *(f"| {' | '.join(map(str, row))} |" for row in counts.reset_index().itertuples(index=False)),
        ]
        note = (
            "Cells that ran, against the printed mean ± two standard deviations; times, which were taken on another "
            "machine, are left out."
        )
        return "\n".join([*rows, "", note, ""])

    def machines(self) -> str:
        """Hardware, versions and recipes of the runs."""
        runs = [line for line in self.lines if line.measure == "scores"]
        kinds = Counter(
            (line.machine.get("gpu") or line.machine.get("cpu"), line.machine.get("torch"), line.machine.get("commit"))
            for line in runs
        )
        items = [
            f"- {count} runs on {where}, torch {torch}, commit {commit}."
            for (where, torch, commit), count in kinds.items()
        ]
        for (recipe, settings), group in _by_recipe(runs).items():
            epochs = Job("cifar100", "resnet18", "cam", recipe, 0).config.recipe.epochs
            changed = f"with {' '.join(settings)}" if settings else "as it is"
            items.append(f"- {len(group)} of them with recipe {recipe}, which has {epochs} epochs, {changed}.")
        for dataset, line in {line.dataset: line for line in runs if self._noted(line)}.items():
            name, description = self.dataset_notes[line.dataset_hash]
            items.append(f"- {display(dataset)}, {name}: {description}.")
        return "\n".join(["## On what\n", *items, ""])

    def _noted(self, line: ResultLine) -> bool:
        return line.dataset_hash in self.dataset_notes

    def _collect_verdicts(self, experiment: Experiment, recipe: str, table: Table) -> None:
        for labels, cells in table.rows.items():
            loss = labels[table.labels.index("loss")] if "loss" in table.labels else experiment.losses[0]
            for cell, column in zip(cells, table.columns, strict=True):
                if cell is not None and cell.verdict and column.unit != "ms":
                    self.verdicts.append((experiment.title, recipe, display(loss), cell.verdict))


def _belongs(line: ResultLine, experiment: Experiment, data_files: DataFiles) -> bool:
    """Whether a run is one of the experiment's; of an experiment with several measures, by its last measure."""
    if line.measure != experiment.measures[-1]:
        return False
    if line.loss not in experiment.losses and not experiment.accepts_any_loss:
        return False
    sweep = _swept(experiment, [line])
    if sweep == ():
        return False
    selection = Selection(
        (line.dataset,),
        (line.encoder,),
        (line.loss,),
        (line.recipe,),
        (line.seed,),
        sweep=sweep,
        settings=tuple(line.settings),
        data_files=data_files,
    )
    return any(job.key == line.key for job in experiment.jobs(selection))


def _specific(experiment: Experiment, lines: Sequence[ResultLine]) -> list[ResultLine]:
    """Experiments share runs: the lines of settings with which this one was run."""

    def place(line: ResultLine) -> tuple[str, ...]:
        return line.recipe, line.dataset, line.encoder, *line.settings

    places = {place(line) for line in lines if experiment.is_specific(line.job)}
    return [line for line in lines if place(line) in places]


def _swept(experiment: Experiment, lines: Iterable[ResultLine]) -> tuple[int, ...] | None:
    """The numbers that a sweep was run with; None for experiments that are no sweep."""
    if experiment.sweeps is None:
        return None
    name = f"{experiment.sweeps}="
    numbers = {int(change.removeprefix(name)) for line in lines for change in line.changes if change.startswith(name)}
    return tuple(sorted(numbers))


def _by_recipe(lines: Iterable[ResultLine]) -> dict[tuple[str, tuple[str, ...]], list[ResultLine]]:
    """Lines by recipe and settings, the paper's recipe first."""
    groups: dict[tuple[str, tuple[str, ...]], list[ResultLine]] = {}
    for line in sorted(lines, key=lambda line: (line.recipe != "paper", line.recipe, line.settings)):
        groups.setdefault((line.recipe, tuple(line.settings)), []).append(line)
    return groups


def _ordered(names: Iterable[str], known: Sequence[str]) -> tuple[str, ...]:
    """In the experiment's order, the others behind."""
    there = dict.fromkeys(names)
    return (*(name for name in known if name in there), *(name for name in there if name not in known))


def _not_run(experiment: Experiment, lines: Sequence[ResultLine]) -> str:
    there = {(line.dataset, line.encoder) for line in lines}
    missing = [pair for pair in itertools.product(experiment.datasets, experiment.encoders) if pair not in there]
    if not missing:
        return ""
    by_dataset: dict[str, list[str]] = {}
    for dataset, encoder in missing:
        by_dataset.setdefault(dataset, []).append(display(encoder))
    listed = "; ".join(f"{display(dataset)} with {', '.join(encoders)}" for dataset, encoders in by_dataset.items())
    reasons = ""
    if any(encoder == "swin_t" for _, encoder in missing):
        reasons += " Swin-T starts from weights that must be downloaded."
    if by_dataset.keys() & {"food101", "tiny_imagenet"}:
        reasons += " Food-101 and Tiny ImageNet must be downloaded."
    return f"Not run: {listed}.{reasons}"
