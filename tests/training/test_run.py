from __future__ import annotations

import contextlib
import csv
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kedge import Model, train
from kedge.config.compose import compose, dataset_of
from kedge.errors import ConfigError, DataError, TrainingError
from kedge.losses import CAMLoss
from kedge.training import loggers, resume_run, start_run
from kedge.training.checkpoint import Interrupted
from kedge.training.config import Settings
from kedge.training.loggers import History
from kedge.training.loop import TrainingLoop
from kedge.training.optimizer import EMA, build_scheduler

Parts = dict[str, torch.Tensor]

EAGER = "trainer.compile=off"


def history(folder: Path) -> list[dict[str, str]]:
    with (folder / "history.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def weights(folder: Path, name: str = "last") -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoints" / f"{name}.ckpt", weights_only=True)["state_dict"]


def same_weights(first: Path, second: Path) -> bool:
    pairs = [(weights(first, name), weights(second, name)) for name in ("last", "best")]
    return all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs)


def change_loss(monkeypatch: pytest.MonkeyPatch, change: Callable[[int, torch.Tensor, Parts], Parts]) -> None:
    """CAM's parts become what `change` makes of them, given the step's number (the first is 1) and embeddings.

    The run must be `EAGER`: to compile a step is to call it, and a graph is replayed without it.
    """
    steps = itertools.count(1)
    real = CAMLoss.components

    def changed(self: CAMLoss, embeddings: torch.Tensor, labels: torch.Tensor) -> Parts:
        return change(next(steps), embeddings, real(self, embeddings, labels))

    monkeypatch.setattr(CAMLoss, "components", changed)


def start_process(folder: Path, overrides: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kedge", "train", *overrides, f"hydra.run.dir={folder}"]
    # Whoever runs the tests in the background may have told them to ignore Ctrl-C.
    with ears():
        return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


@contextlib.contextmanager
def ears() -> Iterator[None]:
    """Signals are heard, here and in processes that are started meanwhile, whoever took them before."""
    before = [signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGTERM, signal.SIG_DFL)]
    try:
        yield
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)


def wait_for(condition: object, process: subprocess.Popen[str], seconds: float = 300) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture(scope="module")
def finished(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch that is over."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(overrides=[*tiny, "recipe.epochs=1", "seed=1"], folder=folder)
    return folder


@pytest.mark.parametrize("loss", ["cam", "contrastive", "cross_entropy"])
def test_a_run_leaves_a_model_that_has_learned(loss: str, tiny: list[str], tmp_path: Path) -> None:
    overrides = [*tiny, f"loss={loss}", "recipe.epochs=5"]
    if loss == "contrastive":
        overrides.append("recipe.optimizer.lr=0.001")
    model = train(overrides=overrides, folder=tmp_path / "run")
    assert model.loss == loss
    assert model.anchors is not None
    assert model.anchors.shape == (4, 8)
    assert model.classes == ("upright", "level", "slanted", "checked")
    rows = history(tmp_path / "run")
    assert [row["epoch"] for row in rows] == ["1", "2", "3", "4", "5"]
    target = "val/knn1" if loss == "contrastive" else "val/accuracy"
    assert float(rows[-1][target]) > 0.5
    assert float(rows[-1]["train/loss"]) < float(rows[0]["train/loss"])
    loaded = Model.load(tmp_path / "run", device="cpu")
    pixels = torch.randint(256, (3, 3, 12, 12), dtype=torch.uint8)
    # Trained on a GPU, the same weights lie in another order in memory.
    torch.testing.assert_close(loaded.embed_pixels(pixels), model.to("cpu").embed_pixels(pixels))
    # The model is that of the epoch whose held-out images found their class best; of equals the later one.
    best = max(range(5), key=lambda epoch: (float(rows[epoch]["val/mAP"]), epoch))
    assert torch.load(tmp_path / "run/checkpoints/best.ckpt", weights_only=True)["epoch"] == best


@pytest.mark.parametrize("where", ["", "dataset", "recipe.augmentation"])
def test_a_model_looks_at_mirrored_pictures_where_training_did(
    where: str, tiny: list[str], tmp_path: Path, stripes: Path
) -> None:
    wanted = [
        "loss=cross_entropy",
        "recipe.flip_tta=true",
        "recipe.epochs=1",
        *([f"{where}.flip=false"] if where else []),
    ]
    model = train(overrides=[*tiny, *wanted, "split.holdout=0"], folder=tmp_path)
    assert model.preprocessing.flip_tta is (not where)
    with np.load(stripes) as arrays:
        images, labels = torch.from_numpy(arrays["x_train"].transpose(0, 3, 1, 2).copy()), arrays["y_train"]
    embeddings = model.embed_pixels(images)
    means = torch.stack([embeddings[labels == label].mean(0) for label in range(4)])
    assert model.anchors is not None
    torch.testing.assert_close(model.anchors, means, rtol=1e-3, atol=1e-4)


def test_anchors_are_learned_in_a_group_without_weight_decay(tiny: list[str], tmp_path: Path) -> None:
    overrides = [*tiny, "loss.discriminate=0", "recipe.optimizer.anchor_lr=0.5", "recipe.epochs=1"]
    train(overrides=overrides, folder=tmp_path)
    state = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)
    groups = {group["name"]: group for group in state["optimizer_states"][0]["param_groups"]}
    assert groups["loss"]["weight_decay"] == 0
    assert groups["backbone"]["weight_decay"] == 5e-4
    # The loss is scaled up for the encoder, so head and anchors step that much less.
    assert groups["head"]["max_lr"] == pytest.approx(groups["backbone"]["max_lr"] / 3)
    assert groups["loss"]["max_lr"] == pytest.approx(groups["head"]["max_lr"] / 2)
    start = CAMLoss(4, 8).anchors
    assert not torch.equal(state["state_dict"]["loss.anchors"].cpu(), start)


