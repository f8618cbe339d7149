"""From overrides to a configuration, and from a configuration's nodes to objects."""

from __future__ import annotations

import difflib
import inspect
import json
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.singleton import Singleton
from hydra.errors import HydraException, InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from kedge.config.trust import OWN, check_config
from kedge.errors import ConfigError, DataError, KedgeError, first_line

__all__ = [
    "CONFIG",
    "DATASET",
    "build",
    "build_dataset",
    "build_loss",
    "compose",
    "dataset_of",
    "expand",
    "held_out_of",
    "load_config",
    "loss_heads",
    "quoted",
    "rename_keys",
    "rename_overrides",
    "unknown_setting",
]

CONFIG = "config.yaml"
"""The file in a run's folder that says how it was made."""
DATASET = "dataset.json"
"""The file in a run's folder that says on which images: name and fingerprint."""

_RENAMED = {
    "averaging": "ema",
    "loss_scale": "backbone_lr_mult",
    "mirror": "flip_tta",
    "sharpness": "sam",
    "standardise": "normalize",
}
"""Keys of the group `recipe` in release 0.1, and what they are called now."""

_ALONE = threading.RLock()
"""Hydra's state is one for the whole process."""


def compose(overrides: Sequence[str] = ()) -> DictConfig:
    """The training configuration with `overrides` applied, Hydra's own part included."""
    with _ALONE:
        # A program that calls us may be a Hydra application itself.
        theirs = Singleton.get_state()
        GlobalHydra.instance().clear()
        try:
            with initialize_config_module("kedge.config", version_base="1.3"):
                renamed = rename_overrides(overrides)
                return rename_keys(hydra_compose("train", overrides=renamed, return_hydra_config=True))
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            raise _readable(error, overrides) from error
        finally:
            Singleton.set_state(theirs)


