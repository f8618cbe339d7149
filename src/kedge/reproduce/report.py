"""All results in one page: what was reproduced, on what, how it compares, and what was not run."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from kedge.io import atomic_write
from kedge.reproduce.cells import Verdict
from kedge.reproduce.experiments import EXPERIMENTS, Choice, Experiment, Results
from kedge.reproduce.figures import write_figure
from kedge.reproduce.jobs import Job, Source
from kedge.reproduce.names import display
from kedge.reproduce.store import Line
from kedge.reproduce.tables import Table, markdown

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
  rate 1e-3 and, for pairs and proxies, no CutMix (`config/recipe/loss/`); nothing was tuned for the other losses.
- Training is in bfloat16 on a GPU, and the gallery is the whole training set.
"""

_COPIES = {
    "d16176e861acac8b": (
        "re-cropped",
        "its digits were cut again from the full-number images with the official boxes. Counts and classes are those "
        "of the official crops, the pixels of those that could be compared differ by .02 grey levels on average",
    )
}
"""Datasets that are not quite the official ones, by their hash: what they are called, and what they are."""


def write_report(lines: Sequence[Line], out: Path, sources: Source) -> Path:
    """Write `results.md` and its figures below `out`."""
    results, verdicts = Results(lines), _Verdicts()
    sections: list[str] = []
    for experiment in EXPERIMENTS.values():
        sections += _section(experiment, lines, results, out, sources, verdicts)
    parts = [_OPENING, _machines(lines), verdicts.overview(), *sections]
    path = out / "results.md"
    with atomic_write(path) as stream:
        stream.write(("\n".join(parts).rstrip() + "\n").encode())
    return path


class _Verdicts:
    """Ours against the printed, counted by experiment, recipe and loss; times are of another machine, and left out."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, str], Counter[Verdict]] = {}

    def count(self, experiment: Experiment, recipe: str, table: Table) -> None:
        """Take in the cells of a table."""
        for row in table.rows:
            loss = row.labels[table.stub.index("loss")] if "loss" in table.stub else experiment.losses[0]
            for cell, column in zip(row.cells, table.columns, strict=True):
                if cell is not None and cell.verdict and column.unit != "ms":
                    self._counts.setdefault((experiment.title, recipe, loss), Counter())[cell.verdict] += 1

    def overview(self) -> str:
        """A table, or nothing where nothing is printed."""
        if not self._counts:
            return ""
        rows = [
            "## At a glance\n",
            "| experiment | recipe | loss | above | within | below |",
            "|---|---|---|---:|---:|---:|",
        ]
        rows += [
            f"| {title} | {recipe} | {display(loss)} | {counts['above']} | {counts['within']} | {counts['below']} |"
            for (title, recipe, loss), counts in self._counts.items()
        ]
        note = (
            "Cells that ran, against the printed mean ± two standard deviations; times, which were taken on another "
            "machine, are left out."
        )
        return "\n".join([*rows, "", note, ""])


def _section(
    experiment: Experiment, lines: Sequence[Line], results: Results, out: Path, sources: Source, verdicts: _Verdicts
) -> Iterable[str]:
    yield f"## {experiment.title}\n"
    own = _told(experiment, [line for line in lines if _belongs(line, experiment, sources)])
    if not own:
        yield "Not run.\n"
        return
    for (recipe, settings), some in _by(own).items():
        choice = Choice(
            datasets=_ordered((line.dataset for line in some), experiment.datasets),
            encoders=_ordered((line.encoder for line in some), experiment.encoders),
            losses=_ordered((line.loss for line in some), experiment.losses),
            recipes=(recipe,),
            seeds=tuple(sorted({line.seed for line in some})),
            at=_numbers(experiment, some),
            settings=settings,
            sources=sources,
        )
        for table in experiment.tables(results, choice):
            yield markdown(replace(table, notes=(*table.notes, *_copies(some)))).strip() + "\n"
            verdicts.count(experiment, recipe, table)
        figures = experiment.figures(results, choice)
        if experiment.shows_pictures and not figures:
            yield (
                f"Its figures show the dataset's pictures: `kedge reproduce {experiment.name} --no-run` draws them "
                "where those are.\n"
            )
        for name, figure in figures.items():
            if settings:
                name = f"{name}-{'-'.join(word.rpartition('.')[2].replace('=', '') for word in settings)}"
            write_figure(figure, out / "figures", name)
            yield f"![{experiment.title}](figures/{name}.png)\n"
    if missing := _not_run(experiment, own):
        yield missing + "\n"


def _belongs(line: Line, experiment: Experiment, sources: Source) -> bool:
    """Whether a run is one of the experiment's; of those that want more than scores, only with what they want."""
    if line.measure != experiment.measures[-1]:
        return False
    if line.loss not in experiment.losses and not experiment.open_to_others:
        return False
    choice = Choice(
        (line.dataset,),
        (line.encoder,),
        (line.loss,),
        (line.recipe,),
        (line.seed,),
        settings=tuple(line.settings),
        sources=sources,
    )
    numbers = _numbers(experiment, [line])
    if numbers == ():
        return False
    return any(job.key == line.key for job in experiment.jobs(replace(choice, at=numbers)))


