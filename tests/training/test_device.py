"""What training does for a GPU, as far as it can be seen without one."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kedge.config.compose import compose
from kedge.datasets import ImageSplit
from kedge.encoders import build_encoder
from kedge.images import Augmentation, Mixing, Preprocessing
from kedge.losses import CAMLoss, CrossEntropyLoss, RetrievalLoss
from kedge.training import train
from kedge.training.checkpoint import ModelCheckpoint
from kedge.training.config import Settings, Trainer
from kedge.training.data import DeviceDataset, TrainingData, fits_on
from kedge.training.parallel import SINGLE_PROCESS, Accelerator
from kedge.training.step import Step, compile_step


def pictures(count: int = 23) -> ImageSplit:
    rng = np.random.default_rng(0)
    return ImageSplit(rng.integers(0, 256, (count, 3, 8, 8), dtype=np.uint8), rng.integers(0, 4, count))


@pytest.mark.parametrize("workers", [False, True])
def test_batches_on_the_device_are_those_of_a_loader(workers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    host, device = (
        TrainingData(examples, examples, batch_size=5, seed=3, classes=None, for_gpu=workers)
        for examples in (pictures(), DeviceDataset.copy_of(pictures(), torch.device("cpu")))
    )
    orders = []
    for epoch in (0, 4):
        batches = [list(data.train_batches(epoch)) for data in (host, device)]
        assert len(batches[0]) == len(batches[1]) == host.steps_per_epoch == 4
        orders.append(torch.cat([inputs for inputs, _ in batches[0]]))
        for expected, seen in zip(*batches, strict=True):
            assert torch.equal(expected[0], seen[0])
            assert torch.equal(expected[1], seen[1])
    assert not torch.equal(*orders)
    for kind in ("query_batches", "gallery_batches"):
        for expected, seen in zip(getattr(host, kind)(), getattr(device, kind)(), strict=True):
            assert torch.equal(expected[0], seen[0])
            assert torch.equal(expected[1], seen[1])


def test_where_the_images_live_changes_nothing(tiny: list[str], tmp_path: Path) -> None:
    models = [
        train(overrides=[*tiny, "recipe.epochs=1", f"trainer.data={where}"], folder=tmp_path / where)
        for where in ("host", "device")
    ]
    weights = [model.encoder.state_dict() for model in models]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


class Bounded(nn.Module):
    """Says how large its input may be, once rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, draws: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return draws.max(), self.linear(draws[:, None]).dtype


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "32-true"])
def test_random_numbers_stay_below_one_in_mixed_precision(precision: Any) -> None:
    settings = Settings.from_config(compose([f"trainer.precision={precision}"]))
    accelerator = Accelerator(settings, SINGLE_PROCESS, torch.device("cpu"))
    with accelerator.autocast():
        largest, dtype = accelerator.wrap(Bounded())(torch.tensor([0.5, 1 - 2**-24]))
    assert largest < 1
    assert dtype == {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision, torch.float32)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_too_many_images_stay_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    assert fits_on(device, [pictures()])[0]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (pictures().images.nbytes, 0))
    assert not fits_on(device, [pictures()])[0]