def expand(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each job of a sweep."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise _readable(error, overrides) from error
    return [list(job) for batch in BasicSweeper.split_arguments(parsed, None) for job in batch]


def rename_overrides(overrides: Sequence[str]) -> list[str]:
    """The overrides with keys of 0.1 under their new names, with a warning for each.

    >>> rename_overrides(["recipe.sharpness.radius=0.1", "recipe.epochs=3"])
    ['recipe.sam.radius=0.1', 'recipe.epochs=3']
    """
    pattern = rf"(?<![\w.])recipe\.({'|'.join(_RENAMED)})(?=[.=]|$)"
    return [re.sub(pattern, lambda key: f"recipe.{_new_name(key[1])}", override, count=1) for override in overrides]


def rename_keys(config: DictConfig, *, warn: bool = True) -> DictConfig:
    """The configuration, of a run or a file of the user's, with keys of 0.1 under their new names."""
    recipe = config.get("recipe")
    for old in _RENAMED.keys() & recipe.keys() if isinstance(recipe, DictConfig) else ():
        with open_dict(recipe):
            OmegaConf.update(recipe, _new_name(old, warn=warn), recipe.pop(old))
    return config


def _new_name(old: str, *, warn: bool = True) -> str:
    if warn:
        message = f"recipe.{old} is now called recipe.{_RENAMED[old]}; the next release drops the old name."
        warnings.warn(message, FutureWarning, stacklevel=4)
    return _RENAMED[old]


def load_config(path: Path, *, builds: Sequence[str] = tuple(OWN), trust: bool = False) -> DictConfig:
    """The configuration that a run left behind.

    Without `trust`, the groups that the caller `builds` must name Kedge's own datasets, encoders and losses.
    """
    try:
        config = OmegaConf.load(path)
    except FileNotFoundError as error:
        raise ConfigError(f"{path.parent} is not a run; it has no {path.name}.") from error
    except Exception as error:
        raise ConfigError(f"{path} cannot be read: {first_line(error)}.") from error
    if not isinstance(config, DictConfig):
        raise ConfigError(f"{path} is not a configuration file.")
    if not trust:
        check_config(config, builds, path)
    return rename_keys(config, warn=False)


def dataset_of(run: str | Path, overrides: Sequence[str] = (), *, trust: bool = False) -> Any:
    """The dataset of a run, or another one that `overrides` name (`dataset=svhn`, `dataset.path=…`).

    `trust` has classes instantiated that are not Kedge's: say it of your own runs only.
    """
    from kedge.datasets import leave_classes_out

    run = Path(run)
    for override in overrides:
        if not re.match(r"dataset[.=].*", override) or "=" not in override:
            raise ConfigError(f"Only the dataset can be changed here (dataset=… or dataset.…=…), found {override!r}.")
    if any(override.startswith("dataset=") for override in overrides):
        return build_dataset(compose(overrides).dataset)
    config = load_config(run / CONFIG, builds=["dataset"], trust=trust)
    dataset = build_dataset(OmegaConf.merge(config, OmegaConf.from_dotlist(list(overrides))).dataset)
    if overrides:
        return dataset
    try:
        fingerprint = json.loads((run / DATASET).read_text())["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{run} does not record which images it was trained on; pass dataset=…") from error
    if not dataset.matches(fingerprint):
        raise DataError(
            f"{dataset.name} has changed since {run} was trained, so its test images may have been trained on; "
            "train again, or pass other images with dataset=…"
        )
    return leave_classes_out(dataset, config.split.get("unseen", 0), config.split.seed)


def held_out_of(run: str | Path, *, trust: bool = False) -> Any:
    """The dataset of a run with its held-out images in place of the test images, for choosing between runs."""
    from kedge.datasets import train_val_split

    try:
        dataset = dataset_of(run, trust=trust)
    except (ConfigError, DataError) as error:
        raise DataError(f"The held-out images of {run} are not available: {error}") from error
    split = load_config(Path(run) / CONFIG, builds=[]).split
    train, held_out = train_val_split(dataset.train, split.holdout, split.shots, split.seed)
    if held_out is None:
        raise ConfigError(f"{run} held out no images (split.holdout={split.holdout:g}); train with split.holdout=0.1.")
    return replace(dataset, train=train, test=held_out)


def build(node: Any, **arguments: Any) -> Any:
    """What the node's `_target_` makes of the node's values and `arguments`."""
    try:
        return instantiate(node, **arguments)
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, KedgeError):
            raise cause from None
        reason = str(cause or error).splitlines()[0]
        raise ConfigError(f"{node.get('_target_')} cannot be built: {reason}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from error


def build_dataset(node: Any, scan: Any = None) -> Any:
    """The dataset; what its loader warns of goes to stderr as a sentence. `scan` goes to the loader of folders."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        if scan is not None and node.get("_target_") == "kedge.datasets.folder":
            # Not as an argument of `build`: Hydra copies those.
            dataset = build(node, _partial_=True)(scan=scan)
        else:
            dataset = build(node)
    for warning in caught:
        print(warning.message, file=sys.stderr)
    return dataset


def _loss_class(node: Any) -> Any:
    """The class of the loss that the node describes."""
    from kedge.losses import RetrievalLoss

    target = node.get("_target_") if isinstance(node, DictConfig) else None
    try:
        kind = get_object(str(target))
    except (HydraException, ImportError, ValueError) as error:
        raise ConfigError(f"loss._target_={target} cannot be imported.") from error
    if not (inspect.isclass(kind) and issubclass(kind, RetrievalLoss)):
        raise ConfigError(f"loss._target_={target} is not a subclass of kedge.losses.RetrievalLoss.")
    return kind


def build_loss(node: Any, *, num_classes: int, dim: int) -> Any:
    """The loss; `num_classes` and `dim` go to those that ask for them."""
    accepted = inspect.signature(_loss_class(node)).parameters
    sizes = {"num_classes": num_classes, "dim": dim}
    return build(node, _convert_="all", **{name: size for name, size in sizes.items() if name in accepted})


def loss_heads(node: Any) -> tuple[str, ...]:
    """The encoder heads that suit the loss which the node describes, the best first."""
    kind = _loss_class(node)
    heads: tuple[str, ...] = (kind if kind.probe is None else build_loss(node, **kind.probe)).heads
    return heads


def quoted(path: Path) -> str:
    """A path as the value of an override, whatever characters it holds."""
    text = str(path.resolve()).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"


def unknown_setting(name: str, value: str, overrides: Sequence[str] = ()) -> ConfigError:
    """The error for a setting, or an option such as `--epochs`, that does not exist; it names the nearest that does."""
    chosen = [override for override in overrides if re.match(r"(dataset|encoder|loss|recipe)=", override)]
    try:
        config = compose(chosen)
    except ConfigError:  # one of the choices is wrong too: suggest from the defaults
        config = compose()
    groups = [str(group) for group in config.hydra.runtime.choices if re.fullmatch(r"\w+", str(group))]
    settings = [*groups, *_leaves(OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"]))]
    key = name.lstrip("-").replace("-", "_")
    if near := _nearest(key, settings):
        assignments = (f"{setting}={value}" if value else setting for setting in near)
        return ConfigError(f"Unknown setting {name!r}. Did you mean {' or '.join(assignments)}?")
    parent = key.rpartition(".")[0]
    within = [setting.removeprefix(f"{parent}.") for setting in settings if setting.startswith(f"{parent}.")]
    if within:
        return ConfigError(f"Unknown setting {name!r}; {parent} has {', '.join(within)}.")
    return ConfigError(f"Unknown setting {name!r}; kedge train --cfg job prints all settings.")


def _leaves(node: Any, prefix: str = "") -> Iterator[str]:
    for key in node:
        if OmegaConf.is_dict(inner := node._get_node(key)) and inner:
            yield from _leaves(inner, f"{prefix}{key}.")
        elif key != "_target_":
            yield f"{prefix}{key}"


def _nearest(key: str, settings: Sequence[str]) -> list[str]:
    """The settings that end like the key, the shortest first, or the one that is spelled most like it."""

    def ending(end: str) -> list[str]:
        return sorted((setting for setting in settings if f".{setting}".endswith(f".{end}")), key=len)[:2]

    last = key.rpartition(".")[2]
    if found := ending(key) or ending(last) or ending(f"{last}.name"):
        return found[:1] if key in found else found
    if found := difflib.get_close_matches(key, settings, n=1, cutoff=0.8):
        return found
    found = difflib.get_close_matches(last, [setting.rpartition(".")[2] for setting in settings], n=1, cutoff=0.75)
    return ending(found[0]) if found else []


def _readable(error: Exception, overrides: Sequence[str]) -> ConfigError:
    """Hydra's error as one of ours, in one sentence that says what would be valid."""
    message = str(error)
    options = re.search(r"Could not find '([^']*)'.*?options in '([^']*)':\s*(.*?)(?:\nConfig |\Z)", message, re.S)
    if options:
        name, group, names = options[1].rpartition("/")[2], options[2], options[3].split()
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {group}={near[0]}?" if near else ""
        return ConfigError(f"{group} must be one of {', '.join(names)}, found {name!r}.{hint}")
    if key := re.search(r"Could not override '([^']*)'", message):
        values = dict(override.lstrip("+~").partition("=")[::2] for override in overrides)
        return unknown_setting(key[1], values.get(key[1], ""), overrides)
    lines = (line.strip() for line in message.splitlines())
    return ConfigError(next((line for line in lines if line), type(error).__name__))
