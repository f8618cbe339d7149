"""Backbones: networks that turn a batch of images into pooled features, without their classifier."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import nn

from kedge.encoders.transformers import HF, TransformersBackbone, fetch_folder, import_transformers, read_config
from kedge.errors import ConfigError

__all__ = ["NAMES", "STEMS", "TIMM", "Backbone", "build_backbone", "check_name", "import_lazily", "timm_model"]

STEMS = ("auto", "imagenet", "small")
SMALL_IMAGE = 64
TIMM = "timm:"


_RESNETS = ("resnet10", "resnet18", "resnet50", "resnet101")
NAMES = (*_RESNETS, "swin_t", TIMM + "<model>", HF + "<model>")


@dataclass(frozen=True)
class Backbone:
    """A network up to its pooled features, and what must be known about it."""

    network: nn.Module
    width: int
    stem: str
    classifier: tuple[str, ...]
    """Where pretrained files keep the classifier that was cut off."""
    config: Mapping[str, Any] | None = None
    """What builds the network again, where its name alone does not."""


def build_backbone(
    name: str,
    *,
    stem: str = "imagenet",
    image_size: int | None = None,
    config: Mapping[str, Any] | None = None,
    width: int | None = None,
) -> Backbone:
    """The backbone called ``name``, with random weights; one of transformers, of ``config`` where that is known."""
    check_name(name)
    if stem not in STEMS:
        raise ConfigError(f"stem must be one of {', '.join(STEMS)}; found {stem!r}.")
    if name in _RESNETS:
        return _build_resnet(name, stem, image_size)
    if stem == "small":
        raise ConfigError(f"stem {stem!r} is for ResNets only, found encoder {name}; leave stem at auto.")
    if name.startswith(TIMM):
        return _build_timm(name, image_size)
    if name.startswith(HF):
        backbone = TransformersBackbone(read_config(fetch_folder(name, weights=False)) if config is None else config)
        return Backbone(backbone, width or backbone.width(image_size), "imagenet", (), backbone.config)
    import_lazily("torchvision")
    from torchvision.models import swin_t

    _check_size(name, image_size, expected=224)
    network = swin_t()
    width, network.head = network.head.in_features, nn.Identity()
    return Backbone(network, width, "imagenet", ("head",))


def check_name(name: str) -> None:
    """Refuse a name no backbone has."""
    if name.startswith(TIMM):
        timm_model(name)
    elif name.startswith(HF) and name != HF:
        import_transformers()
    elif name not in NAMES:
        raise ConfigError(f"encoder must be one of {', '.join(NAMES)}; found {name!r}.")


def _build_resnet(name: str, stem: str, image_size: int | None) -> Backbone:
    import_lazily("torchvision")
    from torchvision import models
    from torchvision.models.resnet import BasicBlock

    network: Any = models.ResNet(BasicBlock, [1] * 4) if name == "resnet10" else models.get_model(name)
    width = network.fc.in_features
    network.fc = nn.Identity()
    if stem == "auto":
        stem = "small" if image_size is not None and image_size <= SMALL_IMAGE else "imagenet"
    if stem == "small":
        network.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
        nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
        network.maxpool = nn.Identity()
    return Backbone(network, width, stem, ("fc",))


def _build_timm(name: str, image_size: int | None) -> Backbone:
    timm = import_lazily("timm")
    try:
        network: Any = timm.create_model(timm_model(name), num_classes=0)
    except RuntimeError as error:  # a pretrained tag ("resnet18.tag") that does not exist
        raise ConfigError(f"encoder {name!r} cannot be built by timm: {error}") from error
    config = network.pretrained_cfg
    if config.get("fixed_input_size"):
        _check_size(name, image_size, expected=config["input_size"][-1])
    # Some networks (MobileNet) have a layer between num_features and the classifier; it stays.
    width = getattr(network, "head_hidden_size", None) or network.num_features
    classifier = config.get("classifier") or ()
    return Backbone(network, width, "imagenet", (classifier,) if isinstance(classifier, str) else tuple(classifier))


def _check_size(name: str, image_size: int | None, *, expected: int) -> None:
    if image_size is not None and image_size != expected:
        raise ConfigError(
            f"encoder {name} takes images of {expected} x {expected} pixels; found image_size {image_size}: "
            f"resize the images to {expected}, or choose a ResNet."
        )


def timm_model(name: str) -> str:
    """The timm model that ``timm:<model>`` stands for."""
    timm = import_lazily("timm")
    model = name.removeprefix(TIMM)
    # is_model knows registered architectures only, so no name here can make timm open a network connection.
    if not timm.is_model(model):
        close = difflib.get_close_matches(model, timm.list_models(), n=3)
        names = " or ".join(TIMM + match for match in close)
        hint = f"did you mean {names}?" if close else "timm.list_models() names them all."
        raise ConfigError(f"timm has no model {model!r}: {hint}")
    return model


def import_lazily(name: str) -> Any:
    """Import timm or torchvision, but torch's compiler only when it is called: that takes as long as torch itself.

    They ask for it when they are imported: torchvision for one function, timm for a decorator.
    """
    compiler, decorator = "torch._dynamo.utils", torch.compiler.disable
    if name in sys.modules or compiler in sys.modules:
        return import_module(name)
    sys.modules[compiler] = stand_in = ModuleType(compiler)
    stand_in.__dict__["is_compile_supported"] = lambda device: import_module(compiler).is_compile_supported(device)
    torch.compiler.disable = getattr(torch, "_disable_dynamo", decorator)
    try:
        with suppress(ImportError):  # of a version that asks for more, and is imported plainly below
            import_module(name)
    finally:
        torch.compiler.disable = decorator
        del sys.modules[compiler]
    return import_module(name)
