"""The ways to run an encoder on a processor: what each is called, and what makes it from the encoder at hand."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from importlib.util import find_spec
from typing import TypeAlias

import torch
from torch import Tensor, nn

from kedge.encoders import Encoder
from kedge.errors import ConfigError, KedgeError
from kedge.model.engines.folding import folded
from kedge.model.engines.fusing import fused
from kedge.model.engines.programs import compiled_program, onnx_program

__all__ = ["CHEAP", "COSTLY", "TOLERANCE", "WAYS", "Unfit", "Way", "apart", "check_name", "eager", "make"]

Way: TypeAlias = Callable[[Tensor], Tensor]
"""From images (float32, standardised, B x 3 x H x W) to embeddings."""

CHEAP = ("eager", "channels_last", "folded", "folded_channels_last", "fused")
"""Made in some hundredths of a second, in this process."""
COSTLY = ("onnxruntime", "compiled")
"""Made in seconds to a minute, in a process of their own."""
WAYS = (*CHEAP, *COSTLY, "bfloat16")

TOLERANCE = 1e-4
"""How far from the eager embeddings others may be: the largest distance over the mean length."""


class Unfit(KedgeError):
    """A way that this machine or this encoder does not have, or whose embeddings are others."""


def check_name(name: str) -> str:
    """Refuse an engine that does not exist, or one whose package is not installed."""
    if name not in ("auto", *WAYS):
        raise ConfigError(f"engine must be one of auto, {', '.join(WAYS)}; found {name!r}.")
    for package in ("onnxruntime", "onnxscript") if name == "onnxruntime" else ():
        if find_spec(package) is None:
            raise ConfigError(f"engine onnxruntime needs {package}, which is not installed: pip install 'kedge[onnx]'.")
    return name


def eager(encoder: nn.Module, *, mirror: bool) -> Way:
    """The encoder as it is."""
    return lambda images: encoder(images, mirror=mirror)


def make(name: str, encoder: Encoder, images: Tensor, *, mirror: bool) -> Way:
    """The way called `name` for images of that shape; `Unfit` where it cannot be had, or is another function.

    Only bfloat16, which rounds to three digits and is used by those who ask for it, may differ from the encoder.
    """
    try:
        # Not inference tensors: what is made here is used outside of inference mode, too.
        with torch.inference_mode(False), torch.no_grad():
            way = eager(encoder, mirror=mirror) if name == "eager" else _MAKERS[name](encoder, images, mirror)
        if name not in ("eager", "bfloat16"):
            with torch.inference_mode():
                distance = apart(way(images), encoder(images, mirror=mirror))
            if not distance <= TOLERANCE:  # a NaN is far, too
                raise Unfit(f"its embeddings differ by {distance:.0e} of their length")
    except Unfit:
        raise
    except Exception as error:  # compilers, exporters and runtimes fail in ways of their own
        lines = str(error).strip().splitlines() or [""]
        raise Unfit(f"{type(error).__name__}: {lines[0]}") from error
    return way


def apart(found: Tensor, wanted: Tensor) -> float:
    """The largest distance between two embeddings of a picture, over the mean length of an embedding."""
    if found.shape != wanted.shape:
        return float("inf")
    scale = float(wanted.norm(dim=1).mean()) or 1.0
    return float((found - wanted).norm(dim=1).max()) / scale


def _channels_last(encoder: nn.Module, images: Tensor, mirror: bool) -> Way:
    del images
    return _reading_last(deepcopy(encoder), mirror)


def _folded(encoder: nn.Module, images: Tensor, mirror: bool) -> Way:
    return eager(_fold(encoder, images), mirror=mirror)


def _folded_channels_last(encoder: nn.Module, images: Tensor, mirror: bool) -> Way:
    return _reading_last(_fold(encoder, images), mirror)


def _fused(encoder: nn.Module, images: Tensor, mirror: bool) -> Way:
    del images
    found = fused(encoder)
    if found is None:
        raise Unfit("the network is not one of torchvision's ResNets")
    return _reading_last(found, mirror)


def _bfloat16(encoder: nn.Module, images: Tensor, mirror: bool) -> Way:
    inner = _reading_last(folded(encoder, images[:1]) or deepcopy(encoder), mirror)

    def way(images: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return inner(images).float()

    return way


def _fold(encoder: nn.Module, images: Tensor) -> nn.Module:
    found = folded(encoder, images[:1])
    if found is None:
        raise Unfit("there is no batch normalisation behind a convolution")
    return found


def _reading_last(encoder: nn.Module, mirror: bool) -> Way:
    network = encoder.to(memory_format=torch.channels_last)
    return lambda images: network(images.contiguous(memory_format=torch.channels_last), mirror=mirror)


def _onnxruntime(encoder: Encoder, images: Tensor, mirror: bool) -> Way:
    return onnx_program(encoder, images, mirror=mirror)


def _compiled(encoder: Encoder, images: Tensor, mirror: bool) -> Way:
    return compiled_program(encoder, images, mirror=mirror)


_MAKERS: dict[str, Callable[[Encoder, Tensor, bool], Way]] = {
    "channels_last": _channels_last,
    "folded": _folded,
    "folded_channels_last": _folded_channels_last,
    "fused": _fused,
    "onnxruntime": _onnxruntime,
    "compiled": _compiled,
    "bfloat16": _bfloat16,
}