class Noisy(nn.Module):
    """Keeps statistics and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(values)
        return result


def noisy_step(loss: RetrievalLoss) -> Step:
    return Step(Noisy(), loss, Mixing())


@pytest.mark.parametrize("works", [True, False])
@pytest.mark.parametrize("loss", [CAMLoss(3, 4), CAMLoss(3, 4, repel_sample=2), CrossEntropyLoss(3, 4)], ids=str)
def test_trying_a_compiled_step_leaves_no_trace(
    works: bool, loss: RetrievalLoss, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = noisy_step(loss)
    calls: list[str | None] = []

    def compile_(function: Any, mode: str | None, **_: object) -> Any:
        def forward(*values: Any) -> Any:
            calls.append(mode)
            result = function(*values)
            if not works:
                raise RuntimeError("no compiler here\nand more lines")
            return result

        return forward

    monkeypatch.setattr(torch, "compile", compile_)
    before = {name: value.clone() for name, value in step.state_dict().items()}
    rng = torch.get_rng_state()
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    batch = inputs, torch.arange(6) % 3, step.draw(inputs, torch.Generator().manual_seed(2))
    if works:
        assert compile_step(step, batch, "reduce-overhead", contextlib.nullcontext()) is not None
        assert calls == ["reduce-overhead"] * 3
    else:
        with pytest.warns(UserWarning, match=r"so training is slower: no compiler here$"):
            assert compile_step(step, batch, "max-autotune", torch.autocast("cpu", torch.bfloat16)) is None
        assert calls == ["max-autotune"]
    assert all(torch.equal(value, before[name]) for name, value in step.state_dict().items())
    assert all(parameter.grad is None for parameter in step.parameters())
    assert torch.equal(torch.get_rng_state(), rng)
    calls.clear()
    step(*batch)
    assert bool(calls) is works


@pytest.mark.parametrize("mixing", [Mixing(), Mixing(cutmix=0.5)])
def test_a_compiled_step_is_one_graph_with_the_same_outcome(mixing: Mixing) -> None:
    torch.manual_seed(0)
    encoder = build_encoder("timm:test_resnet", dim=8, head="bounded", image_size=16)
    nn.init.normal_(encoder.head.linear.weight)  # at its zero start, nothing would reach the encoder
    augmentation = Augmentation(cutout=4, trivial=True)
    step = Step(encoder, CAMLoss(3, 8), mixing, augmentation, Preprocessing())
    inputs, labels = torch.randint(0, 256, (6, 3, 16, 16), dtype=torch.uint8), torch.arange(6) % 3
    draws = step.draw(inputs, torch.Generator().manual_seed(2))
    traced = torch.compile(step._eager, backend="aot_eager", fullgraph=True)
    outcome, expected = traced(inputs, labels, draws), step(inputs, labels, draws)
    assert outcome.names == expected.names == ("loss", "attractor", "repeller", "minimum_norm", "_spread")
    # The two need not add in the same order, and one rounding of the weights moves gradients by a thousandth.
    torch.testing.assert_close(outcome.values, expected.values, rtol=1e-3, atol=1e-5)
    gradients = [torch.autograd.grad(each.loss, list(step.parameters())) for each in (outcome, expected)]
    for traced_gradient, gradient in zip(*gradients, strict=True):
        assert (traced_gradient - gradient).norm() <= 1e-2 * gradient.norm()


EVERYTHING = [
    *("recipe.epochs=2", "recipe.ema=0.1", "recipe.mixing.cutmix=0.5", "recipe.sam.radius=0.1"),
    "trainer.accelerator=cpu",  # where the same run ends with the same bits, and a step is not compiled unasked
]


@pytest.fixture(scope="module")
def eager(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose step was not compiled."""
    folder = tmp_path_factory.mktemp("eager") / "run"
    train(overrides=[*tiny, *EVERYTHING], folder=folder)
    return folder


