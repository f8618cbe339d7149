"""What training does for a GPU, as far as it can be seen without one."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kedge.datasets import ImageSplit
from kedge.encoders import build_encoder
from kedge.images import Augmentation, Mixing
from kedge.losses import CAMLoss, CrossEntropyLoss, RetrievalLoss
from kedge.training import compiling, train
from kedge.training.callbacks import BestAndLast
from kedge.training.compiling import Forward, compiled
from kedge.training.data import Resident, TrainingData, fits_on
from kedge.training.module import RetrievalTraining
from kedge.training.step import Draws, Outcome, Prepare, Step


def pictures(count: int = 23) -> ImageSplit:
    chance = np.random.default_rng(0)
    return ImageSplit(chance.integers(0, 256, (count, 3, 8, 8), dtype=np.uint8), chance.integers(0, 4, count))


def test_batches_of_resident_pictures_are_those_of_a_loader() -> None:
    read, there = (
        TrainingData(some, some, batch_size=5, seed=3, classes=None)
        for some in (pictures(), Resident.of(pictures(), torch.device("cpu")))
    )
    for epoch in (0, 4):
        loaders: list[Any] = [data.train_dataloader() for data in (read, there)]
        for loader in loaders:
            loader.sampler.set_epoch(epoch)
        assert len(loaders[0]) == len(loaders[1]) == 4
        for expected, found in zip(*loaders, strict=True):
            assert torch.equal(expected[0], found[0])
            assert torch.equal(expected[1], found[1])
    for one, other in zip(read.val_dataloader(), there.val_dataloader(), strict=True):
        for expected, found in zip(one, other, strict=True):
            assert torch.equal(expected[0], found[0])
            assert torch.equal(expected[1], found[1])


def test_where_the_pictures_live_changes_nothing(tiny: list[str], tmp_path: Path) -> None:
    found = [train(overrides=[*tiny, f"trainer.data={where}"], folder=tmp_path / where) for where in ("host", "device")]
    weights = [model.encoder.state_dict() for model in found]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_too_many_pictures_stay_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    assert fits_on(device, [pictures()])[0]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (pictures().images.nbytes, 0))
    assert not fits_on(device, [pictures()])[0]


class Noisy(nn.Module):
    """Keeps statistics and uses chance."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(values)
        return result


def noisy_step(loss: RetrievalLoss) -> Step:
    prepare = Prepare(lambda count, chance, _: torch.rand(count, 4, generator=chance), torch.add, nn.Identity())
    return Step(Noisy(), loss, prepare, Mixing())


