"""The key of a run, and what its training is told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from kedge.config.compose import compose
from kedge.errors import ConfigError, DataError
from kedge.reproduce import jobs
from kedge.reproduce.experiment import Selection
from kedge.reproduce.experiments import EXPERIMENTS
from kedge.reproduce.jobs import Job, dataset_info, load_dataset, parse_data_files

JOB = Job("cifar100", "resnet18", "cam", "paper", 0)


def test_the_key_changes_with_whatever_changes_the_run() -> None:
    others = [
        replace(JOB, dataset="svhn"),
        replace(JOB, encoder="resnet50"),
        replace(JOB, loss="contrastive"),
        replace(JOB, recipe="kedge"),
        replace(JOB, seed=1),
        replace(JOB, changes=("encoder.dim=32",)),
        replace(JOB, settings=("recipe.epochs=2",)),
        replace(JOB, settings=("recipe.sam.radius=0.1",)),
        replace(JOB, settings=("recipe.flip_tta=true",)),
        replace(JOB, settings=("split.validate_every=1",)),
    ]
    assert len({JOB.key, *(other.key for other in others)}) == len(others) + 1


def test_the_key_does_not_change_with_place_or_what_is_measured() -> None:
    same = [
        replace(JOB, measures=("scores", "speed", "curve")),
        replace(JOB, settings=("trainer.compile=off",)),
        replace(JOB, settings=("trainer.keep_every=5",)),
        replace(JOB, settings=("encoder.stem=auto",)),  # as it is anyway
    ]
    assert {job.key for job in same} == {JOB.key}


def test_the_configuration_is_composed_once_for_all_seeds_and_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    composed: list[Sequence[str]] = []
    monkeypatch.setattr(jobs, "compose", lambda overrides: composed.append(overrides) or compose(overrides))
    settings = ("recipe.epochs=17",)
    every = [
        Job(dataset, "resnet18", "cam", "paper", seed, settings=settings)
        for dataset in ("svhn", "food101")
        for seed in range(5)
    ]
    assert len({job.key for job in every}) == 10
    assert len(composed) == 1


def test_a_change_is_what_hydra_makes_of_it() -> None:
    """Every change that an experiment makes: same values, of the same types, and so the same key."""
    selection = Selection(seeds=(0,), encoders=("resnet18",), losses=("cam",), sweep=(8,))
    every = [job for each in EXPERIMENTS.values() for job in each.jobs(replace(selection, datasets=each.datasets[:1]))]
    changed = {job.changes: job for job in every if job.changes}
    assert len(changed) > 15
    for job in changed.values():
        composed = compose([*replace(job, changes=()).overrides()[1:-1], *job.changes])
        assert all(job.config[name] == composed[name] for name in composed if name != "hydra")
    with pytest.raises(ConfigError, match=r"encoder\.dimm=8: Key 'dimm' is not in struct"):
        _ = replace(JOB, changes=("encoder.dimm=8",)).config


def test_the_seed_of_the_job_wins() -> None:
    config = replace(JOB, seed=3, settings=("seed=7",)).full_config()
    assert config.seed == config.split.seed == 3


def test_unknown_names_are_refused_before_a_run() -> None:
    for job in (replace(JOB, dataset="nowhere"), replace(JOB, loss="none"), replace(JOB, settings=("recipe.epoch=1",))):
        with pytest.raises(ConfigError):
            job.check({})
    JOB.check({})


def test_changes_of_the_experiment_win_over_settings() -> None:
    job = replace(JOB, changes=("encoder.dim=32",), settings=("encoder.dim=8",))
    assert job.config.encoder.dim == 32


def test_data_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "digits, and more.npz"
    path.touch()
    data_files = parse_data_files([f"svhn={path}"])
    config = replace(JOB, dataset="svhn").full_config(data_files)
    assert config.dataset.path == str(path)
    assert config.dataset.flip is False
    assert JOB.full_config(data_files).dataset.get("path") is None


@pytest.mark.parametrize("given", ["cifar100", "=x.npz", "cifar100="])
def test_bad_sources(given: str) -> None:
    with pytest.raises(ConfigError, match="--data takes NAME=FILE"):
        parse_data_files([given])


def test_missing_sources() -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        parse_data_files(["cifar100=nowhere.npz"])


def test_there_and_back() -> None:
    job = replace(JOB, changes=("a=1",), settings=("b=2",), measures=("scores", "hits"))
    assert Job.from_json(json.loads(json.dumps(asdict(job)))) == job


def test_only_what_does_not_need_held_out_images_trains_on_all() -> None:
    assert JOB.config.split.holdout == 0.1
    assert replace(JOB, recipe="kedge").config.split.holdout == 0


def test_datasets_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.npz"
    broken.write_bytes(b"no images")
    assert load_dataset("cifar100", {"cifar100": broken}) is None
    with pytest.raises(DataError, match="cannot be loaded"):
        dataset_info("mine", {"mine": broken})
    assert load_dataset("sample", {}, download=False) is not None
    asked: list[str] = []
    monkeypatch.setattr("kedge.datasets.download._receive", lambda url, part: asked.append(url))
    assert load_dataset("cifar100", {}, download=False) is None
    assert asked == []
    assert load_dataset("cifar100", {}) is None  # what arrived is empty
    assert len(asked) == 1
