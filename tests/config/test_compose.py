"""Configurations are composed for whoever asks, also for several at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from kedge.config.compose import compose, load_config
from kedge.training.config import Settings


def test_threads_compose_side_by_side() -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda seed: compose([f"seed={seed}"]), range(8)))
    assert [config.seed for config in found] == list(range(8))


RENAMED = {"sharpness": "sam", "averaging": "ema", "loss_scale": "backbone_lr_mult", "mirror": "flip_tta"}
RENAMED |= {"standardise": "normalize"}


def test_keys_of_the_last_release(tmp_path: Path) -> None:
    """Accepted with a warning from the user, and without one in the folder of a run."""
    old = ["recipe.sharpness.radius=0.1", "recipe.averaging=0.3", "recipe.loss_scale=2", "recipe.mirror=true"]
    with pytest.warns(FutureWarning, match="is now called recipe.") as warnings:
        config = compose([*old, "recipe.standardise=true"])
    assert len(warnings) == 5
    recipe = Settings.from_config(config).recipe
    assert (recipe.sam.radius, recipe.ema, recipe.backbone_lr_mult) == (0.1, 0.3, 2)
    assert recipe.flip_tta is recipe.normalize is True
    stored = OmegaConf.masked_copy(config, [name for name in config if name != "hydra"])
    for before, now in RENAMED.items():
        OmegaConf.update(stored, f"recipe.{before}", stored.recipe.pop(now), force_add=True)
    OmegaConf.save(stored, tmp_path / "config.yaml")
    assert Settings.from_config(load_config(tmp_path / "config.yaml")).recipe == recipe
