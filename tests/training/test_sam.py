from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from kedge.errors import ConfigError
from kedge.training import train
from kedge.training.loop import TrainingLoop
from kedge.training.optimizer import SAM
from kedge.training.step import Draws


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def test_a_perturbation_has_the_radius_as_its_length_and_leaves_no_trace() -> None:
    net, inputs = network(), torch.randn(16, 4).double()
    sam = SAM(net, 0.3)
    net.double()  # which, as a move to a GPU does, gives it new statistics
    loss = net(inputs).square().mean()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    gradients = torch.autograd.grad(loss, sam.weights)
    sam.perturb(gradients)
    assert sam.perturbed
    moved = torch.cat([(p.detach() - before[name]).reshape(-1) for name, p in net.named_parameters()])
    direction = torch.cat([gradient.reshape(-1) for gradient in gradients])
    torch.testing.assert_close(moved, 0.3 * direction / direction.norm())
    assert net(inputs).square().mean() > loss
    sam.restore()
    assert not sam.perturbed
    changed = {name for name, value in net.state_dict().items() if not torch.equal(value, before[name])}
    assert changed <= {"1.num_batches_tracked"}  # a count that nothing reads


def test_weights_without_a_gradient_stay_where_they_are() -> None:
    net = network()
    sam = SAM(net, 0.3)
    before = [weight.detach().clone() for weight in sam.weights]
    sam.perturb([None] * len(before))
    assert not sam.perturbed
    sam.perturb([torch.ones_like(before[0]), *[None] * (len(before) - 1)])
    moved = [not torch.equal(weight, old) for weight, old in zip(sam.weights, before, strict=True)]
    assert moved == [True] + [False] * (len(before) - 1)
    sam.restore()
    assert all(torch.equal(weight, old) for weight, old in zip(sam.weights, before, strict=True))


def test_a_network_without_weights_is_not_perturbed(tiny: list[str], tmp_path: Path) -> None:
    wanted = ["recipe=head", "recipe.size=12", "loss=cross_entropy", "recipe.sam.radius=0.1"]
    assert train(overrides=[*tiny, *wanted], folder=tmp_path / "run").loss == "cross_entropy"


@pytest.mark.parametrize("start", [0.0, 0.5])
def test_a_step_follows_the_gradient_at_the_perturbed_weights(
    start: float, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step's gradient is the one at the weights plus radius times the direction of their own gradient."""
    perturbed: list[bool] = []
    real_forward, real_step = TrainingLoop.forward, TrainingLoop.optimizer_step
    expected: list[Tensor] = []

    def forward(self: TrainingLoop, inputs: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        state = {name: value.clone() for name, value in self.step.state_dict().items()}
        rng = torch.get_rng_state()
        weights = self.sam.weights
        gradients = torch.autograd.grad(self.step(inputs, labels, draws).loss, weights)
        norm = torch.cat([gradient.reshape(-1) for gradient in gradients]).norm()
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.add_(gradient / norm, alpha=0.1 * (self.global_step >= start * self.total_steps))
        loss = self.step(inputs, labels, draws).loss * self.backbone_lr_mult
        expected[:] = torch.autograd.grad(loss, weights)
        self.step.load_state_dict(state)
        torch.set_rng_state(rng)
        loss = real_forward(self, inputs, labels, draws)
        perturbed.append(self.sam.perturbed)
        return loss

    def optimizer_step(self: TrainingLoop) -> None:
        assert not self.sam.perturbed
        gradients = [weight.grad for weight in self.sam.weights if weight.grad is not None]
        one, other = (torch.cat([part.reshape(-1) for part in parts]) for parts in (gradients, expected))
        # As a whole, and not exactly: values next to a kink of the network fall to either side.
        assert (one - other).norm() < 0.1 * other.norm()
        real_step(self)

    monkeypatch.setattr(TrainingLoop, "forward", forward)
    monkeypatch.setattr(TrainingLoop, "optimizer_step", optimizer_step)
    # Not with a classifier that starts at zero: there the first step has no direction to climb.
    overrides = [f"recipe.sam.start={start}", "recipe.sam.radius=0.1", "recipe.epochs=2"]
    train(overrides=[*tiny, *overrides, "loss.discriminate=0"], folder=tmp_path / "run")
    assert perturbed == [index >= start * len(perturbed) for index in range(len(perturbed))]


def test_half_precision_is_refused(tiny: list[str], tmp_path: Path) -> None:
    wanted = ["recipe.sam.radius=0.1", "trainer.precision=16-mixed"]
    with pytest.raises(ConfigError, match=r"use trainer\.precision=bf16-mixed"):
        train(overrides=[*tiny, *wanted], folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
