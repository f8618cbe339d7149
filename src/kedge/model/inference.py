"""CPU inference: the network that computes features in place of the encoder, in batches that fit the cache.

`auto` runs a copy of the backbone, channels last: batch normalisation is folded into the convolutions, which are fused
for oneDNN with the activations behind them and, in torchvision's ResNets, with the shortcut. `onnxruntime` runs an ONNX
session, `eager` the encoder itself. A copy whose features differ from the encoder's by more than `TOLERANCE` is not
used.

An encoder that is in training, on a GPU, hooked, under autocast or not in float32 is always run as it is. Changed
weights or layers are noticed, and the copy is made again; whoever writes through `weight.data` sets `Model.engine`
again.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from kedge.encoders import Encoder
from kedge.errors import ConfigError, ModelError
from kedge.model.fusion import fold_batchnorm, fuse_convolutions

__all__ = ["ENGINES", "TOLERANCE", "Inference"]

ENGINES = ("auto", "eager", "onnxruntime")
_REMOVED = ("channels_last", "folded", "folded_channels_last", "fused", "compiled", "bfloat16")

TOLERANCE = 1e-4
"""Largest distance from the encoder's features, over their mean length."""

_BATCH_PIXELS, _EAGER_PIXELS = 8 * 224 * 224, 32 * 224 * 224
"""Larger batches are split, so that activations stay in the cache; those of networks without batch normalisation, such
as transformers, later: they gain by larger matrix products. See `benchmarks/embedding.py`."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""
_ACTIVATION, _KEPT = 64 << 20, 256 << 20
"""Bytes of a layer's output up to which its memory is used again, and of free memory that is kept for that."""

_Forward: TypeAlias = Callable[..., Tensor]
"""From a batch of images, and `flip_tta`, to features."""


