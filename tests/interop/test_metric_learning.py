from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_metric_learning import distances, losses, miners, reducers, regularizers, trainers
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from torch import Tensor, nn

import kedge
from kedge.errors import ConfigError
from kedge.interop.metric_learning import CAMLoss, CrossBatchMemory


def batch(rows: int = 24, classes: int = 5, dim: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(rows, dim, generator=chance), torch.randint(classes, (rows,), generator=chance)


def pair(**settings: Any) -> tuple[CAMLoss, kedge.CAMLoss]:
    """The adapter and the loss itself, with the same anchors, close enough to repel each other."""
    theirs = {name: settings.pop(name) for name in ("reducer", "embedding_regularizer") if name in settings}
    ours, plain = CAMLoss(5, 4, **settings, **theirs), kedge.CAMLoss(5, 4, **settings)
    anchors = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)) / 2
    for one in (ours, plain):
        one.anchors.data = anchors.clone()
    return ours, plain


@pytest.mark.parametrize("settings", [{}, {"margin": 0.7, "min_norm": 3.0}, {"repel": False}, {"keep_norm": False}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_same_value_and_gradients_as_the_loss_itself(settings: dict[str, Any], dtype: torch.dtype) -> None:
    embeddings, labels = batch()
    found = []
    for loss in pair(**settings):
        points = embeddings.to(dtype).requires_grad_()
        value = loss(points, labels)
        value.backward()
        found.append((value, points.grad, loss.anchors.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_the_value_by_hand() -> None:
    ours, _ = pair()
    embeddings, labels = batch()
    anchors, points = ours.anchors.detach().double().numpy(), embeddings.double().numpy()
    value = np.mean([((point - anchors[label]) ** 2).sum() / 2 for point, label in zip(points, labels, strict=True)])
    for one in range(5):
        value += max(0, 1 - np.linalg.norm(anchors[one])) ** 2 / 2
        for other in range(one):
            value += max(0, 4 - np.linalg.norm(anchors[one] - anchors[other])) ** 2 / 2
    assert ours(embeddings, labels).item() == pytest.approx(value, rel=1e-5)


def test_reducers_regularizers_and_miners() -> None:
    embeddings, labels = batch()
    ours, plain = pair()
    parts = {name: float(value.detach()) for name, value in plain.components(embeddings, labels).items()}
    single = (embeddings - plain.anchors.detach()[labels]).square().sum(1) / 2
    rest = parts["repeller"] + parts["minimum_norm"]

    ours.set_reducer(reducers.SumReducer())
    assert ours(embeddings, labels).item() == pytest.approx(single.sum().item() + rest, rel=1e-5)
    ours.set_reducer(reducers.ThresholdReducer(low=float(single.median())))
    chosen = single[single > single.median()]
    assert ours(embeddings, labels).item() == pytest.approx(chosen.mean().item() + rest, rel=1e-5)
    raw, _ = pair(reducer=reducers.DoNothingReducer())
    torch.testing.assert_close(raw(embeddings, labels)["attractor"]["losses"], single)

    held, _ = pair(embedding_regularizer=regularizers.LpRegularizer())
    assert held(embeddings, labels).item() == pytest.approx(
        sum(parts.values()) + embeddings.norm(dim=1).mean().item(), rel=1e-5
    )
    # A miner says how often each embedding counts, as with the library's other losses over proxies.
    pairs = (torch.tensor([0, 0]), torch.tensor([1, 2]), torch.tensor([0]), torch.tensor([3]))
    ours.set_reducer(None)
    weighted = (single[0] + (single[1] + single[2] + single[3]) / 3) / len(single)
    assert ours(embeddings, labels, pairs).item() == pytest.approx(weighted.item() + rest, rel=1e-5)


def test_beside_other_losses() -> None:
    embeddings, labels = batch()
    ours, plain = pair()
    triplets = losses.TripletMarginLoss()
    both = losses.MultipleLosses([ours, triplets], weights=[1, 0.5], miners=[None, miners.MultiSimilarityMiner()])
    mined = miners.MultiSimilarityMiner()(embeddings, labels)
    expected = plain(embeddings, labels) + 0.5 * triplets(embeddings, labels, mined)
    torch.testing.assert_close(both(embeddings, labels), expected)
    assert ours.anchors in set(both.parameters())


def test_a_memory_attracts_anchors_and_leaves_the_batch_alone() -> None:
    ours, plain = pair()
    memory = CrossBatchMemory(ours, embedding_size=4, memory_size=100)
    first, second = batch(24), batch(24, seed=5)
    memory(*first)
    points = second[0].clone().requires_grad_()
    value = memory(points, second[1])
    remembered, labels = torch.cat([first[0], second[0]]), torch.cat([first[1], second[1]])
    torch.testing.assert_close(value, plain(*second) + plain.components(remembered, labels)["attractor"])
    value.backward()
    alone = second[0].clone().requires_grad_()
    plain(alone, second[1]).backward()
    torch.testing.assert_close(points.grad, alone.grad)
    assert not torch.allclose(ours.anchors.grad, plain.anchors.grad)
    with pytest.raises(Exception, match="not supported for CAMLoss"):
        losses.CrossBatchMemory(ours, embedding_size=4)  # the library's own list does not know it


def test_it_trains_with_the_librarys_trainer_and_is_measured_by_its_calculator() -> None:
    torch.manual_seed(0)
    logging.getLogger("PML").setLevel(logging.WARNING)
    chance = np.random.default_rng(0)
    labels = np.repeat(np.arange(4), 40)
    # The classes differ in two of twelve numbers; the others are louder.
    corners = np.array([[2, 0], [0, 2], [-2, 0], [0, -2]])[labels] + chance.normal(0, 0.3, (160, 2))
    points = np.concatenate([corners, chance.normal(0, 3, (160, 10))], axis=1)
    items, targets = torch.tensor(points, dtype=torch.float32), torch.tensor(labels)
    dataset = torch.utils.data.TensorDataset(items, targets)
    trunk, embedder, loss = nn.Identity(), nn.Linear(12, 6), CAMLoss(4, 6)

    def precision() -> float:
        with torch.no_grad():
            found = AccuracyCalculator(include=("precision_at_1",), k=1, device=torch.device("cpu")).get_accuracy(
                embedder(items), targets
            )
        return float(found["precision_at_1"])

    before = precision()
    trainers.MetricLossOnly(
        models={"trunk": trunk, "embedder": embedder},
        optimizers={
            "embedder_optimizer": torch.optim.SGD(embedder.parameters(), lr=0.02),
            "metric_loss_optimizer": torch.optim.SGD(loss.parameters(), lr=0.1),
        },
        batch_size=32,
        loss_funcs={"metric_loss": loss},
        dataset=dataset,
        mining_funcs={"tuple_miner": miners.BatchHardMiner(distance=distances.LpDistance(normalize_embeddings=False))},
        dataloader_num_workers=0,
        loss_weights=None,
    ).train(num_epochs=12)
    assert precision() > before + 0.1
    accuracy = (loss.predict(embedder(items).detach()) == targets).float().mean().item()
    assert accuracy > 0.9
    assert torch.equal(loss.get_logits(embedder(items)).argmax(1), loss.predict(embedder(items).detach()))


def test_what_is_refused() -> None:
    embeddings, labels = batch()
    with pytest.raises(ConfigError, match="distance must be LpDistance"):
        CAMLoss(5, 4, distance=distances.CosineSimilarity())
    with pytest.raises(ConfigError, match="labels must lie in 0 … 4"):
        CAMLoss(5, 4)(embeddings, labels + 5)
    with pytest.raises(ConfigError, match="embeddings must be batch × 3"):
        CAMLoss(5, 3)(embeddings, labels)
    with pytest.raises(ValueError, match="labels are required"):
        CAMLoss(5, 4)(embeddings)