def _told(experiment: Experiment, lines: Sequence[Line]) -> list[Line]:
    """Experiments share runs: those of places where it was this one that was meant."""
    meant = {_place(line) for line in lines if experiment.tells(line.job)}
    return [line for line in lines if _place(line) in meant]


def _place(line: Line) -> tuple[str, ...]:
    return line.recipe, line.dataset, line.encoder, *line.settings


def _copies(lines: Iterable[Line]) -> list[str]:
    found = {line.dataset: _COPIES[line.dataset_hash][0] for line in lines if line.dataset_hash in _COPIES}
    return [f"{display(dataset)}, {kind}." for dataset, kind in found.items()]


def _numbers(experiment: Experiment, lines: Iterable[Line]) -> tuple[int, ...] | None:
    """The numbers that these runs vary; None for experiments that vary none."""
    if experiment.varies is None:
        return None
    name = f"{experiment.varies}="
    found = {int(change.removeprefix(name)) for line in lines for change in line.changes if change.startswith(name)}
    return tuple(sorted(found))


def _by(lines: Iterable[Line]) -> dict[tuple[str, tuple[str, ...]], list[Line]]:
    found: dict[tuple[str, tuple[str, ...]], list[Line]] = {}
    for line in sorted(lines, key=lambda line: (line.recipe != "paper", line.recipe, line.settings)):
        found.setdefault((line.recipe, tuple(line.settings)), []).append(line)
    return found


def _ordered(found: Iterable[str], known: Sequence[str]) -> tuple[str, ...]:
    there = dict.fromkeys(found)
    return (*(name for name in known if name in there), *(name for name in there if name not in known))


def _not_run(experiment: Experiment, lines: Sequence[Line]) -> str:
    there = {(line.dataset, line.encoder) for line in lines}
    missing = [pair for pair in itertools.product(experiment.datasets, experiment.encoders) if pair not in there]
    if not missing:
        return ""
    by_dataset: dict[str, list[str]] = {}
    for dataset, encoder in missing:
        by_dataset.setdefault(dataset, []).append(display(encoder))
    said = "; ".join(f"{display(dataset)} with {', '.join(encoders)}" for dataset, encoders in by_dataset.items())
    reasons = ""
    if any(encoder == "swin_t" for _, encoder in missing):
        reasons += " Swin-T starts from weights that must be downloaded."
    if {dataset for dataset, _ in missing} & {"food101", "tiny_imagenet"}:
        reasons += " Food-101 and Tiny ImageNet must be downloaded."
    return f"Not run: {said}.{reasons}"


def _machines(lines: Sequence[Line]) -> str:
    runs = [line for line in lines if line.measure == "scores"]
    kinds = Counter(
        (line.machine.get("gpu") or line.machine.get("cpu"), line.machine.get("torch"), line.machine.get("commit"))
        for line in runs
    )
    said = [
        f"- {count} runs on {where}, torch {torch}, commit {commit}." for (where, torch, commit), count in kinds.items()
    ]
    for (recipe, settings), some in _by(runs).items():
        epochs = Job("cifar100", "resnet18", "cam", recipe, 0).config().recipe.epochs
        changed = f"with {' '.join(settings)}" if settings else "as it is"
        said.append(f"- {len(some)} of them with recipe {recipe}, which has {epochs} epochs, {changed}.")
    for dataset, copy in {line.dataset: line.dataset_hash for line in runs}.items():
        if copy in _COPIES:
            kind, meaning = _COPIES[copy]
            said.append(f"- {display(dataset)}, {kind}: {meaning}.")
    return "\n".join(["## On what\n", *said, ""])