@pytest.mark.parametrize("fails", [True, False])
def test_a_compiled_run_leaves_the_checkpoints_of_an_eager_one(
    fails: bool, eager: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[str] = []

    def compile_(function: Any, mode: str, **_: object) -> Any:
        modes.append(mode)
        if fails:
            raise RuntimeError("not supported")
        return function

    monkeypatch.setattr(torch, "compile", compile_)
    warned = pytest.warns(UserWarning, match="could not be compiled, so training is slower")
    with warned if fails else contextlib.nullcontext():
        train(overrides=[*tiny, *EVERYTHING, "trainer.compile=reduce-overhead"], folder=tmp_path)
    assert modes == ["reduce-overhead"]
    for name in ("last", "best"):
        paths = [run / f"checkpoints/{name}.ckpt" for run in (eager, tmp_path)]
        expected, compiled = (torch.load(path, weights_only=True)["state_dict"] for path in paths)
        assert expected.keys() == compiled.keys()
        assert all(torch.equal(value, compiled[key]) for key, value in expected.items())


def test_a_batch_in_parts_is_compiled_without_cuda_graphs(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch, "compile", lambda function, mode, **_: modes.append(mode) or function)
    overrides = ["recipe.epochs=1", "trainer.accumulate=2"]
    for mode in ("reduce-overhead", "max-autotune"):
        train(overrides=[*tiny, *overrides, f"trainer.compile={mode}"], folder=tmp_path / mode)
    assert modes == ["default", "max-autotune-no-cudagraphs"]


def test_the_old_name_of_a_mode_is_taken_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="trainer.compile=graph is now called reduce-overhead"):
        assert Trainer(compile="graph").compile == "reduce-overhead"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mixing", [Mixing(), Mixing(cutmix=0.5)])
def test_cuda_graphs_leave_the_gradients_of_the_eager_step(mixing: Mixing, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # which rounds differently in every kernel
    device = torch.device("cuda")
    encoder = build_encoder("resnet10", dim=8, head="bounded", image_size=16)
    augmentation = Augmentation(cutout=4)
    step = Step(encoder, CAMLoss(3, 8), mixing, augmentation, Preprocessing()).to(device)
    step.network.head.linear.weight.data.normal_()
    batches = []
    for seed in range(3):
        inputs = torch.randint(0, 256, (64, 3, 16, 16), dtype=torch.uint8, device=device)
        labels = torch.randint(0, 3, (64,), device=device)
        batches.append((inputs, labels, step.draw(inputs, torch.Generator(device).manual_seed(seed))))
    assert compile_step(step, batches[0], "reduce-overhead", contextlib.nullcontext()) is not None
    for batch in batches[1:]:
        before = {name: value.clone() for name, value in step.state_dict().items()}
        outcome = step(*batch)
        values = outcome.values.clone()
        outcome.loss.backward()
        gradients = [parameter.grad.clone() for parameter in step.parameters() if parameter.grad is not None]
        step.zero_grad(set_to_none=True)
        step.load_state_dict(before)
        expected = step._eager(*batch)
        torch.testing.assert_close(values, expected.values, rtol=1e-3, atol=1e-4)
        for one, other in zip(gradients, torch.autograd.grad(expected.loss, list(step.parameters())), strict=True):
            # As a whole: a value next to a kink of the network falls to one side here, to the other there.
            assert (one - other).norm() < 0.02 * other.norm() + 1e-4, ((one - other).norm() / other.norm()).item()


def test_short_epochs_are_saved_now_and_then(tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(overrides=[*tiny, "recipe.epochs=4"], folder=tmp_path / "all")
    monkeypatch.setattr(ModelCheckpoint, "MAX_TIME_SHARE", 1e-9)
    saved: list[int] = []
    real = ModelCheckpoint.on_epoch_end

    def watched(self: ModelCheckpoint, epoch: int, *args: Any) -> None:
        before = self.epochs_saved
        real(self, epoch, *args)
        if self.epochs_saved != before:
            saved.append(epoch)

    monkeypatch.setattr(ModelCheckpoint, "on_epoch_end", watched)
    train(overrides=[*tiny, "recipe.epochs=4"], folder=tmp_path / "few")
    assert saved == [0, 3]
    assert torch.load(tmp_path / "few/checkpoints/last.ckpt", weights_only=True)["epoch"] == 3
    best = [torch.load(tmp_path / run / "checkpoints/best.ckpt", weights_only=True) for run in ("all", "few")]
    assert best[0]["epoch"] == best[1]["epoch"]
    assert all(torch.equal(value, best[1]["state_dict"][name]) for name, value in best[0]["state_dict"].items())
