from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kedge.errors import ConfigError
from kedge.losses import ContrastiveLoss
from kedge.losses.contrastive import Mining

MARGIN = 1.0


def naive(embeddings: Tensor, labels: Tensor, mining: Mining) -> tuple[float, float]:
    points, names = embeddings.tolist(), labels.tolist()
    everyone = range(len(points))
    distance = [[math.dist(points[a], points[b]) for b in everyone] for a in everyone]
    positive: list[float] = []
    negative: list[float] = []
    for a in everyone:
        same = [b for b in everyone if b != a and names[b] == names[a]]
        different = [b for b in everyone if names[b] != names[a]]
        if mining == "online":
            positive += [distance[a][b] for b in same]
            negative += [distance[a][b] for b in different]
        elif mining == "hard":
            positive += [max(distance[a][b] for b in same)] if same else []
            negative += [min(distance[a][b] for b in different)] if different else []
        else:
            positive += [distance[a][b] for b in same]
            for b in same:
                beyond = [distance[a][n] for n in different if distance[a][b] < distance[a][n] < MARGIN]
                negative += [min(beyond)] if beyond else []
    pulled = [0.5 * d * d for d in positive if d > 0]
    pushed = [0.5 * (MARGIN - d) ** 2 for d in negative if d < MARGIN]
    return sum(pulled) / max(1, len(pulled)), sum(pushed) / max(1, len(pushed))


@pytest.mark.parametrize("mining", ["online", "hard", "semi-hard"])
@pytest.mark.parametrize("seed", range(4))
def test_equals_a_naive_double_loop(mining: Mining, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(14, 3, generator=generator, dtype=torch.float64) * 0.45
    labels = torch.randint(5, (14,), generator=generator)
    parts = ContrastiveLoss(MARGIN, mining).components(embeddings, labels)
    positive, negative = naive(embeddings, labels, mining)
    assert positive > 0
    assert negative > 0
    assert parts["positive"].item() == pytest.approx(positive, abs=1e-12)
    assert parts["negative"].item() == pytest.approx(negative, abs=1e-12)


@pytest.mark.parametrize("mining", ["online", "hard", "semi-hard"])
def test_gradients_are_right_and_finite_where_points_coincide(mining: Mining) -> None:
    generator = torch.Generator().manual_seed(7)
    embeddings = torch.randn(6, 3, generator=generator, dtype=torch.float64) * 0.4
    labels = torch.tensor([0, 0, 0, 1, 1, 2])
    loss = ContrastiveLoss(MARGIN, mining)
    assert torch.autograd.gradcheck(lambda e: loss(e, labels), embeddings.requires_grad_())
    together = torch.zeros(6, 3, requires_grad=True)
    loss(together, labels).backward()
    assert together.grad is not None
    assert together.grad.isfinite().all()


@pytest.mark.parametrize("mining", ["online", "hard", "semi-hard"])
@pytest.mark.parametrize("labels", [[0], [0, 0, 0], [0, 1, 2]])
def test_batches_without_one_kind_of_pair(mining: Mining, labels: list[int]) -> None:
    embeddings = torch.randn(len(labels), 2, requires_grad=True)
    value = ContrastiveLoss(MARGIN, mining)(embeddings, torch.tensor(labels))
    value.backward()
    assert value.isfinite()


def test_autocast_and_compile() -> None:
    embeddings, labels = torch.randn(8, 4), torch.arange(8) % 3
    loss = ContrastiveLoss()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert loss(embeddings, labels) == loss(embeddings, labels).float()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(embeddings, labels), loss(embeddings, labels))


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="online, hard, semi-hard, found 'easy'"):
        ContrastiveLoss(mining="easy")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="margin"):
        ContrastiveLoss(margin=0)