@pytest.mark.parametrize("holdout", [0.1, 0.0])
def test_the_last_checkpoint_is_the_last_epoch_however_good_it_is(
    holdout: float, tiny: list[str], tmp_path: Path
) -> None:
    # At this rate nothing changes, so that no epoch is better than another: the last one is kept.
    overrides = [*tiny, f"split.holdout={holdout}", "recipe.optimizer.lr=1e-9"]
    train(overrides=overrides, folder=tmp_path)
    assert torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)["epoch"] == 2
    if holdout:
        assert torch.load(tmp_path / "checkpoints/best.ckpt", weights_only=True)["epoch"] == 2
    before = weights(tmp_path)
    resume_run(tmp_path)
    assert all(torch.equal(before[name], value) for name, value in weights(tmp_path).items())
    assert len(history(tmp_path)) == 3


def test_held_out_images_are_looked_at_now_and_then(tiny: list[str], tmp_path: Path) -> None:
    overrides = [*tiny, "recipe.epochs=4", "split.validate_every=2"]
    train(overrides=overrides, folder=tmp_path)
    seen = [row["val/mAP"] for row in history(tmp_path)]
    assert [bool(value) for value in seen] == [False, True, False, True]
    best = torch.load(tmp_path / "checkpoints/best.ckpt", weights_only=True)["epoch"]
    assert best == (1 if float(seen[1]) > float(seen[3]) else 3)


