"""What the configuration of a run may have instantiated, which may come from a stranger."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kedge.errors import ConfigError

__all__ = ["OWN", "check_config"]

_DATASETS = [
    *("arrays", "cars196", "cifar100", "cub200", "folder", "food101", "huggingface", "inshop", "online_products"),
    *("sample", "stored", "svhn", "tiny_imagenet"),
]
_LOSSES = ["CAMLoss", "CenterLoss", "ContrastiveLoss", "CrossEntropyLoss", "MetricLearningLoss"]

OWN = {
    "dataset": tuple(f"kedge.datasets.{name}" for name in _DATASETS),
    "encoder": ("kedge.encoders.build_encoder",),
    "loss": tuple(f"kedge.losses.{name}" for name in _LOSSES),
}
"""The names that the `_target_` of a group may have: nothing else of a run is ever imported or called."""


def check_config(config: DictConfig, groups: Sequence[str], path: Path) -> None:
    """Refuse a configuration whose `groups` would run anything but Kedge's own datasets, encoders and losses."""
    for group in groups:
        node = OmegaConf.to_container(config, resolve=False).get(group)  # type: ignore[union-attr]
        if not isinstance(node, dict):
            raise ConfigError(f"{path} has no {group}.")
        if (target := node.pop("_target_", None)) not in OWN[group]:
            raise _foreign(path, f"{group}._target_", target)
        # A table could stand for an object, such as the source of a download. Only losses take tables, of plain values.
        nested = [name for name, value in node.items() if isinstance(value, dict | list)]
        if nested and group != "loss":
            raise ConfigError(f"{path} holds a table in {group}.{nested[0]}, where one value was expected.")
        _check_values(node, group, path)


def _check_values(value: Any, where: str, path: Path) -> None:
    """Refuse whatever Hydra would do more with than pass it on, at any depth."""
    if isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if str(name).startswith("_"):
                raise _foreign(path, f"{where}.{name}", inner)
            _check_values(inner, f"{where}.{name}", path)
    elif isinstance(value, str) and "${" in value:
        # Runs are saved with interpolations resolved; one that is left could make a node after this look at it.
        raise _foreign(path, where, value)


def _foreign(path: Path, where: str, value: Any) -> ConfigError:
    return ConfigError(
        f"{path} sets {where} to {str(value)[:100]!r}, which is not part of Kedge and may run any code; "
        "pass --trust (in Python trust=True) if the run is yours."
    )
