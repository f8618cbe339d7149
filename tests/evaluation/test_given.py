from __future__ import annotations

import numpy as np
import torch
from torchvision.datasets import FakeData

from kedge import Model, evaluate
from kedge.datasets import as_dataset
from kedge.encoders import build_encoder
from kedge.images import Preprocessing


def test_datasets_of_others_are_measured_as_ours() -> None:
    """Classes are matched by name, whatever their order in the model."""
    torch.manual_seed(0)
    encoder = build_encoder("resnet10", dim=4, stem="imagenet")
    anchors, sizes = torch.randn(3, 4), Preprocessing(size=16)
    fake = FakeData(size=60, image_size=(3, 16, 16), num_classes=3)
    model = Model(encoder, anchors=anchors, classes=["0", "1", "2"], preprocessing=sizes)
    turned = Model(encoder, anchors=anchors.flip(0), classes=["2", "1", "0"], preprocessing=sizes)
    wanted, found, other = evaluate(model, as_dataset(fake)), evaluate(model, fake), evaluate(turned, fake)
    assert found.brute_force == wanted.brute_force
    assert np.isclose(other.accuracy, wanted.accuracy)
    assert found.queries == 6
