from __future__ import annotations

import pytest
import torch

from kedge.errors import ConfigError
from kedge.losses import CrossEntropyLoss


def test_equals_the_definition() -> None:
    loss = CrossEntropyLoss(num_classes=4, dim=3)
    embeddings, labels = torch.randn(6, 3), torch.tensor([0, 1, 2, 3, 0, 1])
    logits = embeddings @ loss.classifier.weight.T + loss.classifier.bias
    expected = -(logits.exp() / logits.exp().sum(1, keepdim=True))[torch.arange(6), labels].log().mean()
    assert torch.allclose(loss(embeddings, labels), expected)
    assert torch.equal(loss.predict(embeddings), logits.argmax(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.allclose(loss(embeddings, labels), expected)


def test_labels_out_of_range() -> None:
    with pytest.raises(ConfigError, match="found 4"):
        CrossEntropyLoss(4, 3)(torch.zeros(1, 3), torch.tensor([4]))
