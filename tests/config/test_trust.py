"""A stranger's run: opening it instantiates Kedge's own classes alone, whatever its configuration names."""

from __future__ import annotations

import ast
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

import kedge
from kedge.cli import main
from kedge.config.compose import CONFIG, DATASET, compose, dataset_of, held_out_of, load_config
from kedge.config.trust import OWN
from kedge.errors import ConfigError
from kedge.reproduce.jobs import Job
from kedge.reproduce.runner import perform
from kedge.training import kept_epochs, resume_run, train


class Opened:
    """A pickle that leaves a file behind when it is opened."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


def attacks(place: Path) -> dict[str, dict[str, Any]]:
    """Groups of a configuration, each of which would make `place/trace` when it is instantiated."""
    trace = place / "trace"
    (place / "evil.pt").write_bytes(pickle.dumps(Opened(trace)))
    load = {"_target_": "torch.load", "f": str(place / "evil.pt"), "weights_only": False}
    folder = {"_target_": "os.mkdir", "path": str(trace)}
    data = {"_target_": "kedge.datasets.arrays", "path": "none.npz", "flip": True}
    loss = {"_target_": "kedge.losses.CAMLoss", "margin": 2.0}
    encoder = {"_target_": "kedge.encoders.build_encoder", "name": "resnet10"}
    made = "${oc.create:{_target_:os.mkdir,path:" + str(trace) + "}}"
    return {
        "another function": {"dataset": folder},
        "a function of Kedge's": {
            "dataset": {"_target_": "kedge.model.io.write_folder", "path": str(trace), "description": {}, "tensors": {}}
        },
        "a loader of Kedge's": {"dataset": {"_target_": "kedge.io.atomic_write", "path": str(trace)}},
        "a nested pickle": {"dataset": {**data, "path": load}},
        "a nested copy": {
            "dataset": {**data, "path": {"_target_": "shutil.copy", "src": str(place / "evil.pt"), "dst": str(trace)}}
        },
        "deeper": {"dataset": {**data, "flip": {"a": [{"b": folder}]}}},
        "an interpolation": {"dataset": {**data, "path": made}},
        "positional": {"dataset": {**data, "_args_": [folder]}},
        "in part": {"dataset": {**data, "_partial_": True, "path": folder}},
        "an encoder": {"dataset": data, "encoder": {**encoder, "name": folder}},
        "another encoder": {"dataset": data, "encoder": folder},
        "a loss": {"dataset": data, "loss": {**loss, "margin": folder}},
        "another loss": {"dataset": data, "loss": folder},
        "a part of a loss": {
            "loss": {
                "_target_": "kedge.losses.MetricLearningLoss",
                "loss": "TripletMarginLoss",
                "arguments": {"distance": folder},
            }
        },
    }


ATTACKS = [
    "another function",
    "a function of Kedge's",
    "a loader of Kedge's",
    "a nested pickle",
    "a nested copy",
    "deeper",
    "an interpolation",
    "positional",
    "in part",
    "an encoder",
    "another encoder",
    "a loss",
    "another loss",
    "a part of a loss",
]


@pytest.fixture(scope="module")
def run(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run, as `kedge train` leaves it."""
    folder = tmp_path_factory.mktemp("trust") / "run"
    train(overrides=[*tiny, "recipe.epochs=1"], folder=folder)
    return folder


def with_groups(run: Path, place: Path, groups: dict[str, Any]) -> Path:
    """A copy of the run's configuration with other groups."""
    config = yaml.safe_load((run / CONFIG).read_text())
    place.mkdir()
    (place / CONFIG).write_text(yaml.safe_dump(config | groups))
    (place / DATASET).write_text((run / DATASET).read_text())
    return place


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_strangers_run_executes_nothing(run: Path, tmp_path: Path, attack: str) -> None:
    groups = attacks(tmp_path)
    assert set(groups) == set(ATTACKS)
    stranger = with_groups(run, tmp_path / "run", groups[attack])
    ways: list[Callable[[], object]] = [lambda: resume_run(stranger), lambda: list(kept_epochs(stranger))]
    if set(groups[attack]) == {"dataset"}:
        ways += [lambda: dataset_of(stranger), lambda: held_out_of(stranger)]
        ways += [lambda: dataset_of(stranger, ["dataset.seed=1"])]
    for way in ways:
        with pytest.raises(Exception, match=r"not part of Kedge and may run any code|where one value was expected"):
            way()
        assert not (tmp_path / "trace").exists()


