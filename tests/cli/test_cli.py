from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import kedge.datasets
from kedge.cli import app
from kedge.cli.evaluate import evaluate
from kedge.config.compose import compose
from kedge.console import plain_warnings
from kedge.errors import ConfigError
from kedge.gallery import Gallery
from kedge.training import auto, train

HEAVY = ("torch", "hydra", "lance", "torchvision", "numpy", "matplotlib")


def start(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kedge", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=280)


@pytest.mark.parametrize(
    "code",
    [
        "import kedge",
        "import sys; sys.argv = ['kedge', '--help']\nfrom kedge.cli import app\napp(standalone_mode=False)",
    ],
)
def test_nothing_heavy_is_imported(code: str) -> None:
    look = f"print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    check = f"{code}\nimport sys, json\nprint()\n{look}"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_versions_are_listed_without_torch(tmp_path: Path) -> None:
    Gallery.create(tmp_path / "gallery", dim=2).add_embeddings(np.eye(2, dtype=np.float32))
    code = (
        "import sys; from kedge.cli import app; app(sys.argv[1:], standalone_mode=False); print('torch' in sys.modules)"
    )
    for arguments in (["versions"], ["remove", "0"], ["restore", "1"]):
        command = [sys.executable, "-c", code, arguments[0], str(tmp_path / "gallery"), *arguments[1:]]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "False"
    assert len(Gallery.open(tmp_path / "gallery")) == 0


def test_help_and_version() -> None:
    shown = CliRunner().invoke(app, ["--help"])
    assert shown.exit_code == 0
    for verb in ("train", "evaluate", "demo", "index", "search", "remove", "info", "optimize", "serve"):
        assert verb in shown.stdout
    assert CliRunner().invoke(app, ["--version"]).stdout.startswith("kedge ")


@pytest.mark.parametrize(
    ("command", "status", "error"),
    [
        ("pass", 0, ""),
        ("raise KedgeError('no')", 2, "kedge: no\n"),
        ("raise KeyboardInterrupt", 130, "kedge: stopped.\n"),
        ("sys.exit('why')", 1, "why\n"),
        ("raise ValueError('a defect')", 1, "ValueError: a defect\n"),
    ],
)
def test_the_process_ends_with_its_status_when_all_is_written(
    tmp_path: Path, command: str, status: int, error: str
) -> None:
    code = f"""
import atexit, sys, threading, time, kedge.cli
from kedge.errors import KedgeError
def app():
    atexit.register(print, "exit handler")
    threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
    {command}
kedge.cli.app = app
kedge.cli.run()
"""
    with (tmp_path / "output").open("w") as output:
        done = subprocess.run([sys.executable, "-c", code], stdout=output, stderr=subprocess.PIPE, text=True)
    assert done.returncode == status
    assert done.stderr.endswith(error)
    assert (tmp_path / "output").read_text().splitlines() == ["thread", "exit handler"]


def test_the_help_of_train_shows_settings_that_exist() -> None:
    shown = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "80"})
    assert shown.exit_code == 0
    for words in ("SOURCE", "SETTING=VALUE", "kedge train photos/", "recipe.epochs=20", "--cfg job"):
        assert words in shown.stdout
    settings = re.findall(r"^ *([\w.]+=[\w.]+) {2,}", shown.stdout, re.M)
    assert len(settings) > 10
    for setting in settings:
        compose([*(["dataset=folder"] if setting.startswith("dataset.") else []), setting])


