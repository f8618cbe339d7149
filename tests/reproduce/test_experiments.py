"""Every experiment end to end on tiny images: trained, measured, tabled, drawn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from kedge.datasets import arrays
from kedge.errors import ConfigError, DataError
from kedge.evaluation import METHODS
from kedge.model import Model
from kedge.model.calibration import familiarity_with
from kedge.reproduce.experiment import Selection
from kedge.reproduce.experiments import EXPERIMENTS, select
from kedge.reproduce.jobs import CONFIGS, Job, Results, ResultStore
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
    "open_set": replace(SELECTION, losses=("cam", "contrastive"), settings=(*SMALL, "split.unseen=0.5")),
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


def open_set_values(job: Job, out: Path, data_files: dict[str, Path]) -> dict[str, Any]:
    """What was measured of a run, and the cells of its row."""
    perform(job, out, data_files)
    (line,) = ResultStore(out / "results.jsonl").lines()
    experiment = EXPERIMENTS["open_set"]
    selection = Selection((job.dataset,), (job.encoder,), (job.loss,), job.recipe, (0,), settings=job.settings)
    (table,) = experiment.tables(Results([line]), selection)
    (labels,) = table.rows
    assert labels == (job.dataset, line.values["unknown"], job.encoder, job.loss)
    shown = [line.values[score] for score in ("AUROC", "FPR@95", "OSCR", "accuracy")]
    assert [cell.mean for cell in table.rows[labels] if cell] == shown
    return dict(line.values)


@pytest.mark.parametrize("loss", ["cam", "contrastive"])
def test_images_of_another_dataset_are_unknown(loss: str, stripes: Path, shifted_stripes: Path, tmp_path: Path) -> None:
    job = Job("stripes", "resnet10", loss, "paper", 0, settings=SMALL, measures=("open_set",))
    values = open_set_values(job, tmp_path, {"stripes": stripes, "svhn": shifted_stripes})
    model = Model.load(tmp_path / "runs" / job.name)
    dataset, others = arrays(stripes), arrays(shifted_stripes)
    assert model.anchors is not None
    features = {
        name: model.features(split.take(range(len(split))))
        for name, split in {"train": dataset.train, "known": dataset.test, "unknown": others.test}.items()
    }
    labels = torch.from_numpy(dataset.train.labels)
    known, unknown = (
        familiarity_with(features["train"], labels, features[name], model.embed_features(features[name]), model.anchors)
        for name in ("known", "unknown")
    )
    right = [int(model.classes.index(str(name))) for name in model.classify(dataset.test.take(range(len(known))))]
    wins = (known[:, None] > unknown[None, :]) + (known[:, None] == unknown[None, :]) / 2
    is_correct = np.array(right) == dataset.test.labels
    assert values["unknown"] == "svhn"
    assert (values["queries"], values["images"]) == (len(known), len(unknown))
    assert values["AUROC"] == pytest.approx(wins.mean(), abs=1e-3)
    assert values["OSCR"] == pytest.approx((wins * is_correct[:, None]).mean(), abs=1e-3)
    assert values["accuracy"] == pytest.approx(is_correct.mean())


def test_images_held_out_are_known_where_all_test_classes_are_unseen(tmp_path: Path) -> None:
    folder, generator = tmp_path / "CUB_200_2011", np.random.default_rng(0)
    labels = [label for label in (1, 2, 3, 101, 102) for _ in range(10)]
    for row, label in enumerate(labels, 1):
        file = folder / "images" / f"{label:03d}.Bird" / f"{row}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(256, size=(8, 8, 3), dtype=np.uint8)).save(file)
    listed = {
        "images": [f"{label:03d}.Bird/{row}.png" for row, label in enumerate(labels, 1)],
        "image_class_labels": labels,
    }
    for name, entries in listed.items():
        (folder / f"{name}.txt").write_text("".join(f"{row} {entry}\n" for row, entry in enumerate(entries, 1)))
    settings = ("recipe.epochs=1", "recipe.batch_size=9", "recipe.size=32", "split.holdout=0.2", "encoder.dim=8")
    job = Job("cub200", "resnet10", "cam", "paper", 0, settings=settings, measures=("open_set",))
    values = open_set_values(job, tmp_path, {"cub200": folder})
    assert (values["unknown"], values["queries"], values["images"]) == ("unseen classes", 3 * 2, 2 * 10)


def test_unknown_images_that_are_not_there_leave_no_result(stripes: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.npz"
    np.savez(empty, x_train=np.zeros((2, 12, 12), np.uint8))
    job = Job("stripes", "resnet10", "cam", "paper", 0, settings=SMALL, measures=("open_set",))
    with pytest.raises(DataError, match=r"empty\.npz lacks y_train"):
        perform(job, tmp_path, {"stripes": stripes, "svhn": empty})
    assert ResultStore(tmp_path / "results.jsonl").lines() == []


def test_in_shop_is_searched_as_its_lists_say(tmp_path: Path) -> None:
    folder, generator = tmp_path / "inshop", np.random.default_rng(0)
    statuses = {**dict.fromkeys(range(3), ["train"] * 8), **dict.fromkeys(range(3, 7), ["query"] * 2 + ["gallery"] * 3)}
    listed = []
    for item, parts in statuses.items():
        colour = generator.integers(200, size=3)
        for number, part in enumerate(parts):
            file = f"img/WOMEN/Tees/id_{item:08d}/{number}.png"
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            # The first of a gallery is a copy of a query: other than a query itself, it is not left out.
            pixels = colour + (0 if number in (0, 2) else generator.integers(56, size=(8, 8, 3)))
            Image.fromarray(np.broadcast_to(pixels, (8, 8, 3)).astype(np.uint8)).save(folder / file)
            listed.append((file, f"id_{item:08d}", part))
    generator.shuffle(listed)
    lines = [str(len(listed)), "image_name item_id evaluation_status", *map(" ".join, listed)]
    (folder / "list_eval_partition.txt").write_text("\n".join(lines) + "\n")
    settings = ("recipe.epochs=1", "recipe.batch_size=8", "recipe.size=32", "split.holdout=0", "encoder.dim=8")
    job = Job("inshop", "resnet10", "cam", "paper", 0, settings=settings, measures=("unseen",))
    perform(job, tmp_path, {"inshop": folder})
    (line,) = ResultStore(tmp_path / "results.jsonl").lines()
    model = Model.load(tmp_path / "runs" / job.name)
    queries, gallery = ([entry for entry in listed if entry[2] == part] for part in ("query", "gallery"))
    first, precision = [], []
    for file, item, _ in queries:
        distances = (model.embed([folder / file]) - model.embed([folder / other for other, *_ in gallery])).norm(dim=1)
        right = [gallery[row][1] == item for row in distances.argsort(stable=True).tolist()]
        first.append(right[0])
        precision.append(np.mean(right[:3]))
    assert (line.values["classes"], line.values["queries"]) == (4, 8)
    scores = line.values["embedding"]
    assert (scores["R@1"], scores["R-precision"]) == pytest.approx((np.mean(first), np.mean(precision)))
    assert scores["R@1"] >= 0.5


def keys(names: Sequence[str]) -> list[set[str]]:
    return [{job.key for job in EXPERIMENTS[name].jobs(SELECTION)} for name in names]


def test_experiments_share_runs() -> None:
    table1, table2, classification, qualitative, league = keys(
        ["table1", "table2", "classification", "qualitative", "league"]
    )
    assert table2 < classification < table1
    assert qualitative == table1
    assert table1 < league
    own = Selection(seeds=(0,), recipe="kedge")
    pairs = {(job.dataset, job.encoder) for job in EXPERIMENTS["open_set"].jobs(own)}
    assert pairs == {("cifar100", "resnet18"), ("cub200", "efficientnet_lite0")}
    full_sets = {job.key for job in EXPERIMENTS["table1"].jobs(own)}
    assert full_sets > {job.key for job in EXPERIMENTS["open_set"].jobs(replace(own, datasets=("cifar100",)))}


def test_the_last_row_of_the_ablation_is_the_loss_as_it_is() -> None:
    ablation, table2 = keys(["ablation", "table2"])
    assert len(ablation) == 8 * 2
    assert table2 < ablation


def test_the_last_of_few_shots_is_the_run_with_all_images() -> None:
    selection = Selection(datasets=("cifar100",), encoders=("resnet18",), losses=("cam",), seeds=(0,))
    few, [whole] = EXPERIMENTS["fewshot"].jobs(selection), EXPERIMENTS["table1"].jobs(selection)
    assert [job.changes for job in few[:-1]] == [(f"split.shots={2**power}",) for power in range(9)]
    assert few[-1] == whole
    assert [EXPERIMENTS["fewshot"].row(job)[2] for job in few[-2:]] == ["256", "all"]


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


def test_what_is_unknown_was_not_trained_on() -> None:
    selection = replace(SELECTION, datasets=("svhn",))
    with pytest.raises(ConfigError, match=r"SVHN is what is unknown; .*split\.unseen=0\.5"):
        EXPERIMENTS["open_set"].jobs(selection)
    jobs = EXPERIMENTS["open_set"].jobs(replace(selection, settings=("split.unseen=0.5",)))
    assert {EXPERIMENTS["open_set"].row(job)[:2] for job in jobs} == {("svhn", "unseen classes")}


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
