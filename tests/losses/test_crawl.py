"""Why CAM's training crawls with many classes, and that `discriminate` cures it: the mechanism, not a figure."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from kedge.encoders.heads import build_head
from kedge.losses import CAMLoss

DIM = 150
FEW, MANY = 10, 300


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Matrices this small are slower on several threads, far slower where cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def cam(classes: int, discriminate: float = 0.0) -> CAMLoss:
    """Anchors on base vectors of length √2·m, where repeller and minimum norm are zero: left out, to save time."""
    return CAMLoss(classes, DIM, discriminate=discriminate, repel=False, keep_norm=False).double()


def reaching(loss: CAMLoss, features: Tensor, outputs: Tensor, labels: Tensor, parts: tuple[str, ...]) -> float:
    """RMS of the gradient each point's own loss sends to its features, per RMS distance left to the anchor."""
    found = loss.components(outputs, labels)
    (gradient,) = torch.autograd.grad(sum(found[part] for part in parts), features)
    left = (loss.embed(outputs.detach()) - loss.anchors.detach()[labels]).square().sum(1).mean()
    return float(((gradient * len(labels)).square().sum(1).mean() / left).sqrt().detach())


@pytest.mark.parametrize("classes", [FEW, 30, 100])
def test_uninformed_attractor_fades_and_log_loss_does_not(classes: int) -> None:
    # The classifier starts at zero: p is 1/t for every class. The gradient in its bias is that in the logits.
    loss = cam(classes, discriminate=4.0)
    assert loss.classifier is not None
    parts = loss.components(torch.randn(1, DIM, dtype=torch.float64), torch.tensor([0]))
    norms = {
        name: float(torch.autograd.grad(parts[name], loss.classifier.bias, retain_graph=True)[0].norm())
        for name in ("attractor", "discriminate")
    }
    # ‖p − 1_y‖ for p = 1/t; the attractor has it times ‖c‖²·p.
    apart = math.sqrt(1 - 1 / classes)
    assert norms["discriminate"] == pytest.approx(4 * apart)
    assert norms["attractor"] == pytest.approx(8 / classes * apart)


def test_best_heads_on_the_same_features() -> None:
    """Gaussian classes f = m_y + σ·noise, and each head at its optimum in closed form."""
    sigma, paper, cured = 6.0, {}, {}
    for classes in (FEW, MANY):
        generator = torch.Generator().manual_seed(classes)
        means = torch.randn(classes, DIM, generator=generator, dtype=torch.float64)
        labels = torch.arange(600) % classes
        noise = torch.randn(600, DIM, generator=generator, dtype=torch.float64)
        features = (means[labels] + sigma * noise).requires_grad_()

        loss = cam(classes)
        anchors = loss.anchors.detach()
        centred = means - means.mean(0)
        moment = centred.T @ centred / classes + sigma**2 * torch.eye(DIM, dtype=torch.float64)
        weight = torch.linalg.solve(moment, centred.T @ (anchors - anchors.mean(0)) / classes)  # least squares
        outputs = (features - means.mean(0)) @ weight + anchors.mean(0)
        paper[classes] = reaching(loss, features, outputs, labels, ("attractor",))

        loss = cam(classes, discriminate=4.0)
        assert loss.classifier is not None
        loss.classifier.weight.data.copy_(means / sigma**2)  # Bayes' rule
        loss.classifier.bias.data.copy_(-means.square().sum(1) / (2 * sigma**2))
        cured[classes] = reaching(loss, features, features, labels, ("attractor", "discriminate"))
    assert paper[FEW] > 8 * paper[MANY]
    assert cured[FEW] < 2 * cured[MANY]


def trained(classes: int, discriminate: float, parts: tuple[str, ...]) -> float:
    """The gradient that reaches the features of a small encoder after 80 steps of SGD on a noisy mixture."""
    inputs, generator = 32, torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    means = torch.randn(classes, inputs, generator=generator, dtype=torch.float64)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(classes, (count,), generator=generator)
        noise = torch.randn(count, inputs, generator=generator, dtype=torch.float64)
        return means[labels] + 1.5 * noise, labels

    encoder = nn.Sequential(nn.Linear(inputs, DIM), nn.BatchNorm1d(DIM), nn.ReLU()).double()
    head = build_head("none" if discriminate else "bounded", DIM, DIM).double()
    loss = cam(classes, discriminate)
    own = [] if loss.classifier is None else [*loss.classifier.parameters()]
    groups = [
        {"params": [*encoder.parameters(), *head.parameters()]},
        *([{"params": own, "lr": 0.1 * loss.lr_mult}] if own else []),
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    for _ in range(80):
        points, labels = draw(128)
        found = loss.components(head(encoder(points)), labels)
        optimizer.zero_grad()
        sum(found[part] for part in parts).backward()
        optimizer.step()
    points, labels = draw(512)
    features = encoder(points).detach().requires_grad_()
    return reaching(loss, features, head(features), labels, parts)


def test_trained_encoders_after_the_same_steps() -> None:
    def fall(discriminate: float, *parts: str) -> float:
        return trained(FEW, discriminate, parts) / trained(MANY, discriminate, parts)

    paper, alone, cured = (
        fall(0.0, "attractor"),
        fall(4.0, "attractor"),
        fall(64.0, "attractor", "discriminate"),
    )
    assert paper > 4
    assert alone > 40  # an expected anchor alone is no cure: its gradient goes through p once more
    assert cured < 2.5
