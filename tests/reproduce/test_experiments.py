"""Every experiment end to end on tiny images: trained, measured, tabled, drawn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from kedge.errors import ConfigError
from kedge.evaluation import METHODS
from kedge.reproduce.experiment import Selection
from kedge.reproduce.experiments import EXPERIMENTS, select
from kedge.reproduce.jobs import CONFIGS, Results, ResultStore
from kedge.reproduce.runner import perform

SMALL = (
    *("recipe.epochs=1", "recipe.batch_size=50", "split.shots=10", "split.holdout=0"),
    *("encoder.stem=imagenet", "encoder.dim=8"),
)
SELECTION = Selection(datasets=("stripes",), encoders=("resnet10",), seeds=(0,), settings=SMALL)
PARTS = {
    "table1": SELECTION,
    "table2": SELECTION,
    "ablation": SELECTION,
    "classification": SELECTION,
    "dimensions": replace(SELECTION, losses=("cam",), sweep=(4, 8)),
    "convergence": replace(SELECTION, losses=("cam",), settings=("recipe.epochs=2", *SMALL[1:])),
    "fewshot": replace(SELECTION, losses=("cam",), sweep=(1, 4)),
    "embeddings2d": SELECTION,
    "qualitative": SELECTION,
    "league": replace(SELECTION, losses=("cam", "cross_entropy", "contrastive", "triplet", "proxy_anchor")),
    "unseen": replace(SELECTION, losses=("cam", "supcon"), settings=(*SMALL, "split.unseen=0.5")),
}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared, so that experiments share runs as they do for a user."""
    return tmp_path_factory.mktemp("reproduction")


def test_all_of_them_are_tried() -> None:
    assert PARTS.keys() == EXPERIMENTS.keys()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PARTS)
def test_end_to_end(name: str, out: Path, stripes: Path) -> None:
    experiment, selection = EXPERIMENTS[name], replace(PARTS[name], data_files={"stripes": stripes})
    jobs = experiment.jobs(selection)
    store = ResultStore(out / "results.jsonl")
    for job in store.missing(jobs):
        perform(job, out, {"stripes": stripes})
    assert not store.missing(jobs)
    results = Results(store.lines())
    tables, paths = experiment.write(results, selection, out)
    assert all(path.stat().st_size for path in paths)
    for table in tables:
        assert table.rows
        assert all(cell is None or cell.values for cells in table.rows.values() for cell in cells)
    images = [path for path in paths if path.suffix == ".png"]
    drawn = {"dimensions": 2, "convergence": 2, "fewshot": 2, "embeddings2d": 1, "qualitative": 1, "league": 1}
    assert len(images) == drawn.get(name, 0)
    for path in images:
        with Image.open(path) as image:
            assert min(image.size) > 200
    line = store.lines()[-1]
    assert line.command.startswith("kedge train dataset=arrays dataset.path=stripes.npz encoder=resnet10")
    assert all([line.config_hash, line.dataset_hash, line.machine["torch"], line.seconds > 0])


def test_hits_are_not_drawn_from_another_copy_of_the_dataset(out: Path, stripes: Path) -> None:
    lines = [line for line in ResultStore(out / "results.jsonl").lines() if line.measure == "hits"]
    experiment = EXPERIMENTS["qualitative"]
    selection = replace(PARTS["qualitative"], data_files={"stripes": stripes})
    assert experiment.figures(Results(lines), selection)
    assert not experiment.figures(Results(replace(line, dataset_hash="another") for line in lines), selection)


def test_values_are_those_of_the_run(out: Path) -> None:
    lines = [line for line in ResultStore(out / "results.jsonl").lines() if line.measure == "scores"]
    assert lines
    for line in lines:
        metrics = json.loads((out / "runs" / line.job.name / "metrics.json").read_text())
        assert all(line.values[method] == metrics[method] for method in METHODS)
        assert line.values["accuracy"] == metrics["accuracy"]


def test_two_stage_search_looks_at_less(out: Path) -> None:
    (line,) = [line for line in ResultStore(out / "results.jsonl").lines() if line.measure == "speed"]
    assert line.values["two_stage_ms"] == line.values["encoder_ms"] + line.values["two_stage_search_ms"]
    assert all(value > 0 for name, value in line.values.items() if name.endswith("_ms"))


def keys(names: Sequence[str]) -> list[set[str]]:
    return [{job.key for job in EXPERIMENTS[name].jobs(SELECTION)} for name in names]


def test_experiments_share_runs() -> None:
    table1, table2, classification, qualitative, league = keys(
        ["table1", "table2", "classification", "qualitative", "league"]
    )
    assert table2 < classification < table1
    assert qualitative == table1
    assert table1 < league


def test_the_last_row_of_the_ablation_is_the_loss_as_it_is() -> None:
    ablation, table2 = keys(["ablation", "table2"])
    assert len(ablation) == 8 * 2
    assert table2 < ablation


def test_the_paper_in_full() -> None:
    counts = {name: len(experiment.jobs(Selection(seeds=(0,)))) for name, experiment in EXPERIMENTS.items()}
    assert counts["table1"] == 4 * 4 * 3
    assert counts["ablation"] == 8 * 2
    assert counts["dimensions"] == 7 * 3
    assert counts["league"] == 11


@pytest.mark.parametrize("recipe", ["paper", "kedge"])
def test_another_loss_is_one_file(recipe: str, stripes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "my configs" / "loss" / "lifted.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("_target_: kedge.losses.MetricLearningLoss\nloss: LiftedStructureLoss\n")
    monkeypatch.setenv(CONFIGS, str(tmp_path / "my configs"))
    selection = replace(SELECTION, losses=("lifted",), recipe=recipe)
    (job,) = EXPERIMENTS["league"].jobs(selection)
    perform(job, tmp_path, {"stripes": stripes})
    table, places = EXPERIMENTS["league"].tables(Results(ResultStore(tmp_path / "results.jsonl").lines()), selection)
    assert [labels[-1] for labels in table.rows] == ["lifted"]
    assert all(
        cell is not None and cell.values for one in (table, places) for cells in one.rows.values() for cell in cells
    )
    text = (tmp_path / "results.jsonl").read_text()
    assert str(tmp_path) not in text
    assert str(stripes.parent) not in text


def test_an_unknown_experiment_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="Unknown experiment 'table9'; choose one of table1"):
        select("table1,table9", SELECTION)
    with pytest.raises(ConfigError, match="No experiment is left"):
        select("all", replace(SELECTION, datasets=("stripes",)))
    with pytest.raises(ConfigError, match="--at takes dimensions or shots; choose one experiment"):
        select("dimensions,fewshot", replace(SELECTION, sweep=(8,)))


def test_all_is_the_paper_and_nothing_else() -> None:
    whole = {each.name: part for each, part in select("all", Selection())}
    assert list(whole) == list(EXPERIMENTS)[:9]
    assert all(EXPERIMENTS[name].jobs(part) == EXPERIMENTS[name].jobs(Selection()) for name, part in whole.items())
    small = {each.name: part for each, part in select("all", Selection(("cifar100",), ("resnet18",)))}
    assert set(small) == {"table1", "table2", "classification", "fewshot"}
    assert small["classification"].losses == ("cross_entropy", "cam")
    (league, paper) = select("league,table1", SELECTION)
    assert (league[0].name, paper[0].name) == ("league", "table1")
    assert league[1] is paper[1] is SELECTION
