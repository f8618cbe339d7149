"""All results in one page: what was reproduced, on what, how it compares, and what was not run."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from kedge.errors import DataError
from kedge.io import atomic_write
from kedge.reproduce.experiment import Experiment, Selection
from kedge.reproduce.experiments import EXPERIMENTS
from kedge.reproduce.jobs import DataFiles, Job
from kedge.reproduce.paper import display
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


DatasetNotes = Mapping[str, tuple[str, str]]
"""Dataset hash → what the copy is called, and how it differs."""
Verdicts = list[tuple[str, str, str, str]]
"""Experiment, recipe, loss and verdict of every cell that has one; times are of another machine, and left out."""


def write_report(lines: Sequence[ResultLine], out: Path, data_files: DataFiles) -> Path:
    """Write `results.md` and its figures below `out`."""
    notes, verdicts = _dataset_notes(out / NOTES), Verdicts()
    sections = []
    for experiment in EXPERIMENTS.values():
        sections += [f"## {experiment.title}\n", *_section(experiment, lines, out, data_files, notes, verdicts)]
    parts = [_OPENING, _machines(lines, notes), _overview(verdicts), *sections]
    path = out / "results.md"
    with atomic_write(path) as stream:
        stream.write(("\n".join(parts).rstrip() + "\n").encode())
    return path


def _dataset_notes(path: Path) -> DatasetNotes:
    if not path.exists():
        return {}
    try:
        return {key: (note["name"], note["description"]) for key, note in json.loads(path.read_text("utf-8")).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f'{path} must map hashes to {{"name": …, "description": …}}: {error}.') from error


def _section(
    experiment: Experiment,
    lines: Sequence[ResultLine],
    out: Path,
    data_files: DataFiles,
    dataset_notes: DatasetNotes,
    verdicts: Verdicts,
) -> Iterator[str]:
    """Tables and figures of an experiment, and what was not run of it."""
    results, places = Results(lines), set()
    for selection, own in _selections(experiment, lines, data_files):
        places |= {(line.dataset, line.encoder) for line in own}
        copies = {
            line.dataset: dataset_notes[line.dataset_hash][0] for line in own if line.dataset_hash in dataset_notes
        }
        notes = [f"{display(dataset)}, {name}." for dataset, name in copies.items()]
        for table in experiment.tables(results, selection):
            yield replace(table, notes=(*table.notes, *notes)).markdown().strip() + "\n"
            verdicts += _verdicts(experiment, selection.recipes[0], table)
        figures = experiment.figures(results, selection)
        if experiment.needs_images and not figures:
            yield (
                f"Its figures show the dataset's pictures: `kedge reproduce {experiment.name} --no-run` draws them "
                "where those are.\n"
            )
        for name, figure in figures.items():
            settings = [word.rpartition(".")[2].replace("=", "") for word in selection.settings]
            write_figure(figure, out / "figures", "-".join([name, *settings]))
            yield f"![{experiment.title}](figures/{'-'.join([name, *settings])}.png)\n"
    if not places:
        yield "Not run.\n"
    elif missing := [
        pair for pair in itertools.product(experiment.datasets, experiment.encoders) if pair not in places
    ]:
        yield _not_run(missing)


def _selections(
    experiment: Experiment, lines: Sequence[ResultLine], data_files: DataFiles
) -> Iterator[tuple[Selection, list[ResultLine]]]:
    """What was run of an experiment, with each recipe and settings, and the lines that show it.

    Experiments share runs: only those datasets and encoders count of which some run is specific to this experiment.
    """
    accepted = [line for line in lines if line.loss in experiment.losses or experiment.accepts_any_loss]
    for group in _by_recipe(line for line in accepted if line.measure == experiment.measures[-1]):
        selection = _selection(experiment, group, data_files)
        if selection.sweep == ():
            continue
        keys = {job.key for job in experiment.jobs(selection)}
        own = [line for line in group if line.key in keys]
        specific = {(line.dataset, line.encoder) for line in own if experiment.is_specific(line.job)}
        if own := [line for line in own if (line.dataset, line.encoder) in specific]:
            yield _selection(experiment, own, data_files), own


def _selection(experiment: Experiment, lines: Sequence[ResultLine], data_files: DataFiles) -> Selection:
    """The part of an experiment that these lines of one recipe and its settings are of."""

    def ordered(names: Iterable[str], known: Sequence[str]) -> tuple[str, ...]:
        """In the experiment's order, the others behind."""
        return tuple(sorted(dict.fromkeys(names), key=lambda name: (*known, name).index(name)))

    changes = [change.partition("=") for line in lines for change in line.changes]
    numbers = tuple(sorted({int(value) for name, _, value in changes if name == experiment.sweeps}))
    return Selection(
        datasets=ordered((line.dataset for line in lines), experiment.datasets),
        encoders=ordered((line.encoder for line in lines), experiment.encoders),
        losses=ordered((line.loss for line in lines), experiment.losses),
        recipes=(lines[0].recipe,),
        seeds=tuple(sorted({line.seed for line in lines})),
        sweep=numbers if experiment.sweeps else None,
        settings=tuple(lines[0].settings),
        data_files=data_files,
    )


