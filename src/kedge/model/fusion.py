"""Batch normalisation folded into convolutions, and the blocks of torchvision's ResNets fused for oneDNN."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from kedge.encoders import Encoder

__all__ = ["fold_batchnorm", "fuse_resnet"]


def fold_batchnorm(encoder: Encoder, images: Tensor) -> Encoder | None:
    """A copy of the encoder with batch normalisation folded into convolutions; None if there is none to fold.

    Which normalisation follows which convolution is seen while `images` go through a hooked copy. Tracing would change
    every module of the process for a while, also under other threads.
    """
    copy = deepcopy(encoder).requires_grad_(False)
    pairs = _conv_bn_pairs(copy, images)
    parents = {child: (parent, name) for parent in copy.modules() for name, child in parent.named_children()}
    for norm, convolution in pairs.items():
        convolution.weight, convolution.bias = fuse_conv_bn_weights(
            convolution.weight, convolution.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
        )
        parent, name = parents[norm]
        setattr(parent, name, _remaining(norm))
    return copy if pairs else None


def _conv_bn_pairs(encoder: Encoder, images: Tensor) -> dict[Any, nn.Conv2d]:
    """Normalisations with running statistics whose input is the output of one convolution, both called once."""
    outputs: dict[int, tuple[nn.Conv2d, Tensor]] = {}
    calls: Counter[nn.Module] = Counter()
    pairs: dict[nn.BatchNorm2d, nn.Conv2d] = {}

    def remember(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        calls[module] += 1
        if isinstance(module, nn.Conv2d):
            outputs[id(output)] = (module, output)  # the tensor is kept, so that no other one gets its id
        elif isinstance(module, nn.BatchNorm2d) and id(inputs[0]) in outputs:
            pairs[module] = outputs[id(inputs[0])][0]

    layers = [module for module in encoder.modules() if isinstance(module, nn.Conv2d | nn.BatchNorm2d)]
    hooks = [layer.register_forward_hook(remember) for layer in layers]
    try:
        with torch.inference_mode():
            encoder.features(images)
    finally:
        for hook in hooks:
            hook.remove()
    return {
        norm: convolution
        for norm, convolution in pairs.items()
        if calls[norm] == calls[convolution] == 1 and norm.running_mean is not None and _remaining(norm) is not None
    }


def _remaining(norm: nn.BatchNorm2d) -> nn.Module | None:
    """What stays in place of a folded normalisation: nothing, or the activation inside timm's `BatchNormAct2d`."""
    if type(norm) is nn.BatchNorm2d:
        return nn.Identity()
    activation = getattr(norm, "act", None)
    return activation if type(norm).__name__ == "BatchNormAct2d" and isinstance(activation, nn.Module) else None


def fuse_resnet(folded: nn.Module) -> bool:
    """Fuse the blocks of a folded encoder in place, if it is one over torchvision's ResNet.

    oneDNN takes the addition of the shortcut and the ReLU into the convolution, and reads weights that are reordered
    once instead of in every call. These are the operators that torch's compiler calls.
    """
    network: Any = getattr(folded, "backbone", None)
    if type(network).__module__ != "torchvision.models.resnet" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    from torchvision.models.resnet import (
        BasicBlock,
        Bottleneck,
    )  # takes a second, which other encoders need not wait for

    for layer in (network.layer1, network.layer2, network.layer3, network.layer4):
        for name, block in layer.named_children():
            if type(block) in (BasicBlock, Bottleneck):
                setattr(layer, name, _FusedBlock(block))
    network.conv1 = _FusedConv(network.conv1, relu=True)
    network.relu = nn.Identity()
    return True


class _FusedBlock(nn.Module):
    """A residual block; the last convolution adds the shortcut."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        convolutions = [block.conv1, block.conv2, *([block.conv3] if hasattr(block, "conv3") else [])]
        self.convolutions = nn.ModuleList(_FusedConv(convolution, relu=True) for convolution in convolutions)
        self.downsample = None if block.downsample is None else _FusedConv(block.downsample[0], relu=False)

    def forward(self, images: Tensor) -> Tensor:
        shortcut = images if self.downsample is None else self.downsample(images)
        *first, last = self.convolutions
        for convolution in first:
            images = convolution(images)
        return last(images, add_to=shortcut)  # type: ignore[no-any-return]


class _FusedConv(nn.Module):
    """Convolution and ReLU in one oneDNN call; `add_to` is added before the ReLU, in place."""

    def __init__(self, convolution: nn.Conv2d, *, relu: bool) -> None:
        super().__init__()
        self.weight, self.bias = convolution.weight, convolution.bias
        geometry = convolution.padding, convolution.stride, convolution.dilation
        self.geometry = (*map(list, geometry), convolution.groups)
        self.activation = "relu" if relu else "none"
        self.packed: Tensor | None = None

    def forward(self, images: Tensor, add_to: Tensor | None = None) -> Tensor:
        mkldnn = torch.ops.mkldnn
        if self.packed is None:
            weight = self.weight.contiguous(memory_format=torch.channels_last)
            self.packed = mkldnn._reorder_convolution_weight(weight, *self.geometry, list(images.shape))
        arguments = (images, self.packed, self.bias, *self.geometry)
        output: Tensor
        if add_to is None:
            output = mkldnn._convolution_pointwise(*arguments, self.activation, [], "")
        else:
            output = mkldnn._convolution_pointwise_.binary(add_to, *arguments, "add", 1.0, self.activation, [], "")
        return output
