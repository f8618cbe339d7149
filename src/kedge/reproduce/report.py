"""All results in one page: what was reproduced, on what, how it compares, and what was not run."""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path

from kedge.errors import DataError
from kedge.io import atomic_write
from kedge.reproduce.experiment import Experiment, Selection
from kedge.reproduce.experiments import EXPERIMENTS
from kedge.reproduce.jobs import WHOLE_RUN, DataFiles, Job, ResultLine, Results
from kedge.reproduce.paper import display
from kedge.reproduce.plots import write_figure
from kedge.reproduce.tables import DEVIATION, MARKS

__all__ = ["write_report"]

NOTES = "datasets.json"
"""The file beside result lines that describes datasets which are not quite the official ones, by their hash."""

DatasetNotes = Mapping[str, tuple[str, str]]
"""Dataset hash → what the copy is called, and how it differs."""
Verdicts = list[tuple[str, str, str, str]]
"""Experiment, recipe, loss and verdict of every cell that has one."""


def write_report(lines: Sequence[ResultLine], out: Path, data_files: DataFiles) -> Path:
    """Write `results.md` and its figures below `out`."""
    notes, verdicts = _dataset_notes(out / NOTES), Verdicts()
    opening = resources.files("kedge.reproduce").joinpath("report.md").read_text("utf-8")
    sections = []
    for experiment in EXPERIMENTS.values():
        sections += [f"## {experiment.title}\n", *_section(experiment, lines, out, data_files, notes, verdicts)]
    parts = [opening, _machines(lines, notes), _overview(verdicts), *sections]
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
        notes = [f"{display(dataset)}, {name}." for dataset, (name, _) in _noted(own, dataset_notes)]
        for table in experiment.tables(results, selection):
            yield replace(table, notes=(*table.notes, *notes)).markdown().strip() + "\n"
            for labels, column, cell in table.cells():
                if verdict := column.verdict(cell):
                    loss = dict(zip(table.labels, labels, strict=True)).get("loss", "cam")
                    verdicts.append((experiment.title, selection.recipe, display(loss), verdict))
        settings = [word.rpartition(".")[2].replace("=", "") for word in selection.settings]
        figures = []
        for name, figure in experiment.figures(results, selection).items():
            figures.append(write_figure(figure, out / "figures", "-".join([name, *settings]))[0])
        if experiment.needs_images and not figures:  # those that were drawn where the images are stay
            places_drawn = sorted({(line.dataset, line.encoder, line.recipe) for line in own})
            drawn = ["-".join([experiment.name, *names, *settings]) for names in places_drawn]
            figures = [png for name in drawn if (png := out / "figures" / f"{name}.png").exists()]
        if experiment.needs_images and not figures:
            yield (
                f"Its figures show the dataset's pictures: `kedge reproduce {experiment.name} --no-run` draws them "
                "where those are.\n"
            )
        for png in figures:
            yield f"![{experiment.title}](figures/{png.name})\n"
    missing = []
    for dataset in experiment.datasets:
        own_encoders = experiment.encoders_of(dataset)
        if encoders := [display(encoder) for encoder in own_encoders if (dataset, encoder) not in places]:
            missing.append(f"{display(dataset)} with {', '.join(encoders)}")
    if not places:
        yield "Not run.\n"
    elif missing:
        yield f"Not run: {'; '.join(missing)}.\n"


def _noted(lines: Iterable[ResultLine], notes: DatasetNotes) -> Iterable[tuple[str, tuple[str, str]]]:
    """The datasets of these lines that are not quite the official ones, and their notes."""
    return {line.dataset: notes[line.dataset_hash] for line in lines if line.dataset_hash in notes}.items()


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
        # Not by their keys, for each of which Hydra would compose a configuration.
        jobs = {replace(job, measures=()) for job in experiment.jobs(selection)}
        own = [line for line in group if replace(line.job, measures=()) in jobs]
        specific = {(line.dataset, line.encoder) for line in own if experiment.is_specific(line.job)}
        if own := [line for line in own if (line.dataset, line.encoder) in specific]:
            yield _selection(experiment, own, data_files), own


def _selection(experiment: Experiment, lines: Sequence[ResultLine], data_files: DataFiles) -> Selection:
    """The part of an experiment that these lines of one recipe and its settings are of."""

    def ordered(attribute: str, known: Sequence[str]) -> tuple[str, ...]:
        """In the experiment's order, the others behind."""
        names = dict.fromkeys(getattr(line, attribute) for line in lines)
        return tuple(sorted(names, key=lambda name: (*known, name).index(name)))

    changes = [change.partition("=") for line in lines for change in line.changes]
    numbers = tuple(sorted({int(value) for name, _, value in changes if name == experiment.sweeps}))
    if numbers and experiment.sweeps_to_all:
        numbers = (*numbers, sys.maxsize)
    return Selection(
        datasets=ordered("dataset", experiment.datasets),
        encoders=ordered("encoder", experiment.encoders),
        losses=ordered("loss", experiment.losses),
        recipe=lines[0].recipe,
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


def _overview(verdicts: Verdicts) -> str:
    """How many cells are above, within and below; nothing where nothing is printed."""
    if not verdicts:
        return ""
    counts = Counter(verdicts)
    labels = dict.fromkeys(verdict[:3] for verdict in verdicts)
    rows = [f"| {' | '.join([*row, *(str(counts[*row, verdict]) for verdict in MARKS)])} |\n" for row in labels]
    return (
        "## At a glance\n\n"
        "| experiment | recipe | loss | above | within | below |\n"
        f"|---|---|---|---:|---:|---:|\n{''.join(rows)}\n"
        f"Cells that ran, against the printed mean ± {DEVIATION}; of times, which were taken on another machine, "
        "only ratios count.\n"
    )


def _machines(lines: Sequence[ResultLine], dataset_notes: DatasetNotes) -> str:
    """Hardware, versions, recipes and datasets of the runs, each once, whatever was measured of it."""
    runs = list({(line.key, line.machine.get("commit")): line for line in lines if line.measure in WHOLE_RUN}.values())
    machines = Counter(tuple(line.machine.get(name) for name in ("gpu", "cpu", "torch", "commit")) for line in runs)
    items = [
        f"- {count} runs on {gpu or cpu}, torch {torch}, commit {commit}."
        for (gpu, cpu, torch, commit), count in machines.items()
    ]
    for group in _by_recipe(runs):
        recipe, settings = group[0].recipe, group[0].settings
        epochs = Job("cifar100", "resnet18", "cam", recipe, 0).config.recipe.epochs
        changed = f"with {' '.join(settings)}" if settings else "as it is"
        items.append(f"- {len(group)} of them with recipe {recipe}, which has {epochs} epochs, {changed}.")
    items += [f"- {display(dataset)}, {': '.join(note)}." for dataset, note in _noted(runs, dataset_notes)]
    return "\n".join(["## On what\n", *items, ""])