class Inference:
    """Runs an encoder with the engine called `name`; by default `$KEDGE_ENGINE`, or else `auto`."""

    def __init__(self, name: str | None = None) -> None:
        self.name = _checked(name or os.environ.get("KEDGE_ENGINE") or "auto")
        self._lock = threading.Lock()
        self._state: tuple[object, ...] = ()
        self._kept: list[object] = []
        self._forwards: dict[object, _Forward | None] = {}
        self._chosen = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return Inference, (self.name,)

    def __call__(self, encoder: Encoder, images: Tensor, *, flip_tta: bool) -> Tensor:
        """Pooled features of a batch of normalized images; call it in inference mode."""
        forward = None
        if self.name != "eager" and len(images) > 0 and not torch.is_autocast_enabled("cpu"):
            forward = self._forward_for(encoder, images, flip_tta)
        if forward is None:
            return encoder.features(images, flip_tta=flip_tta)
        _keep_freed_memory()
        pixels = _EAGER_PIXELS if self._chosen == "eager" else _BATCH_PIXELS
        size = max(1, pixels // (images.shape[2] * images.shape[3]))
        return torch.cat([forward(part, flip_tta=flip_tta) for part in torch.split(images, size)])

    def describe(self, encoder: Encoder) -> str:
        """The engine, and what `auto` chose."""
        if self.name != "auto":
            return self.name
        if not _is_plain(encoder):
            return "auto: eager, since the encoder is in training, on a GPU, hooked or not in float32"
        return f"auto: {self._chosen if self._state == _state(encoder) else 'nothing embedded yet'}"

    def _forward_for(self, encoder: Encoder, images: Tensor, flip_tta: bool) -> _Forward | None:
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if self._state != (state := _state(encoder)):
                # What the state identifies by address is kept, so that nothing else gets that address.
                self._state, self._forwards = state, {}
                self._kept = [*encoder.modules(), *(tensor.detach() for tensor in _tensors(encoder))]
            # A copy takes all images; ONNX sessions are made for one size.
            key = (flip_tta, *images.shape[2:]) if self.name == "onnxruntime" else ()
            if key not in self._forwards:
                build = _onnx_forward if self.name == "onnxruntime" else self._copy
                self._forwards[key] = build(encoder, images[:2].clone(), flip_tta) if _is_plain(encoder) else None
            return self._forwards[key]

    def _copy(self, encoder: Encoder, images: Tensor, flip_tta: bool) -> _Forward:
        for chosen in ("fused", "folded, channels last"):
            with suppress(Exception):  # a network, or a machine, for which a copy cannot be made or run
                copy = fold_batchnorm(encoder, images[:1])
                if copy is None:
                    break
                if chosen == "fused" and not fuse_convolutions(copy, images[:1]):
                    continue
                network = copy.to(memory_format=torch.channels_last)

                def forward(images: Tensor, flip_tta: bool, network: Encoder = network) -> Tensor:
                    return network.features(images.contiguous(memory_format=torch.channels_last), flip_tta=flip_tta)

                if _agrees(forward, encoder, images[:1], flip_tta):
                    self._chosen = chosen
                    return forward
        self._chosen = "eager"
        return encoder.features


@cache
def _keep_freed_memory() -> None:
    """Have glibc use the memory of one layer's output for the next, where it would return it to the system.

    Without this, page faults take half of the time of the main thread; the heaps of others have limits of their own.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _ACTIVATION)
        mallopt(_M_TRIM_THRESHOLD, _KEPT)


def _checked(name: str) -> str:
    if name in _REMOVED:
        warnings.warn(f"engine {name} no longer has an effect; auto is used.", DeprecationWarning, stacklevel=4)
        return "auto"
    if name not in ENGINES:
        raise ConfigError(f"engine must be one of {', '.join(ENGINES)}; found {name!r}.")
    if name == "onnxruntime":
        from kedge.model.onnx import require_onnx

        require_onnx()
    return name


class _Features(nn.Module):
    """An encoder's features with `flip_tta` fixed, for tracing."""

    def __init__(self, encoder: Encoder, flip_tta: bool) -> None:
        super().__init__()
        self.encoder, self.flip_tta = encoder, flip_tta

    def forward(self, images: Tensor) -> Tensor:
        return self.encoder.features(images, flip_tta=self.flip_tta)


def _onnx_forward(encoder: Encoder, images: Tensor, flip_tta: bool) -> _Forward:
    from torch.export import Dim  # as slow to import as all else together

    from kedge.model import onnx

    # Two images: torch takes a batch of one for a number that never changes.
    pair = images.repeat(2, 1, 1, 1)[:2]
    program = onnx.trace(_Features(encoder, flip_tta).eval(), pair, {0: Dim("batch")}, encoder.name)
    _, run = onnx.export(program, encoder.name, input="images", outputs=["features"], metadata={})

    def forward(images: Tensor, flip_tta: bool) -> Tensor:
        del flip_tta  # it was traced with that
        return run(images)[0]

    if not _agrees(forward, encoder, images, flip_tta):
        raise ModelError(f"engine onnxruntime gives other features than {encoder.name}; choose auto.")
    return forward


def _agrees(forward: _Forward, encoder: Encoder, images: Tensor, flip_tta: bool) -> bool:
    """Whether the features are the encoder's within TOLERANCE; NaN is not."""
    with torch.inference_mode():
        output, expected = forward(images, flip_tta=flip_tta), encoder.features(images, flip_tta=flip_tta)
        scale = float(expected.norm(dim=1).mean()) or 1.0
        return output.shape == expected.shape and float((output - expected).norm(dim=1).max()) / scale <= TOLERANCE


def _is_plain(encoder: nn.Module) -> bool:
    """Whether a copy can stand in for the encoder: evaluating, without hooks, in float32 on the CPU."""
    if any(module.training or module._forward_hooks or module._forward_pre_hooks for module in encoder.modules()):
        return False
    return all(
        tensor.is_cpu
        and not tensor.is_inference()  # these have no version counter
        and (tensor.dtype == torch.float32 or not tensor.is_floating_point())
        for tensor in _tensors(encoder)
    )


def _state(encoder: nn.Module) -> tuple[object, ...]:
    """What identifies the encoder's layers and weights: addresses, version counters, modes and hooks."""
    layers = [(id(m), m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in encoder.modules()]
    weights = [(t.data_ptr(), -1 if t.is_inference() else t._version) for t in _tensors(encoder)]
    return layers, weights


def _tensors(encoder: nn.Module) -> Iterator[Tensor]:
    yield from encoder.parameters()
    yield from encoder.buffers()