def test_warnings_show_no_file_names(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        plain_warnings()
        warnings.warn("Mind the gap.", stacklevel=1)
    assert capsys.readouterr().err == "Warning: Mind the gap.\n"


def test_a_folder_that_holds_a_run_is_refused_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    monkeypatch.setattr(auto, "fetch_weights", lambda name: pytest.fail("fetched"))
    (tmp_path / "run").mkdir()
    (tmp_path / "photos").mkdir()
    (tmp_path / "run/config.yaml").touch()
    assert "run already holds a run; resume it with" in refused("train", "photos", "--folder", "run")
    with pytest.raises(ConfigError, match="already holds a run"):
        train(tmp_path / "photos", folder=tmp_path / "run")
    assert "Did you mean recipe.epochs=3?" in refused("train", "photos", "epochs=3")


def chosen_epoch(run: Path) -> dict[str, str]:
    """The row of the epoch whose held-out images found most; of equals the last."""
    with (run / "history.csv").open(newline="") as file:
        return max(csv.DictReader(file), key=lambda row: (float(row["val/mAP"]), int(row["epoch"])))


def test_train_then_evaluate(tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = start("train", *tiny, "recipe.epochs=2", "--folder", "first", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "kedge evaluate first" in done.stdout
    assert "epoch 2/2  loss" in done.stderr
    assert "val/accuracy" in done.stderr
    evaluate(tmp_path / "first")
    said = capsys.readouterr().out
    assert "brute force" in said
    assert "Most frequent confusions" in said or "no query was given a wrong class" in said
    assert {"metrics.json", "classes.csv", "confusion.csv", "confusion.png"} <= {
        file.name for file in (tmp_path / "first").iterdir()
    }
    metrics = json.loads((tmp_path / "first/metrics.json").read_text())
    assert set(metrics) >= {
        "brute_force",
        "label_lists",
        "label_lists_rest_last",
        "anchor_lists",
        "accuracy",
        "knn1",
    }
    assert metrics["queries"] == 40
    evaluate(tmp_path / "first", unknown="sample", out=tmp_path / "unknown.json")
    strangers = json.loads((tmp_path / "unknown.json").read_text())["open_set"]
    assert strangers["sample"].keys() == {"images", "AUROC", "FPR@95", "OSCR"}
    assert strangers["sample"]["images"] == 1000
    assert "open set" in capsys.readouterr().out
    evaluate(tmp_path / "first", held_out=True)
    chosen = json.loads((tmp_path / "first/held_out.json").read_text())
    assert (chosen["queries"], chosen["meta"]["gallery"]) == (16, 144)
    assert chosen["accuracy"] == pytest.approx(float(chosen_epoch(tmp_path / "first")["val/accuracy"]))
    assert json.loads((tmp_path / "first/metrics.json").read_text()) == metrics
    assert (tmp_path / "first/held_out_classes.csv").exists()


def write_images(arrays: Path, part: str, folder: Path) -> Path:
    """The images of a split in class folders."""
    with np.load(arrays) as content:
        for number, (image, label) in enumerate(zip(content[f"x_{part}"], content[f"y_{part}"], strict=True)):
            file = folder / str(content["classes"][label]) / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(file)
    return folder


def test_evaluate_against_a_folder_and_in_a_gallery(
    tiny: list[str], stripes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, queries = tmp_path / "run", write_images(stripes, "test", tmp_path / "queries")
    model = train(overrides=[*tiny, "recipe.epochs=1"], folder=run)
    evaluate(run)
    evaluate(run, against=queries)
    first, second = (json.loads((run / f"{name}.json").read_text()) for name in ("metrics", "against"))
    for method in ("brute_force", "label_lists", "anchor_lists"):  # they are the test images
        assert first[method] == pytest.approx(second[method], abs=1e-3)
    assert (first["queries"], second["queries"], second["meta"]["against"]) == (40, 40, str(queries))
    assert (run / "against_confusion.png").exists()
    evaluate(run, against=queries, limit=8, out=tmp_path / "mine.json")
    assert json.loads((tmp_path / "mine.json").read_text())["queries"] == 8
    assert (tmp_path / "mine_classes.csv").exists()

    gallery = tmp_path / "gallery"
    Gallery.create(gallery, model).add(write_images(stripes, "train", tmp_path / "items"))
    capsys.readouterr()
    evaluate(gallery)
    assert "its own items" in capsys.readouterr().out
    assert json.loads((gallery / "metrics.json").read_text())["queries"] == 160
    (queries / "level" / "broken.png").write_bytes(b"")
    evaluate(str(gallery), against=queries)
    said = capsys.readouterr()
    assert f"Left out: {queries / 'level' / 'broken.png'} cannot be read" in said.err
    assert json.loads((gallery / "against.json").read_text())["queries"] == 40
    assert len(Gallery.open(gallery)) == 160, "what is written there does not disturb it"
    for refused in ({"overrides": ["dataset=svhn"]}, {"held_out": True}, {"unknown": "svhn"}, {"trust": True}):
        with pytest.raises(ConfigError, match="is a gallery"):
            evaluate(gallery, **refused)


@pytest.mark.parametrize(
    "overrides",
    [
        ["recipe=head", "recipe.flip_tta=true", "recipe.size=12"],
        pytest.param(["recipe.flip_tta=true"], marks=pytest.mark.soak),
    ],
)
def test_held_out_pictures_are_seen_as_the_model_sees_them(
    overrides: list[str], tiny: list[str], tmp_path: Path
) -> None:
    train(overrides=[*tiny, *overrides, "recipe.epochs=2"], folder=tmp_path / "run")
    evaluate(tmp_path / "run", held_out=True)
    best = float(chosen_epoch(tmp_path / "run")["val/accuracy"])
    assert json.loads((tmp_path / "run/held_out.json").read_text())["accuracy"] == pytest.approx(best)
    assert json.loads((tmp_path / "run/model/model.json").read_text())["preprocessing"]["mirror"] is True


def test_a_failing_job_does_not_end_the_sweep(tiny: list[str], tmp_path: Path) -> None:
    sweep = ["-m", "loss.init=grid,base,random", "--folder", "sweep"]
    done = start("train", *tiny, "recipe.epochs=1", *sweep, cwd=tmp_path)
    assert done.returncode == 2
    assert "kedge: init must be 'base' or 'random', found 'grid'." in done.stderr
    assert len(list(tmp_path.glob("sweep/*/model"))) == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "loss=cam,arcfase", "-m"], "supcon, triplet, found 'arcfase'."),
        (["train", "recipe.foo=1", "-m"], "Unknown setting 'recipe.foo'; recipe has name, epochs, batch_size"),
        (
            ["train", "loss=arcfase"],
            "loss must be one of arcface, cam, center, contrastive, contrastive_normalized, cosface, cross_entropy",
        ),
        (["train", "epochs=3"], "kedge: Unknown setting 'epochs'. Did you mean recipe.epochs=3?\n"),
        (["train", "--epochs", "3"], "kedge: Unknown setting '--epochs'. Did you mean recipe.epochs=3?\n"),
        (["train", "--epochs=3", "seed=1"], "Unknown setting '--epochs'. Did you mean recipe.epochs=3?"),
        (["train", "--batch-size", "8"], "Did you mean recipe.batch_size=8?"),
        (["train", "--seed", "8"], "Unknown setting '--seed'. Did you mean seed=8?"),
        (["train", "--loss", "cam"], "Did you mean loss=cam?"),
        (["train", "recipe.lr=0.1"], "Did you mean recipe.optimizer.lr=0.1?"),
        (["train", "optimizer=adam"], "Did you mean recipe.optimizer.name=adam?"),
        (["train", "losss=cam"], "Did you mean loss=cam?"),
        (["train", "loss=arcface", "loss.margn=1"], "Did you mean loss.arguments.margin=1?"),
        (["train", "xyzzy=1"], "Unknown setting 'xyzzy'; kedge train --cfg job prints all settings."),
        (["train", "--foldr", "x"], "Unknown option '--foldr'. Did you mean --folder?"),
        (["train", "loss=cammm"], "found 'cammm'. Did you mean loss=cam?"),
        (["train", "recipe=kegde"], "found 'kegde'. Did you mean recipe=kedge?"),
        (["train", "one/", "two/"], "kedge train takes one source, found one/ and two/"),
        (["train", "nowhere/"], "nowhere/ is neither a folder of images nor an .npz file."),
        (["train", "dataset=folder", "dataset.path=nowhere"], "nowhere"),
        (["train", "--resume", "nowhere"], "nowhere is not a run"),
        (["train", "--resume", "nowhere", "seed=1"], "--resume keeps the run's own settings"),
        (["evaluate", "nowhere"], "nowhere"),
        (["evaluate", "nowhere", "foo"], "nowhere"),
        (["evaluate", "nowhere", "dataset=svhn", "--held-out"], "leave out the overrides"),
        (["evaluate", "nowhere", "--against", "queries", "--held-out"], "pass only one of them"),
        (["evaluate", "s3://bucket/gallery"], "pass --out FILE"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], sentence: str, refused: Callable[..., str]) -> None:
    said = refused(*arguments)
    assert sentence in said
    assert said.startswith("kedge: ")


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tenth of the sample and one epoch; `make wheel` runs it whole."""
    whole = kedge.datasets.sample()
    few = replace(whole, train=whole.train.subset(range(0, 7000, 10)), test=whole.test.subset(range(0, 1000, 10)))
    monkeypatch.setattr(kedge.datasets, "sample", lambda: few)
    small = ["recipe.epochs=1", "encoder=resnet10", "encoder.stem=imagenet", "recipe.batch_size=64"]
    done = CliRunner().invoke(app, ["demo", "--folder", str(tmp_path), *small])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "top6.png").stat().st_size > 10_000
    for loss in ("cam", "cross_entropy"):
        assert json.loads((tmp_path / f"{loss}/metrics.json").read_text())["queries"] == 100
    assert len(list((tmp_path / "queries").rglob("*.png"))) == 100
    assert len(Gallery.open(tmp_path / "gallery")) == 700
    assert f"kedge serve {tmp_path}/gallery" in done.stdout
