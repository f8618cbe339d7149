"""Every loss that is compared learns with the recipes as they are laid over for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kedge import train
from kedge.config.compose import build_dataset, compose
from kedge.datasets import Dataset
from kedge.encoders import build_encoder
from kedge.metrics import knn_accuracy, mean_average_precision

LEAGUE = ["triplet", "arcface", "center", "cosface", "proxy_anchor", "supcon", "multi_similarity"]
"""One of pairs, one of proxies and Kedge's own first: all others are trained in the soak."""
RATES = {"kedge": {"center": 0.05, "supcon": 0.2}, "paper": {"supcon": 0.05, "triplet": 3e-3}}
"""Rates for small batches and few steps: the recipes' own are meant for hundreds of pictures and epochs."""


def scores(encoder: torch.nn.Module, data: Dataset) -> tuple[float, float]:
    """Brute-force mAP and 1-NN accuracy of the test pictures among those of training."""
    sides = [(part.take(np.arange(len(part))), part.labels) for part in (data.test, data.train)]
    with torch.inference_mode():
        (queries, asked), (gallery, known) = ((encoder.eval()(pixels / 256), labels) for pixels, labels in sides)
    return (mean_average_precision(queries, asked, gallery, known), knn_accuracy(queries, asked, gallery, known))


@pytest.mark.parametrize("recipe", ["kedge", pytest.param("paper", marks=pytest.mark.soak)])
@pytest.mark.parametrize("loss", [*LEAGUE[:3], *(pytest.param(loss, marks=pytest.mark.soak) for loss in LEAGUE[3:])])
def test_it_learns(loss: str, recipe: str, shifted_stripes: Path, tiny: list[str], tmp_path: Path) -> None:
    # Optimiser and mixing are the recipe's own; what is made smaller is meant for larger pictures and longer runs.
    kept = [one for one in tiny if one.startswith(("dataset=", "encoder", "recipe.batch_size", "recipe.ema"))]
    overrides = [
        *kept,
        f"dataset.path={shifted_stripes}",
        f"recipe={recipe}",
        f"loss={loss}",
        "split.holdout=0",
        "logger=none",
        "seed=1",
    ]
    config = compose(overrides)
    small = ["recipe.epochs=5", "recipe.augmentation.crop_padding=1"]
    small += ["recipe.augmentation.cutout=3"] * bool(config.recipe.augmentation.cutout)
    small += [f"recipe.optimizer.lr={rate}" for name, rate in RATES[recipe].items() if name == loss]
    model = train(overrides=[*overrides, *small], folder=tmp_path / "run")
    assert model.loss == loss
    data = build_dataset(config.dataset)
    torch.manual_seed(1)
    untrained = build_encoder("resnet10", dim=8, stem="imagenet", head=model.encoder.head_kind)
    before, after = scores(untrained, data), scores(model.encoder, data)
    assert before[0] < 0.5
    assert before[1] < 0.75
    assert after[0] > 0.8
    assert after[1] > 0.9
