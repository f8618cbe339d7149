"""The key of a run, and what its training is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kedge.errors import ConfigError
from kedge.reproduce.jobs import Job, load_pictures, sources_of

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
        replace(JOB, settings=("trainer.keep_every=5",)),
        replace(JOB, settings=("recipe.sharpness.radius=0.1",)),
        replace(JOB, settings=("recipe.mirror=true",)),
        replace(JOB, settings=("split.validate_every=1",)),
    ]
    assert len({JOB.key, *(other.key for other in others)}) == len(others) + 1


def test_the_key_does_not_change_with_place_or_what_is_measured() -> None:
    same = [
        replace(JOB, measures=("scores", "speed")),
        replace(JOB, settings=("trainer.compile=off",)),
        replace(JOB, settings=("encoder.stem=auto",)),  # as it is anyway
    ]
    assert {job.key for job in same} == {JOB.key}


def test_a_run_of_an_earlier_version_is_known_again() -> None:
    assert Job("cifar100", "resnet18", "cam", "paper", 0).key == "6fee1f0fe337"


def test_changes_of_the_experiment_win_over_settings() -> None:
    job = replace(JOB, changes=("encoder.dim=32",), settings=("encoder.dim=8",))
    assert job.config().encoder.dim == 32


def test_data_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "digits, and more.npz"
    path.touch()
    sources = sources_of([f"svhn={path}"])
    config = replace(JOB, dataset="svhn").config(sources)
    assert config.dataset.path == str(path)
    assert config.dataset.flip is False
    assert JOB.config(sources).dataset.get("path") is None


@pytest.mark.parametrize("given", ["cifar100", "=x.npz", "cifar100="])
def test_bad_sources(given: str) -> None:
    with pytest.raises(ConfigError, match="--data takes NAME=FILE"):
        sources_of([given])


def test_missing_sources() -> None:
    with pytest.raises(ConfigError, match="there is no"):
        sources_of(["cifar100=nowhere.npz"])


def test_there_and_back() -> None:
    job = replace(JOB, changes=("a=1",), settings=("b=2",), measures=("scores", "hits"))
    assert Job.from_json(job.to_json()) == job


def test_only_what_does_not_need_held_out_pictures_trains_on_all() -> None:
    assert JOB.config().split.holdout == 0.1
    assert replace(JOB, recipe="kedge").config().split.holdout == 0


def test_pictures_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.npz"
    broken.write_bytes(b"no pictures")
    assert load_pictures("cifar100", {"cifar100": broken}) is None
    assert load_pictures("sample", {}, download=False) is not None
    asked: list[str] = []
    monkeypatch.setattr("kedge.datasets.download._transfer", lambda url, part: asked.append(url))
    assert load_pictures("cifar100", {}, download=False) is None
    assert asked == []
    assert load_pictures("cifar100", {}) is None  # what arrived is empty
    assert len(asked) == 1
