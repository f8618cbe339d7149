"""Batch normalisation folded into the convolution before it: the same function in fewer passes over memory."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

__all__ = ["folded", "folded_weights"]


def folded(encoder: nn.Module, images: Tensor) -> nn.Module | None:
    """A copy of the encoder with folded weights; None where there is nothing to fold.

    Which normalisation follows which convolution is seen while `images` go through: the copy is hooked, and nothing
    is traced, since torch's tracing changes every module of the process for a while, also under other threads.
    """
    copy = deepcopy(encoder)
    pairs = _pairs(copy, images)
    if not pairs:
        return None
    parents = {child: (parent, name) for parent in copy.modules() for name, child in parent.named_children()}
    for norm, convolution in pairs.items():
        convolution.weight, convolution.bias = folded_weights(convolution, norm)
        parent, name = parents[norm]
        setattr(parent, name, _after(norm))
    return copy


def folded_weights(convolution: nn.Conv2d, norm: nn.BatchNorm2d) -> tuple[nn.Parameter, nn.Parameter]:
    """Weight and bias of a convolution that does what both do."""
    if norm.running_mean is None or norm.running_var is None:
        raise ValueError("a normalisation without running statistics cannot be folded")
    weight, bias = fuse_conv_bn_weights(
        convolution.weight, convolution.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
    )
    return nn.Parameter(weight.detach(), requires_grad=False), nn.Parameter(bias.detach(), requires_grad=False)


def _pairs(encoder: nn.Module, images: Tensor) -> dict[nn.BatchNorm2d, nn.Conv2d]:
    """Normalisations that read nothing but what one convolution wrote, each used once."""
    made: dict[int, tuple[nn.Conv2d, Tensor]] = {}
    calls: dict[nn.Module, int] = {}
    pairs: dict[nn.BatchNorm2d, nn.Conv2d] = {}

    def wrote(module: nn.Module, inputs: Any, output: Tensor) -> None:
        del inputs
        calls[module] = calls.get(module, 0) + 1
        if isinstance(module, nn.Conv2d):
            made[id(output)] = (module, output)  # kept, so that no other tensor gets its id

    def reads(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        found = made.get(id(inputs[0]))
        if found is not None and isinstance(module, nn.BatchNorm2d):
            pairs[module] = found[0]

    hooks = []
    for module in encoder.modules():
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d):
            hooks.append(module.register_forward_hook(wrote))
            hooks.append(module.register_forward_pre_hook(reads))
    try:
        with torch.inference_mode():
            encoder(images)
    finally:
        for hook in hooks:
            hook.remove()
    return {
        norm: convolution
        for norm, convolution in pairs.items()
        if calls[norm] == calls[convolution] == 1 and norm.running_mean is not None and _after(norm) is not None
    }


def _after(norm: nn.BatchNorm2d) -> nn.Module | None:
    """What is left to do in its place: nothing, or the activation that timm's normalisations bring along."""
    if type(norm) is nn.BatchNorm2d:
        return nn.Identity()
    activation = getattr(norm, "act", None)
    if type(norm).__name__ != "BatchNormAct2d" or not isinstance(activation, nn.Module):
        return None
    return activation