def _by_recipe(lines: Iterable[ResultLine]) -> Iterator[list[ResultLine]]:
    """Lines of one recipe and its settings, the paper's recipe first."""

    def key(line: ResultLine) -> tuple[bool, str, list[str]]:
        return line.recipe != "paper", line.recipe, line.settings

    for _, group in itertools.groupby(sorted(lines, key=key), key):
        yield list(group)


def _verdicts(experiment: Experiment, recipe: str, table: Table) -> Verdicts:
    return [
        (experiment.title, recipe, display(dict(zip(table.labels, row, strict=True)).get("loss", "cam")), cell.verdict)
        for row, column, cell in table.cells()
        if cell.verdict and column.unit != "ms"
    ]


def _overview(verdicts: Verdicts) -> str:
    """How many cells are above, within and below; nothing where nothing is printed."""
    if not verdicts:
        return ""
    names = ["experiment", "recipe", "loss"]
    frame = pd.DataFrame(verdicts, columns=[*names, "verdict"])
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


def _machines(lines: Sequence[ResultLine], dataset_notes: DatasetNotes) -> str:
    """Hardware, versions, recipes and datasets of the runs."""
    runs = [line for line in lines if line.measure == "scores"]
    machines = [line.machine for line in runs]
    kinds = Counter((one.get("gpu") or one.get("cpu"), one.get("torch"), one.get("commit")) for one in machines)
    items = [
        f"- {count} runs on {where}, torch {torch}, commit {commit}." for (where, torch, commit), count in kinds.items()
    ]
    for group in _by_recipe(runs):
        recipe, settings = group[0].recipe, group[0].settings
        epochs = Job("cifar100", "resnet18", "cam", recipe, 0).config.recipe.epochs
        changed = f"with {' '.join(settings)}" if settings else "as it is"
        items.append(f"- {len(group)} of them with recipe {recipe}, which has {epochs} epochs, {changed}.")
    for dataset, key in {
        line.dataset: line.dataset_hash for line in runs if line.dataset_hash in dataset_notes
    }.items():
        items.append(f"- {display(dataset)}, {': '.join(dataset_notes[key])}.")
    return "\n".join(["## On what\n", *items, ""])


def _not_run(missing: Sequence[tuple[str, str]]) -> str:
    encoders = pd.DataFrame(missing, columns=["dataset", "encoder"]).groupby("dataset", sort=False)["encoder"]
    listed = "; ".join(f"{display(dataset)} with {', '.join(map(display, names))}" for dataset, names in encoders)
    reasons = ""
    if any(encoder == "swin_t" for _, encoder in missing):
        reasons += " Swin-T starts from weights that must be downloaded."
    if {dataset for dataset, _ in missing} & {"food101", "tiny_imagenet"}:
        reasons += " Food-101 and Tiny ImageNet must be downloaded."
    return f"Not run: {listed}.{reasons}\n"
