from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kedge.errors import ConfigError
from kedge.training import train
from kedge.training.module import RetrievalTraining
from kedge.training.sharpness import Climb


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def test_a_climb_is_one_step_of_that_length_and_leaves_no_trace() -> None:
    net, inputs = network(), torch.randn(16, 4).double()
    climb = Climb(net, 0.3)
    net.double()  # which, as a move to a GPU does, gives it new statistics
    loss = net(inputs).square().mean()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    gradients = torch.autograd.grad(loss, climb.weights)
    climb.ascend(gradients)
    assert climb.up
    moved = torch.cat([(p.detach() - before[name]).reshape(-1) for name, p in net.named_parameters()])
    direction = torch.cat([gradient.reshape(-1) for gradient in gradients])
    torch.testing.assert_close(moved, 0.3 * direction / direction.norm())
    assert net(inputs).square().mean() > loss
    climb.descend()
    assert not climb.up
    changed = {name for name, value in net.state_dict().items() if not torch.equal(value, before[name])}
    assert changed <= {"1.num_batches_tracked"}  # a count that nothing reads


def test_weights_without_a_gradient_stay_where_they_are() -> None:
    net = network()
    climb = Climb(net, 0.3)
    before = [weight.detach().clone() for weight in climb.weights]
    climb.ascend([None] * len(before))
    assert not climb.up
    climb.ascend([torch.ones_like(before[0]), *[None] * (len(before) - 1)])
    moved = [not torch.equal(weight, old) for weight, old in zip(climb.weights, before, strict=True)]
    assert moved == [True] + [False] * (len(before) - 1)
    climb.descend()
    assert all(torch.equal(weight, old) for weight, old in zip(climb.weights, before, strict=True))


def test_a_loss_alone_has_nothing_to_climb_with(tiny: list[str], tmp_path: Path) -> None:
    wanted = ["recipe=head", "recipe.size=12", "loss=cross_entropy", "recipe.sharpness.radius=0.1"]
    assert train(overrides=[*tiny, *wanted], folder=tmp_path / "run").loss == "cross_entropy"


@pytest.mark.parametrize("start", [0.0, 0.5])
def test_training_follows_the_gradient_from_above(
    start: float, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step's gradient is the one at the weights plus radius times the direction of their own gradient."""
    checked: list[bool] = []
    real_step, real_after = RetrievalTraining.training_step, RetrievalTraining.on_after_backward
    expected: list[Tensor] = []

    def training_step(self: RetrievalTraining, batch: Any, batch_idx: int) -> Tensor:
        state = {name: value.clone() for name, value in self.state_dict().items()}
        chance = self._chance.get_state(), torch.get_rng_state()
        weights = [weight for weight in self.network.parameters() if weight.requires_grad]
        step = self._step[0]
        draws = step.draw(batch[0], self._chance)
        gradients = torch.autograd.grad(step(*batch, draws).loss, weights)
        length = torch.cat([gradient.reshape(-1) for gradient in gradients]).norm()
        climbs = self.global_step >= start * float(self.trainer.estimated_stepping_batches)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.add_(gradient / length, alpha=0.1 * climbs)
        expected[:] = torch.autograd.grad(step(*batch, draws).loss * self.loss_scale, weights)
        self.load_state_dict(state)
        self._chance.set_state(chance[0])
        torch.set_rng_state(chance[1])
        loss = real_step(self, batch, batch_idx)
        checked.append(self._climb.up)
        return loss

    def on_after_backward(self: RetrievalTraining) -> None:
        real_after(self)
        assert not self._climb.up
        found = [weight.grad for weight in self._climb.weights if weight.grad is not None]
        one, other = (torch.cat([part.reshape(-1) for part in parts]) for parts in (found, expected))
        # As a whole, and not exactly: values next to a kink of the network fall to either side.
        assert (one - other).norm() < 0.1 * other.norm()

    monkeypatch.setattr(RetrievalTraining, "training_step", training_step)
    monkeypatch.setattr(RetrievalTraining, "on_after_backward", on_after_backward)
    # Not with a classifier that starts at zero: there the first step has no direction to climb.
    wanted = [f"recipe.sharpness.start={start}", "recipe.sharpness.radius=0.1", "recipe.epochs=2"]
    wanted += ["loss.discriminate=0"]
    train(overrides=[*tiny, *wanted], folder=tmp_path / "run")
    assert checked == [place >= start * len(checked) for place in range(len(checked))]


def test_half_precision_is_refused(tiny: list[str], tmp_path: Path) -> None:
    wanted = ["recipe.sharpness.radius=0.1", "trainer.precision=16-mixed"]
    with pytest.raises(ConfigError, match=r"use trainer\.precision=bf16-mixed"):
        train(overrides=[*tiny, *wanted], folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