@pytest.mark.parametrize("works", [True, False])
@pytest.mark.parametrize("loss", [CAMLoss(3, 4), CAMLoss(3, 4, repel_sample=2), CrossEntropyLoss(3, 4)], ids=str)
def test_trying_a_compiled_step_leaves_no_trace(
    works: bool, loss: RetrievalLoss, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = noisy_step(loss)
    calls: list[str | None] = []

    def compile_(module: Any, mode: str | None, **_: object) -> Any:
        calls.append(mode)

        def forward(*values: Any) -> Any:
            result = module(*values)
            if not works:
                raise RuntimeError("no compiler here\nand more lines")
            return result

        return forward

    monkeypatch.setattr(torch, "compile", compile_)
    before = {name: value.clone() for name, value in step.state_dict().items()}
    chance = torch.get_rng_state()
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    batch = inputs, torch.arange(6) % 3, step.draw(inputs, torch.Generator().manual_seed(2))
    if works:
        fast = compiled(step, batch, "default", scale=1.0, autocast=None)
        assert fast.forward is not step
        assert fast.seconds >= 0
    else:
        with pytest.warns(UserWarning, match=r"trains as it is, more slowly: no compiler here$"):
            fast = compiled(step, batch, "max-autotune", scale=1.0, autocast=torch.bfloat16)
        assert fast.forward is step
    assert calls == [None if works else "max-autotune-no-cudagraphs"]
    assert all(torch.equal(value, before[name]) for name, value in step.state_dict().items())
    assert all(parameter.grad is None for parameter in step.parameters())
    assert torch.equal(torch.get_rng_state(), chance)


@pytest.mark.parametrize("mixing", [Mixing(), Mixing(cutmix=0.5)])
def test_a_compiled_step_is_one_graph_with_the_same_outcome(mixing: Mixing) -> None:
    torch.manual_seed(0)
    encoder = build_encoder("resnet10", dim=8, head="bounded", image_size=16)
    nn.init.normal_(encoder.head.linear.weight)  # at its zero start, nothing would reach the encoder
    augmentation = Augmentation(cutout=4, trivial=True)
    step = Step(encoder, CAMLoss(3, 8), Prepare(augmentation.draw, augmentation.apply, nn.Identity()), mixing)
    inputs, labels = torch.randint(0, 256, (6, 3, 16, 16), dtype=torch.uint8), torch.arange(6) % 3
    draws = step.draw(inputs, torch.Generator().manual_seed(2))
    traced = torch.compile(step, backend="aot_eager", fullgraph=True)
    found, expected = traced(inputs, labels, draws), step(inputs, labels, draws)
    assert found.names == expected.names == ("loss", "attractor", "repeller", "minimum_norm", "_spread")
    torch.testing.assert_close(found.counted, expected.counted)
    gradients = [torch.autograd.grad(one.loss, list(step.parameters())) for one in (found, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def record_on_cpu(step: Step, forward: Forward, batch: Any, scale: float, cast: Any) -> Forward:
    """What a CUDA graph does, seen from outside: all results lie where they lay when it was recorded."""
    own = batch[0].clone(), batch[1].clone(), Draws(*(part.clone() for part in batch[2]))
    with cast:
        outcome = forward(*own)
    (outcome.loss * scale).backward()
    parameters = [parameter for parameter in step.parameters() if parameter.grad is not None]
    places = [parameter.grad for parameter in parameters]
    fixed = Outcome(outcome.loss.detach().clone(), outcome.counted.clone(), outcome.names)

    def launch() -> None:
        with cast:
            found = forward(*own)
        fixed.loss.copy_(found.loss.detach())
        fixed.counted.copy_(found.counted)
        for place, gradient in zip(places, torch.autograd.grad(found.loss * scale, parameters), strict=True):
            assert place is not None
            place.copy_(gradient)

    return compiling._Recorded(step, own, launch, fixed)


@pytest.mark.parametrize(("holdout", "radius"), [(0.1, 0.0), (0.0, 0.0), (0.1, 0.1)])
def test_a_recorded_step_trains_as_the_plain_one(
    holdout: float, radius: float, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "_RECORDS", ("cpu",))
    monkeypatch.setattr(compiling, "_record", record_on_cpu)
    monkeypatch.setattr(torch, "compile", lambda step, **_: step)
    used: list[bool] = []
    real = RetrievalTraining.use

    def watched(self: RetrievalTraining, fast: compiling.Fast) -> None:
        used.append(fast.with_gradients)
        real(self, fast)

    monkeypatch.setattr(RetrievalTraining, "use", watched)
    tiny = [*tiny, f"split.holdout={holdout}", "recipe.mixing.cutmix=0.5", "recipe.averaging=0.1"]
    tiny.append(f"recipe.sharpness.radius={radius}")
    for mode in ("off", "graph"):
        train(overrides=[*tiny, f"trainer.compile={mode}"], folder=tmp_path / mode)
    assert used == [True]
    found = [torch.load(tmp_path / mode / "checkpoints/last.ckpt", weights_only=True) for mode in ("off", "graph")]
    assert found[0]["state_dict"].keys() == found[1]["state_dict"].keys()
    for name, value in found[0]["state_dict"].items():
        close = {"rtol": 1e-2, "atol": 1e-4} if radius else {}
        torch.testing.assert_close(found[1]["state_dict"][name], value, msg=name, **close)
    histories = [
        [{name: float(value) for name, value in row.items() if name != "seconds"} for row in csv.DictReader(file)]
        for mode in ("off", "graph")
        for file in [(tmp_path / mode / "history.csv").read_text().splitlines()]
    ]
    for one, other in zip(*histories, strict=True):
        # A climb goes by the recorded gradient, which is that of the scaled loss: rounded a little differently.
        assert one == (pytest.approx(other, rel=1e-4) if radius else other)


@pytest.mark.parametrize("fails", ["at once", "when called", "when recorded"])
def test_what_cannot_be_compiled_leaves_the_same_checkpoints(
    fails: str, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Optimised(nn.Module):
        """What torch.compile returns is a module that holds the step."""

        def __init__(self, step: Step) -> None:
            super().__init__()
            self._orig_mod = step

        def forward(self, *batch: Any) -> Any:
            if fails == "when called":
                raise RuntimeError("not here")
            return self._orig_mod(*batch)

    def compile_(step: Step, **_: object) -> Optimised:
        if fails == "at once":
            raise RuntimeError("not supported")
        return Optimised(step)

    def record(*_: object) -> Forward:
        raise RuntimeError("no graph")

    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(compiling, "_RECORDS", ("cpu",))
    monkeypatch.setattr(compiling, "_record", record)
    said = "could not be recorded and is launched" if fails == "when recorded" else "could not be compiled and trains"
    with pytest.warns(UserWarning, match=said):
        train(overrides=[*tiny, "recipe.epochs=2", "trainer.compile=graph"], folder=tmp_path / "fails")
    train(overrides=[*tiny, "recipe.epochs=2"], folder=tmp_path / "plain")
    for name in ("last", "best"):
        paths = [tmp_path / run / f"checkpoints/{name}.ckpt" for run in ("plain", "fails")]
        expected, found = (torch.load(path, weights_only=True)["state_dict"] for path in paths)
        assert expected.keys() == found.keys()
        assert all(torch.equal(value, found[key]) for key, value in expected.items())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mixing", [Mixing(), Mixing(cutmix=0.5)])
def test_a_cuda_graph_leaves_the_gradients_of_the_plain_step(mixing: Mixing, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # which rounds differently in every kernel
    device = torch.device("cuda")
    encoder = build_encoder("resnet10", dim=8, head="bounded", image_size=16)
    augmentation = Augmentation(cutout=4)
    prepare = Prepare(augmentation.draw, augmentation.apply, nn.Identity())
    step = Step(encoder, CAMLoss(3, 8), prepare, mixing).to(device)
    step.network.head.linear.weight.data.normal_()
    batches = []
    for seed in range(3):
        inputs = torch.randint(0, 256, (64, 3, 16, 16), dtype=torch.uint8, device=device)
        labels = torch.randint(0, 3, (64,), device=device)
        batches.append((inputs, labels, step.draw(inputs, torch.Generator(device).manual_seed(seed))))
    fast = compiled(step, batches[0], "graph", scale=3.0, autocast=None)
    assert fast.with_gradients
    for batch in batches[1:]:
        before = {name: value.clone() for name, value in step.state_dict().items()}
        step.zero_grad()
        found = fast.forward(*batch)
        gradients = [parameter.grad.clone() for parameter in step.parameters() if parameter.grad is not None]
        step.load_state_dict(before)
        expected = step(*batch)
        torch.testing.assert_close(found.counted, expected.counted, rtol=1e-3, atol=1e-4)
        for one, other in zip(gradients, torch.autograd.grad(expected.loss * 3, list(step.parameters())), strict=True):
            # As a whole: a value next to a kink of the network falls to one side here, to the other there.
            assert (one - other).norm() < 0.02 * other.norm() + 1e-4, ((one - other).norm() / other.norm()).item()


def test_short_epochs_are_saved_now_and_then(tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(overrides=[*tiny, "recipe.epochs=4"], folder=tmp_path / "all")
    monkeypatch.setattr(BestAndLast, "SHARE", 1e-9)
    saved: list[int] = []
    real = BestAndLast.on_train_epoch_end

    def watched(self: BestAndLast, trainer: Any, module: Any) -> None:
        last = tmp_path / "few/checkpoints/last.ckpt"
        before = last.stat().st_mtime_ns if last.exists() else 0
        real(self, trainer, module)
        if last.stat().st_mtime_ns != before:
            saved.append(trainer.current_epoch)

    monkeypatch.setattr(BestAndLast, "on_train_epoch_end", watched)
    train(overrides=[*tiny, "recipe.epochs=4"], folder=tmp_path / "few")
    assert saved == [0, 3]
    best = [torch.load(tmp_path / run / "checkpoints/best.ckpt", weights_only=True) for run in ("all", "few")]
    assert best[0]["epoch"] == best[1]["epoch"]
    assert all(torch.equal(value, best[1]["state_dict"][name]) for name, value in best[0]["state_dict"].items())


def test_a_loader_with_workers_waits_for_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    data = TrainingData(pictures(), None, batch_size=5, seed=3, classes=4, for_gpu=True)
    plain = TrainingData(pictures(), None, batch_size=5, seed=3, classes=4)
    loaders: list[Any] = [data.train_dataloader(), plain.train_dataloader()]
    iterators = [iter(loader) for loader in loaders]
    for loader in loaders:
        loader.sampler.set_epoch(2)
    for found, expected in zip(*iterators, strict=True):
        assert torch.equal(found[1], expected[1])
        assert torch.equal(found[0], expected[0])
