"""One run of an experiment: what is trained, what is measured of it, and the key by which it is known again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from kedge.config.compose import build_dataset, compose, quoted
from kedge.datasets import Dataset
from kedge.datasets.download import without_downloads
from kedge.errors import ConfigError, KedgeError

__all__ = ["CONFIGS", "FULL_SET", "Job", "Source", "load_pictures", "sources_of"]

FULL_SET = {"kedge": ("split.holdout=0",), "kedge-long": ("split.holdout=0",)}
"""Recipes whose schedule needs no held-out pictures train on all of them."""
_MIRRORING_CHANGES = ("svhn",)
"""Datasets whose pictures may not be mirrored: digits."""
CONFIGS = "KEDGE_CONFIGS"
"""The environment variable that names a folder with configurations of the user's: loss/mine.yaml and the like."""
Source = Mapping[str, Path]
"""Where the pictures of some datasets lie as .npz files; all others are loaded by name."""


@dataclass(frozen=True)
class Job:
    """A run."""

    dataset: str
    encoder: str
    loss: str
    recipe: str
    seed: int
    changes: tuple[str, ...] = ()
    """Overrides that belong to the experiment, such as `encoder.dim=32`."""
    settings: tuple[str, ...] = ()
    """Overrides of the user's for all runs, such as `recipe.epochs=10`."""
    measures: tuple[str, ...] = ("scores",)

    def overrides(self, sources: Source | None = None) -> list[str]:
        """What `kedge train` is told."""
        path = (sources or {}).get(self.dataset)
        data = [f"dataset={self.dataset}"]
        if path is not None:
            data = ["dataset=arrays", f"dataset.path={quoted(path)}"]
            data += ["dataset.flip=false"] if self.dataset in _MIRRORING_CHANGES else []
        chosen = [f"encoder={self.encoder}", f"loss={self.loss}", f"recipe={self.recipe}", f"seed={self.seed}"]
        chosen += _adapted(self.recipe, self.loss, os.environ.get(CONFIGS))
        return [*data, *chosen, *FULL_SET.get(self.recipe, ()), *self.settings, *self.changes]

    def config(self, sources: Source | None = None) -> Any:
        """The whole configuration of the run."""
        return compose([*self.overrides(sources), *_searchpath(os.environ.get(CONFIGS))])

    @cached_property
    def key(self) -> str:
        """The same for the same configuration, wherever its data lie and on whatever it is trained."""
        from omegaconf import OmegaConf

        # The path stands for nothing: only the name of the data belongs to the key.
        config = self.config({self.dataset: Path("data.npz")})
        content: dict[str, Any] = OmegaConf.to_container(config, resolve=False)  # type: ignore[assignment]
        known = {name: content[name] for name in ("encoder", "loss", "recipe", "split", "seed")}
        # What came later and is switched off is left out, so that earlier runs are known again.
        if not known["recipe"]["sharpness"]["radius"]:
            del known["recipe"]["sharpness"]
        if not known["recipe"]["mirror"]:
            del known["recipe"]["mirror"]
        for name in ("discriminate", "normalize"):
            if known["loss"].get(name) in (0, False):
                del known["loss"][name]
        if known["split"]["validate_every"] is None:
            del known["split"]["validate_every"]
        known["dataset"] = self.dataset
        known["keep_every"] = content["trainer"]["keep_every"]
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def name(self) -> str:
        """For people, and for the run's folder."""
        extra = [change.rpartition(".")[2].replace("=", "") for change in self.changes]
        parts = [self.dataset, self.encoder, self.loss, self.recipe, *extra, f"seed{self.seed}"]
        return "-".join([*parts, self.key[:6]])

    def to_json(self) -> dict[str, Any]:
        """Ready for JSON."""
        names = ("dataset", "encoder", "loss", "recipe", "seed")
        lists = {name: list(getattr(self, name)) for name in ("changes", "settings", "measures")}
        return {name: getattr(self, name) for name in names} | lists

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Job:
        """What :meth:`to_json` wrote."""
        lists = {name: tuple(content[name]) for name in ("changes", "settings", "measures")}
        return cls(**{**content, **lists})


def sources_of(given: Sequence[str]) -> dict[str, Path]:
    """`cifar100=path.npz` and the like, as given on the command line."""
    found = {}
    for one in given:
        name, sign, path = one.partition("=")
        if not (name and sign and path):
            raise ConfigError(f"--data takes NAME=FILE.npz, found {one!r}.")
        found[name] = Path(path).expanduser().resolve()
        if not found[name].exists():
            raise ConfigError(f"--data {one}: there is no {path}.")
    return found


def load_pictures(dataset: str, sources: Source, *, download: bool = True) -> Dataset | None:
    """The dataset called so, or None where it cannot be had."""
    try:
        with nullcontext() if download else without_downloads():
            found: Dataset = build_dataset(Job(dataset, "resnet18", "cam", "paper", 0).config(sources).dataset)
    except KedgeError:
        return None
    return found


def _searchpath(folder: str | None) -> list[str]:
    return [f"hydra.searchpath=[{quoted(Path(folder))}]"] if folder else []


@cache
def _adapted(recipe: str, loss: str, folder: str | None) -> tuple[str, ...]:
    """What lets a recipe suit a loss that has no overlay of its own: one for all of pytorch-metric-learning."""
    overlays = resources.files("kedge.config").joinpath("recipe", "loss")
    general = f"{recipe}_metric_learning"
    if overlays.joinpath(f"{recipe}_{loss}.yaml").is_file() or not overlays.joinpath(f"{general}.yaml").is_file():
        return ()
    if compose([f"loss={loss}", *_searchpath(folder)]).loss.get("_target_") != "kedge.losses.MetricLearningLoss":
        return ()
    return (f"recipe/loss@recipe={general}",)
