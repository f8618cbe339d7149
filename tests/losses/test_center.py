from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kedge.errors import ConfigError
from kedge.losses import CenterLoss, CrossEntropyLoss

CLASSES, DIM, WEIGHT = 4, 3, 0.25


def loss_of(dtype: torch.dtype = torch.float64) -> CenterLoss:
    torch.manual_seed(1)
    loss = CenterLoss(CLASSES, DIM, weight=WEIGHT).to(dtype)
    torch.nn.init.normal_(loss.centers)
    return loss


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    chance = torch.Generator().manual_seed(2)
    embeddings = torch.randn(9, DIM, generator=chance, dtype=torch.float64, requires_grad=True)
    labels, others = torch.randint(3, (2, 9), generator=chance)  # nobody is of the last class
    weights = torch.rand(9, generator=chance, dtype=torch.float64)
    weights[0] = 1
    return embeddings, labels, others, weights


def naive(loss: CenterLoss, embeddings: Tensor, shares: list[list[tuple[int, float]]]) -> tuple[float, Tensor, Tensor]:
    """The value of the part, its gradient for the embeddings, and the centers' rule, by loops."""
    value = 0.0
    pull = torch.zeros_like(embeddings)
    moves, counts = torch.zeros_like(loss.centers), [0.0] * CLASSES
    for row, of in enumerate(shares):
        for label, share in of:
            apart = (embeddings[row] - loss.centers[label]).detach()
            value += WEIGHT * share * 0.5 * float(apart @ apart) / len(shares)
            pull[row] += WEIGHT * share * apart / len(shares)
            moves[label] -= share * apart
            counts[label] += share
    return value, pull, moves / (1 + torch.tensor(counts, dtype=moves.dtype))[:, None]


def test_value_and_gradients_are_those_of_the_paper() -> None:
    loss = loss_of()
    embeddings, labels, _, _ = batch()
    parts = loss.components(embeddings, labels)
    assert list(parts) == ["cross_entropy", "center"]
    value, pull, moves = naive(loss, embeddings, [[(int(label), 1.0)] for label in labels])
    assert parts["center"].item() == pytest.approx(value, rel=1e-12)
    found = torch.autograd.grad(parts["center"], [embeddings, loss.centers])
    torch.testing.assert_close(found, (pull, moves), rtol=1e-12, atol=1e-15)
    assert not found[1][3].any()
    same = CrossEntropyLoss(CLASSES, DIM).double()
    same.load_state_dict({name: value for name, value in loss.state_dict().items() if name != "centers"})
    assert parts["cross_entropy"] == same(embeddings, labels)
    assert torch.equal(loss.predict(embeddings), same.predict(embeddings))


def test_a_mixed_image_is_drawn_to_both_centers_by_its_shares() -> None:
    loss = loss_of()
    embeddings, labels, others, weights = batch()
    parts = loss.mixed_components(embeddings, labels, others, weights)
    shares = [
        [(int(label), float(own)), (int(other), 1 - float(own))]
        for label, other, own in zip(labels, others, weights, strict=True)
    ]
    value, pull, moves = naive(loss, embeddings, shares)
    assert parts["center"].item() == pytest.approx(value, rel=1e-12)
    found = torch.autograd.grad(parts["center"], [embeddings, loss.centers])
    torch.testing.assert_close(found, (pull, moves), rtol=1e-12, atol=1e-15)
    whole, unmixed = (
        loss.components(embeddings, labels),
        loss.mixed_components(embeddings, labels, others, torch.ones_like(weights)),
    )
    assert whole.keys() == unmixed.keys() == parts.keys()
    for name in whole:
        torch.testing.assert_close(whole[name], unmixed[name], rtol=1e-12, atol=0)


@pytest.mark.parametrize("weight", [0.003, 1.0])
def test_centers_find_the_means_of_their_classes_whatever_the_weight(weight: float) -> None:
    loss = CenterLoss(CLASSES, DIM, weight=weight)
    embeddings, labels, _, _ = batch()
    points = embeddings.detach().float()
    optimiser = torch.optim.SGD([loss.centers], lr=0.5)
    for _ in range(100):
        optimiser.zero_grad()
        loss(points, labels).backward()
        optimiser.step()
    means = torch.stack([points[labels == label].mean(dim=0) for label in range(3)])
    torch.testing.assert_close(loss.centers[:3].detach(), means)


def test_autocast_and_compile() -> None:
    loss = loss_of(torch.float32)
    embeddings, labels, others, weights = batch()
    embeddings = embeddings.detach().float()
    expected = loss(embeddings, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert loss(embeddings, labels) == expected
    assert loss.compiles
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(embeddings, labels), expected)
    mixed = torch.compile(loss.mixed_components, backend="aot_eager", fullgraph=True)
    assert mixed(embeddings, labels, others, weights)["center"].isfinite()


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="weight must be a number of at least 0, found -1"):
        CenterLoss(4, 3, weight=-1)
    with pytest.raises(ConfigError, match="found 4"):
        CenterLoss(4, 3)(torch.zeros(1, 3), torch.tensor([4]))
