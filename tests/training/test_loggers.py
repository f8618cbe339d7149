from __future__ import annotations

import csv
import json
import socket
import struct
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from kedge import train
from kedge.config.compose import compose
from kedge.errors import ConfigError
from kedge.training import Interrupted, loggers, resume_run
from kedge.training.config import Loggers, Settings, TensorBoard
from kedge.training.loggers import check_loggers
from kedge.training.loop import TrainingLoop

mlflow = pytest.importorskip("mlflow")
pytest.importorskip("wandb")


@pytest.fixture
def quick(tiny: list[str]) -> list[str]:
    """A head over features of a tiny frozen encoder."""
    overrides = [override for override in tiny if override != "logger=none"]
    return [*overrides, "recipe=head", "recipe.size=12", "encoder.weights=null"]


Points = dict[str, dict[int, float]]
"""Of each metric, the values by epoch."""


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where MLflow keeps runs: a database where its parts are there, otherwise files, which it still can write."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return (
        f"sqlite:///{tmp_path}/mlflow.db"
        if find_spec("sqlalchemy") and find_spec("alembic")
        else f"file:{tmp_path}/mlruns"
    )


def history(folder: Path) -> Points:
    """history.csv, but for the clock and the rate."""
    with (folder / "history.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in rows[0] if name.startswith(("train/", "val/"))]
    return {name: {int(row["epoch"]): float(row[name]) for row in rows if row[name]} for name in names}


def table(folder: Path) -> Points:
    with (folder / "csv" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in rows[0] if name != "step"]
    return {name: {int(row["step"]): float(row[name]) for row in rows if row[name]} for name in names}


def mlflow_run(store: str, experiment: str) -> tuple[Any, Points]:
    client = mlflow.MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    points = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    assert all(len({point.step for point in some}) == len(some) for some in points.values()), "logged twice"
    return run, {name: {point.step: point.value for point in some} for name, some in points.items()}


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of an offline run: protocol buffers in LevelDB's log format, after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    content, place, part = file.read_bytes(), 7, b""
    assert content[:4] == b":W&B"
    while place < len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        part += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            yield record
            part = b""


def wandb_run(folder: Path) -> tuple[str, dict[str, Any], Points]:
    """Number, configuration and points of all parts of a run."""
    numbers, config, points = set(), {}, Points()
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for record in wandb_records(file):
            if record.WhichOneof("record_type") == "run":
                numbers.add(record.run.run_id)
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif record.WhichOneof("record_type") == "config":
                config |= {item.key: json.loads(item.value_json) for item in record.config.update}
            elif record.WhichOneof("record_type") == "history":
                items = record.history.item
                row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
                for name in [name for name in row if name.startswith(("train/", "val/"))]:
                    points.setdefault(name, {})[row["epoch"]] = row[name]
    (number,) = numbers
    return number, config, points


def tensorboard_points(folder: Path) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard")).Reload()
    names = [name for name in found.Tags()["scalars"] if name.startswith(("train/", "val/"))]
    return {name: {event.step: event.value for event in found.Scalars(name)} for name in names}


def test_all_of_them_hold_what_history_holds_and_a_resumed_run_goes_on_there(
    quick: list[str], tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = TrainingLoop.on_epoch_start

    def stops(self: TrainingLoop) -> None:
        real(self)
        if self.epoch == 1:
            self.stop.set()

    monkeypatch.setattr(TrainingLoop, "on_epoch_start", stops)
    where = ["logger=[tensorboard,wandb,mlflow,csv]", "logger.wandb.mode=offline", "logger.wandb.project=shoes"]
    where += ["logger.mlflow.experiment=shoes", f"logger.mlflow.tracking_uri='{store}'"]
    folder = tmp_path / "first try"
    with pytest.raises(Interrupted):
        train(overrides=[*quick, *where], folder=folder)
    assert mlflow_run(store, "shoes")[0].info.status == "FAILED"
    monkeypatch.setattr(TrainingLoop, "on_epoch_start", real)
    resume_run(folder)

    wanted = history(folder)
    assert set(wanted) >= {"train/loss", "val/accuracy"}
    assert set(wanted["train/loss"]) == {1, 2, 3}
    assert table(folder) == wanted
    run, points = mlflow_run(store, "shoes")
    assert points == wanted
    assert (run.info.run_name, run.info.status) == ("first try", "FINISHED")
    config = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    assert isinstance(config, dict)
    assert run.data.params["recipe/optimizer/lr"] == str(config["recipe"]["optimizer"]["lr"])
    assert run.data.params["encoder/name"] == "timm:test_resnet"
    number, said, points = wandb_run(folder)
    assert points == wanted
    assert number == json.loads((folder / "loggers.json").read_text())["wandb"]
    assert {name: said[name] for name in config if name != "logger"} == {
        name: value for name, value in config.items() if name != "logger"
    }
    seen = tensorboard_points(folder)
    assert {name: set(some) for name, some in seen.items()} == {name: set(some) for name, some in wanted.items()}
    assert seen["train/loss"][3] == pytest.approx(wanted["train/loss"][3], rel=1e-6)


@pytest.mark.soak
def test_of_two_processes_one_logs(quick: list[str], tmp_path: Path, store: str) -> None:
    where = ["logger=[wandb,mlflow,csv]", "logger.wandb.mode=offline", f"logger.mlflow.tracking_uri='{store}'"]
    how = ["trainer.devices=2", "trainer.accelerator=cpu", "recipe.epochs=2"]
    train(overrides=[*quick, *where, *how], folder=tmp_path / "run")
    wanted = history(tmp_path / "run")
    assert set(wanted["train/loss"]) == {1, 2}
    assert table(tmp_path / "run") == wanted
    assert mlflow_run(store, "kedge")[1] == wanted
    assert wandb_run(tmp_path / "run")[2] == wanted
    assert len(list((tmp_path / "run" / "wandb").glob("offline-run-*"))) == 1


def test_by_default_tensorboard_and_with_none_nothing(quick: list[str], tmp_path: Path) -> None:
    for choice, there in (([], True), (["logger=none"], False)):
        folder = tmp_path / str(there)
        train(overrides=[*quick, "recipe.epochs=1", *choice], folder=folder)
        assert bool(list(folder.glob("tensorboard/events.*"))) is there
        assert (folder / "loggers.json").exists() is there
        assert (folder / "history.csv").exists()


def test_a_run_from_before_there_was_a_choice() -> None:
    config = compose([])
    before = {name: config[name] for name in ("seed", "recipe", "split", "trainer")}
    assert Settings.from_config(before).logger == Loggers(tensorboard=TensorBoard(needed=False))


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_one_sentence(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loggers, "find_spec", lambda package: None if package == name else find_spec(package))
    with pytest.raises(ConfigError, match=rf"logger={name} needs {name}.*kedge\[{name}\]"):
        check_loggers(Settings.from_config(compose([f"logger={name}"])).logger)
    by_default = Settings.from_config(compose([])).logger
    check_loggers(by_default)
    if name == "tensorboard":
        assert loggers.open_loggers(by_default, tmp_path) == []


def test_a_server_that_is_not_there_is_one_sentence_before_training(
    quick: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        where = ["logger=mlflow", f"logger.mlflow.tracking_uri={address}"]
        with pytest.raises(ConfigError, match=rf"logger=mlflow: {address} does not answer .*tracking_uri"):
            train(overrides=[*quick, *where], folder=tmp_path / "mlflow")
        monkeypatch.setattr(loggers, "_wandb_address", lambda: address)
        monkeypatch.delenv("WANDB_MODE", raising=False)
        with pytest.raises(ConfigError, match=rf"logger=wandb: {address} does not answer .*mode=offline.*wandb sync"):
            train(overrides=[*quick, "logger=wandb"], folder=tmp_path / "wandb")
    assert not list(tmp_path.glob("*/history.csv"))


def test_wrong_settings_are_one_sentence() -> None:
    for overrides, words in (
        (["logger=wandb", "logger.wandb.mode=sometimes"], "logger.wandb.mode must be one of online, offline"),
        (["logger=mlflow", "logger.mlflow.experiment=3"], "logger.mlflow.experiment must be a word, found 3"),
        (["+logger.comet.project=a"], "Unknown setting 'logger.comet'; logger has tensorboard, wandb, mlflow, csv"),
        (["logger=wandb", "+logger.wandb.colour=red"], "Unknown setting 'logger.wandb.colour'"),
    ):
        with pytest.raises(ConfigError) as caught:
            Settings.from_config(compose(overrides))
        assert words in str(caught.value)


def test_a_store_that_cannot_be_opened_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    asked = Settings.from_config(compose(["logger=mlflow", "logger.mlflow.tracking_uri=nonsense://here"])).logger
    with pytest.raises(ConfigError, match="logger=mlflow cannot be opened") as caught:
        loggers.open_loggers(asked, tmp_path)
    assert "\n" not in str(caught.value)


def test_nothing_is_imported_that_was_not_asked_for() -> None:
    import subprocess

    code = "import sys, kedge.encoders, kedge.datasets, kedge.training; "
    code += "print({*sys.modules} & {'wandb', 'mlflow', 'datasets', 'transformers', 'torchmetrics'})"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "set()"
