"""Mixed images: each class pulls by its share."""

from __future__ import annotations

import pytest
import torch

from kedge.errors import ConfigError
from kedge.losses import CAMLoss, ContrastiveLoss, CrossEntropyLoss, RetrievalLoss


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    embeddings = torch.randn(7, 5, generator=chance, dtype=torch.float64, requires_grad=True)
    labels, others = torch.randint(4, (2, 7), generator=chance)
    weights = torch.rand(7, generator=chance, dtype=torch.float64)
    weights[0] = 1
    return embeddings, labels, others, weights


@pytest.mark.parametrize("kind", [CAMLoss, CrossEntropyLoss])
def test_the_mean_over_single_images_by_their_shares(kind: type[RetrievalLoss]) -> None:
    torch.manual_seed(1)
    loss = kind(4, 5).double()
    embeddings, labels, others, weights = batch()
    found = loss.mixed_components(embeddings, labels, others, weights)
    first = next(iter(found))
    expected = sum(
        share * loss.components(embeddings[row : row + 1], one[row : row + 1])[first]
        for row in range(7)
        for one, share in ((labels, weights[row]), (others, 1 - weights[row]))
    )
    assert torch.allclose(found[first], expected / 7, rtol=1e-12)
    whole = loss.components(embeddings, labels)
    unmixed = loss.mixed_components(embeddings, labels, others, torch.ones_like(weights))
    assert whole.keys() == found.keys()
    assert all(torch.allclose(whole[name], unmixed[name], rtol=1e-12) for name in whole)


def test_an_embedding_is_drawn_to_the_point_between_both_anchors() -> None:
    loss = CAMLoss(4, 5).double()
    embeddings, labels, others, weights = batch()
    loss.mixed_components(embeddings, labels, others, weights)["attractor"].backward()
    middle = weights[:, None] * loss.anchors[labels] + (1 - weights[:, None]) * loss.anchors[others]
    assert embeddings.grad is not None
    assert torch.allclose(embeddings.grad, (embeddings - middle) / 7, rtol=1e-12)


def test_pairs_cannot_be_mixed() -> None:
    with pytest.raises(ConfigError, match=r"loss contrastive takes no mixed images: set recipe\.mixing\.cutmix"):
        ContrastiveLoss().mixed_components(*batch())