@pytest.mark.parametrize(
    ("epochs", "every"), [(1, 1), (7, 1), (15, 1), (30, 2), (59, 1), (60, 4), (97, 1), (100, 5), (150, 10), (400, 25)]
)
def test_at_least_fifteen_looks_and_the_last_epoch(epochs: int, every: int) -> None:
    settings = Settings.from_config(compose([f"recipe.epochs={epochs}"]))
    assert settings.validate_every == every
    assert Settings.from_config(compose(["recipe=paper", f"recipe.epochs={epochs}"])).validate_every == 1


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["recipe.epochs=5", "split.validate_every=2"], "must be a multiple"),
        (["recipe=paper", "split.validate_every=2"], "needs split.validate_every=1"),
        (["split.validate_every=0"], "at least 1"),
    ],
)
def test_looks_that_do_not_fit(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Settings.from_config(compose(overrides))
    if "split.validate_every=0" not in overrides:
        Settings.from_config(compose([*overrides, "split.holdout=0"]))  # nobody looks


def test_a_moved_run_remembers_its_best_epoch(tiny: list[str], tmp_path: Path) -> None:
    train(overrides=[*tiny, "recipe.schedule.name=constant"], folder=tmp_path / "here")
    best = torch.load(tmp_path / "here/checkpoints/best.ckpt", weights_only=True)
    (tmp_path / "here").rename(tmp_path / "there")
    config = (tmp_path / "there/config.yaml").read_text()
    (tmp_path / "there/config.yaml").write_text(config.replace("epochs: 3", "epochs: 4"))
    resume_run(tmp_path / "there")
    scores = [float(row["val/mAP"]) for row in history(tmp_path / "there")]
    assert len(scores) == 4
    again = torch.load(tmp_path / "there/checkpoints/best.ckpt", weights_only=True)
    assert again["epoch"] == (3 if scores[3] >= max(scores[:3]) else best["epoch"])


def test_weights_broken_by_the_last_step_are_noticed(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(step: int, embeddings: torch.Tensor, parts: Parts) -> Parts:
        if step == 10:  # the last step of the first epoch: its loss is fine, its gradient is not
            embeddings.register_hook(lambda gradient: gradient * float("inf"))
        return parts

    change_loss(monkeypatch, breaks)
    with pytest.raises(TrainingError, match=r"in epoch 1: lower"):
        train(overrides=[*tiny, EAGER, "split.holdout=0"], folder=tmp_path)
    assert not (tmp_path / "checkpoints/last.ckpt").exists()


def test_changed_pictures_are_noticed(stripes: Path, tiny: list[str], tmp_path: Path) -> None:
    arrays = dict(np.load(stripes))
    mine = tmp_path / "mine.npz"
    np.savez(mine, **arrays)
    train(overrides=[*tiny, f"dataset.path={mine}", "recipe.epochs=1"], folder=tmp_path / "run")
    assert len(dataset_of(tmp_path / "run").test) == 40
    np.savez(mine, **{**arrays, "x_train": arrays["x_train"][::-1]})
    with pytest.raises(DataError, match="mine has changed since"):
        resume_run(tmp_path / "run")
    with pytest.raises(DataError, match="mine has changed since"):
        dataset_of(tmp_path / "run")
    assert len(dataset_of(tmp_path / "run", [f"dataset.path={stripes}"]).test) == 40


def test_history_is_written_by_rank_0_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank_zero in (False, True):
        monkeypatch.setattr(loggers, "is_rank_zero", lambda rank_zero=rank_zero: rank_zero)
        written = History(tmp_path / "history.csv")
        written.append({"epoch": 1, "train/loss": 0.5})
        assert (tmp_path / "history.csv").exists() is rank_zero
        assert len(written.rows) == 1
    assert history(tmp_path) == [{"epoch": "1", "train/loss": "0.5"}]


def test_the_same_seed_gives_the_same_weights(finished: Path, tiny: list[str], tmp_path: Path) -> None:
    for seed in (1, 2):
        train(overrides=[*tiny, "recipe.epochs=1", f"seed={seed}"], folder=tmp_path / str(seed))
        assert same_weights(finished, tmp_path / str(seed)) is (seed == 1)


@pytest.mark.parametrize("final", [0.0, 0.25])
def test_one_cycle_ends_where_it_is_told_to(final: float) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.05)
    schedule = Settings.from_config(compose([f"recipe.schedule.final={final}"])).recipe.schedule
    scheduler = build_scheduler(optimizer, schedule, total_steps=30, maximize=True, few_shot=False)
    rates = []
    for _ in range(29):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert max(rates) == pytest.approx(0.05)
    assert rates[-1] == pytest.approx(0.05 * final, rel=1e-3, abs=1e-6)


def test_the_average_of_the_weights_is_kept(tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    real = EMA.update

    def watched(self: EMA) -> None:
        seen.append(self._live["loss.anchors"].clone())
        real(self)

    monkeypatch.setattr(EMA, "update", watched)
    train(overrides=[*tiny, "recipe.ema=0.5", "split.holdout=0"], folder=tmp_path)
    expected, span = seen[0].double(), len(seen) / 2
    for step, anchors in enumerate(seen, start=1):
        expected = expected.lerp(anchors.double(), 1 / min(step, span))
    kept = weights(tmp_path, "best")["loss.anchors"].double()
    torch.testing.assert_close(kept, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(kept, seen[-1].double(), rtol=1e-5, atol=1e-5)


def test_the_average_is_what_is_validated(tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    validated: dict[int, dict[str, torch.Tensor]] = {}
    real = TrainingLoop._embed

    def watched(self: TrainingLoop, *args: Any, **options: Any) -> Any:
        validated[self.epoch] = {name: value.clone() for name, value in self.step.state_dict().items()}
        return real(self, *args, **options)

    monkeypatch.setattr(TrainingLoop, "_embed", watched)
    train(overrides=[*tiny, "recipe.ema=0.5"], folder=tmp_path)
    best = torch.load(tmp_path / "checkpoints/best.ckpt", weights_only=True)
    assert all(torch.equal(value, validated[best["epoch"]][name]) for name, value in best["state_dict"].items())
    last = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)
    assert not torch.equal(last["state_dict"]["loss.anchors"], validated[last["epoch"]]["loss.anchors"])


def test_parts_of_a_loss_that_come_and_go_are_refused(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_loss(monkeypatch, lambda step, _, parts: parts if step < 3 else {"attractor": parts["attractor"]})
    with pytest.raises(
        TrainingError, match="same parts in every step, found attractor, discriminate, repeller, minimum_norm and at"
    ):
        train(overrides=[*tiny, EAGER], folder=tmp_path)


SCHEDULES = {
    "one cycle": [
        *("loss=cam", "recipe.ema=0.2", "recipe.sam.radius=0.05"),
        *("split.validate_every=2", "recipe.flip_tta=true"),
        *("recipe.per_class=2", "recipe.views=2", "recipe.optimizer.clip=1"),
    ],
    "plateau": ["recipe=paper", "loss=cross_entropy", "recipe.schedule.patience=0", "recipe.schedule.factor=0.3"],
}


@pytest.mark.parametrize("schedule", ["one cycle", pytest.param("plateau", marks=pytest.mark.soak)])
def test_killed_in_the_middle_of_an_epoch_and_resumed_ends_bit_for_bit_the_same(
    schedule: str, tiny: list[str], tmp_path: Path
) -> None:
    check_kill_and_resume(SCHEDULES[schedule], tiny, tmp_path, after_epochs=2, moment=0.15)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_killed_at_any_moment(seed: int, tiny: list[str], tmp_path: Path) -> None:
    chance = random.Random(seed)
    chosen = chance.choice(list(SCHEDULES.values()))
    check_kill_and_resume(
        chosen, tiny, tmp_path, after_epochs=chance.randint(1, 2), moment=chance.uniform(0.0, 0.5), mid_epoch=False
    )


def check_kill_and_resume(
    chosen: list[str], tiny: list[str], tmp_path: Path, *, after_epochs: int, moment: float, mid_epoch: bool = True
) -> None:
    # The recipe comes first, so that the tiny settings win; small batches make an epoch last long enough.
    overrides = [*chosen, *tiny, "recipe.batch_size=4", "recipe.epochs=4"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    start_run(compose(overrides), whole)

    process = start_process(killed, overrides)
    wait_for((killed / "checkpoints/last.ckpt").exists, process)
    wait_for(lambda: len(history(killed)) >= after_epochs, process)
    time.sleep(moment)
    process.send_signal(signal.SIGKILL)
    process.wait()
    if mid_epoch:
        assert len(history(killed)) < 4
        assert not (killed / "model").exists()

    resume_run(killed)
    assert same_weights(whole, killed)
    assert [row["epoch"] for row in history(killed)] == ["1", "2", "3", "4"]
    timeless = [[{k: v for k, v in row.items() if k != "seconds"} for row in history(f)] for f in (whole, killed)]
    assert timeless[0] == timeless[1]


def test_a_checkpoint_of_the_first_release_is_resumed(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [*tiny, "recipe.ema=0.2"]
    train(overrides=overrides, folder=tmp_path / "whole")
    real = TrainingLoop.on_epoch_start

    def stops(self: TrainingLoop) -> None:
        real(self)
        if self.epoch == 1:
            self.stop.set()

    monkeypatch.setattr(TrainingLoop, "on_epoch_start", stops)
    with pytest.raises(Interrupted, match="Stopped after 1 of 3 epochs"):
        train(overrides=overrides, folder=tmp_path / "old")
    monkeypatch.undo()
    path = tmp_path / "old/checkpoints/last.ckpt"
    state = torch.load(path, weights_only=True)
    # As Lightning's trainer wrote it.
    callbacks = {
        "Averaging": state.pop("ema"),
        "History": {"rows": state.pop("history")},
        "BestAndLast": {"best": state.pop("best")},
    }
    del state["precision"]
    torch.save({**state, "callbacks": callbacks, "loops": {}, "pytorch-lightning_version": "2.6.6"}, path)
    resume_run(tmp_path / "old")
    assert same_weights(tmp_path / "whole", tmp_path / "old")
    assert len(history(tmp_path / "old")) == 3
    torch.save({"epoch": 0, "state_dict": {}}, path)
    with pytest.raises(TrainingError, match=r"last\.ckpt cannot be resumed, since it has no global_step, .*again"):
        resume_run(tmp_path / "old")


def test_ctrl_c_leaves_a_checkpoint_and_says_how_to_go_on(tiny: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start_process(folder, [*tiny, "recipe.epochs=200"])
    wait_for((folder / "checkpoints/last.ckpt").exists, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"kedge train --resume {folder}" in errors
    assert "Traceback" not in errors
    done = torch.load(folder / "checkpoints/last.ckpt", weights_only=True)["epoch"]
    config = (folder / "config.yaml").read_text().replace("epochs: 200", f"epochs: {done + 2}")
    (folder / "config.yaml").write_text(config)
    resume_run(folder)
    assert len(history(folder)) == done + 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_run_wherever_it_falls(
    number: signal.Signals, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = History.append

    def ignored(self: History, row: dict[str, Any], **options: Any) -> None:
        real(self, row, **options)
        if row["epoch"] == 1:
            with contextlib.suppress(KeyboardInterrupt):  # as in a finaliser
                signal.raise_signal(number)

    monkeypatch.setattr(History, "append", ignored)
    with ears():
        before = signal.getsignal(number)
        with pytest.raises(Interrupted, match="Stopped after 1 of 3 epochs"):
            train(overrides=tiny, folder=tmp_path)
        assert signal.getsignal(number) is before
    monkeypatch.undo()
    resume_run(tmp_path)
    assert len(history(tmp_path)) == 3


def test_nan_stops_the_run_and_keeps_the_last_good_checkpoint(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(step: int, _: torch.Tensor, parts: Parts) -> Parts:
        return {name: part * float("nan") for name, part in parts.items()} if step == 14 else parts

    change_loss(monkeypatch, breaks)
    with pytest.raises(
        TrainingError,
        match=r"NaN or infinite in epoch 2; the checkpoint of epoch 1 is kept.*recipe.optimizer.lr \(now 0.05\)",
    ):
        train(overrides=[*tiny, EAGER], folder=tmp_path)
    assert all(value.isfinite().all() for value in weights(tmp_path).values())
    assert torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)["epoch"] == 0


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_is_one_sentence_and_the_last_checkpoint_stays(tiny: list[str], tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    # The best weights (1.5 MB) and the first epoch's checkpoint (3 MB) fit, a second one beside them does not.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)], check=True)
    try:
        with pytest.raises(TrainingError, match=r"The disk is full.*kedge train --resume"):
            train(overrides=tiny, folder=disk / "run")
        assert len(weights(disk / "run")) > 10
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize(("epochs", "judged"), [(3, 2), (20, 6)])  # the rate rises in the first fifth
def test_embeddings_at_the_mean_of_the_anchors_are_noticed(
    tiny: list[str], tmp_path: Path, epochs: int, judged: int
) -> None:
    lazy = [*tiny, "recipe.optimizer.lr=1e-7", f"recipe.epochs={epochs}"]
    words = rf"After {judged} of {epochs} epochs .* at the mean of the anchors .*\(now 1e-07\)"
    with pytest.warns(UserWarning, match=words):
        train(overrides=lazy, folder=tmp_path)


def test_all_images_can_be_trained_on(tiny: list[str], tmp_path: Path) -> None:
    train(
        overrides=[*tiny, "split.holdout=0", "recipe.schedule.name=plateau", "recipe.epochs=2"],
        folder=tmp_path,
    )
    assert torch.load(tmp_path / "checkpoints/best.ckpt", weights_only=True)["epoch"] == 1
    assert (tmp_path / "model/model.json").exists()


def test_few_shot_with_fewer_images_than_a_batch(tiny: list[str], tmp_path: Path) -> None:
    train(overrides=[*tiny, "split.shots=2", "recipe.batch_size=512"], folder=tmp_path)
    assert int(history(tmp_path)[-1]["step"]) == 3


def test_swin_and_resnet101_take_the_papers_batches() -> None:
    assert compose(["recipe=paper", "encoder=swin_t"]).recipe.batch_size == 64
    assert compose(["recipe=paper", "encoder=resnet101"]).recipe.batch_size == 128
    assert compose(["recipe=paper", "encoder=resnet50"]).recipe.batch_size == 512
    assert compose(["recipe=paper", "encoder=swin_t", "recipe.batch_size=8"]).recipe.batch_size == 8


def test_bad_input(tiny: list[str], tmp_path: Path) -> None:
    cases = {
        "recipe.optimizer.name=lion": r"recipe.optimizer.name must be one of sgd, adam, adamw, found 'lion'",
        "recipe.schedule.name=step": r"recipe.schedule.name must be one of one_cycle, plateau, constant",
        "recipe.epochs=0": r"recipe.epochs must be at least 1, found 0",
        "recipe.epochs=many": r"recipe.epochs must be a whole number, found 'many'",
        "split.holdout=1.5": r"split.holdout must be at least 0 and below 1, found 1.5",
        "encoder.stem=huge": r"stem.*huge",
        "encoder.head=round": r"head.*round",
        "loss.init=grid": r"init must be 'base' or 'random', found 'grid'",
        "loss.margin=big": r"margin must be a number above 0, found 'big'",
        "loss.repel=maybe": r"repel must be true or false, found 'maybe'",
        "loss._target_=os.system": r"loss._target_=os.system is not a subclass of kedge.losses.RetrievalLoss",
        "recipe.batch_size=1": r"recipe.batch_size must be at least 2, found 1",
        "recipe.size=0": r"recipe.size must be at least 1, found 0",
        "recipe.optimizer.momentum=-1": r"recipe.optimizer.momentum must be at least 0 and below 1, found -1",
        "recipe=null": r"Config group override must be a string",
        "seed=-1": r"seed must be at least 0",
        "seed=abc": r"seed must be a whole number, found 'abc'",
        "trainer.accelerator=banana": r"trainer.accelerator must be one of auto, cpu, gpu, found 'banana'",
        "trainer.precision=99": r"trainer.precision must be a word, found 99",
        "trainer.deterministic=often": r"trainer.deterministic must be true or false, found 'often'",
        "experiment=dmeo": r"experiment must be one of demo, found 'dmeo'",
    }
    for override, sentence in cases.items():
        folder = tmp_path / override.replace("=", "-")
        with pytest.raises(ConfigError, match=sentence):
            train(overrides=[*tiny, override], folder=folder)
        assert not folder.exists()
    with pytest.raises(ConfigError, match=r"label_smoothing must be a number of at least 0 and below 1, found 7"):
        train(overrides=[*tiny, "loss=cross_entropy", "loss.label_smoothing=7"], folder=tmp_path / "smooth")
    with pytest.raises(ConfigError, match=r"head=bounded does not suit the loss contrastive; use linear or none"):
        train(overrides=[*tiny, "loss=contrastive", "encoder.head=bounded"], folder=tmp_path / "bounded")
    with pytest.raises(TrainingError, match=r"^/proc/nowhere: No such file"):
        train(overrides=tiny, folder=Path("/proc/nowhere/run"))
    with pytest.raises(ConfigError, match=r"loss must be one of arcface, cam, center, .*, triplet, found 'arcfase'"):
        train(overrides=["loss=arcfase"])
    with pytest.raises(ConfigError, match=r"Unknown setting 'recipe.optimiser.lr'. Did you mean recipe.optimizer.lr="):
        train(overrides=["recipe.optimiser.lr=1"])
    with pytest.raises(DataError, match="neither a folder"):
        train(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="is not a run"):
        resume_run(tmp_path / "nowhere")


def test_a_run_is_never_written_over(finished: Path, tiny: list[str]) -> None:
    with pytest.raises(ConfigError, match="already holds a run"):
        train(overrides=[*tiny, "recipe.epochs=1"], folder=finished)