def test_the_attacks_work_where_they_are_trusted(run: Path, tmp_path: Path) -> None:
    """Else the test above would say nothing."""
    groups = attacks(tmp_path)
    for number, attack in enumerate(("another function", "a nested copy", "deeper", "an interpolation")):
        stranger = with_groups(run, tmp_path / str(number), groups[attack])
        with pytest.raises(Exception):  # noqa: B017 - whatever comes of it
            dataset_of(stranger, trust=True)
        trace = tmp_path / "trace"
        assert trace.exists(), attack
        trace.rmdir() if trace.is_dir() else trace.unlink()


def test_a_download_from_elsewhere_is_refused(run: Path, tmp_path: Path) -> None:
    source = {"url": "http://127.0.0.1:9/x.tar", "filename": "x.tar", "checksum": "0", "members": []}
    node = {"_target_": "kedge.datasets.cifar100", "root": str(tmp_path), "source": source}
    with pytest.raises(ConfigError, match=r"a table in dataset\.source, where one value was expected"):
        dataset_of(with_groups(run, tmp_path / "run", {"dataset": node}))


def test_reproduce_takes_only_its_own_classes(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stripes: Path
) -> None:
    job = Job("stripes", "resnet10", "cam", "kedge", 0, settings=("recipe.epochs=1",))
    (tmp_path / "runs").mkdir()
    with_groups(run, tmp_path / "runs" / job.name, attacks(tmp_path)["another loss"])
    with pytest.raises(ConfigError, match="may run any code"):
        perform(job, tmp_path, {"stripes": stripes})
    assert not (tmp_path / "trace").exists()


def test_the_command_line_refuses_and_may_be_told_to_trust(
    refused: Callable[..., str], run: Path, tmp_path: Path
) -> None:
    stranger = with_groups(run, tmp_path / "run", attacks(tmp_path)["another function"])
    (stranger / "model").symlink_to(run / "model")
    for command in (["evaluate", str(stranger)], ["train", "--resume", str(stranger)]):
        assert "pass --trust (in Python trust=True) if the run is yours" in refused(*command)
        assert not (tmp_path / "trace").exists()
    assert "--trust only applies to --resume" in refused("train", "--trust", "recipe.epochs=1")


OWN_LOSS = """
from kedge.losses import CAMLoss

class Mine(CAMLoss):
    name = "mine"
"""


def test_ones_own_loss_trains_and_is_resumed_when_trusted(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_own_loss.py").write_text(OWN_LOSS)
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "run"
    train(overrides=[*tiny, "recipe.epochs=1", "loss._target_=my_own_loss.Mine"], folder=folder)
    del sys.modules["my_own_loss"]
    with pytest.raises(ConfigError, match=r"sets loss\._target_ to 'my_own_loss\.Mine', which is not part of Kedge"):
        resume_run(folder)
    assert "my_own_loss" not in sys.modules
    assert dataset_of(folder).classes  # its loss is not asked for
    monkeypatch.setattr(sys, "argv", ["kedge", "train", "--resume", str(folder), "--trust"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert "my_own_loss" in sys.modules
    assert resume_run(folder, trust=True).loss == "mine"


OWN_ENCODER = """
from kedge.encoders import build_encoder

def mine(**options):
    encoder = build_encoder(**options)
    encoder.name = "mine"
    return encoder
"""


def test_ones_own_encoder_trains(tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_encoder.py").write_text(OWN_ENCODER)
    monkeypatch.syspath_prepend(tmp_path)
    overrides = [*tiny, "recipe.epochs=1", "encoder._target_=my_own_encoder.mine"]
    assert train(overrides=overrides, folder=tmp_path / "run").encoder.name == "mine"


def test_every_configuration_of_kedges_may_be_reopened(tmp_path: Path) -> None:
    folder = Path(kedge.__file__).parent / "config"
    composed = OmegaConf.masked_copy(compose(), list(OWN))
    for group, names in OWN.items():
        targets = set()
        for file in (folder / group).glob("*.yaml"):
            node = yaml.safe_load(file.read_text())
            targets.add(node["_target_"])
            node.pop("defaults", None)
            values = OmegaConf.merge(composed, {group: node})
            OmegaConf.save(values, tmp_path / CONFIG)
            load_config(tmp_path / CONFIG)
        assert targets == set(names)


def test_nothing_in_the_package_opens_pickles() -> None:
    """Whatever torch loads is plain tensors."""
    loads = []
    for file in Path(kedge.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "trainer.fit"):
                given = {word.arg: ast.unparse(word.value) for word in node.keywords}
                loads.append((file.name, node.lineno, given.get("weights_only")))
            if isinstance(node, ast.keyword) and node.arg == "weights_only" and file.name != "callbacks.py":
                assert ast.unparse(node.value) == "True", (file.name, node.value.lineno)
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert ast.unparse(node.value) == "False", (file.name, node.value.lineno)
    assert len(loads) >= 3
    assert all(safe == "True" for *_, safe in loads), loads
