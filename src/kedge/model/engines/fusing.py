"""Torchvision's ResNets with everything between two convolutions inside the first.

oneDNN takes the normalisation (folded), the addition of the shortcut and the ReLU into the convolution and reads
weights that are laid out for it once, where eager torch lays them out in every call. These are the operators that
torch's own compiler calls; here they are called without one.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from kedge.model.engines.folding import folded_weights

__all__ = ["fused"]


def fused(encoder: nn.Module) -> nn.Module | None:
    """A copy with fused blocks, for images in channels_last; None for other networks than torchvision's ResNets."""
    network = getattr(encoder, "backbone", None)
    if type(network) is not ResNet or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    blocks = [block for layer in _layers(network) for block in layer]
    if any(type(block) not in (BasicBlock, Bottleneck) for block in blocks):
        return None
    copy = deepcopy(encoder)
    inner: ResNet = copy.backbone
    inner.conv1 = _Convolution(inner.conv1, inner.bn1, relu=True)
    inner.bn1 = inner.relu = nn.Identity()
    for layer in _layers(inner):
        for name, block in layer.named_children():
            setattr(layer, name, _Block(block))
    return copy.to(memory_format=torch.channels_last)


def _layers(network: ResNet) -> list[nn.Sequential]:
    return [network.layer1, network.layer2, network.layer3, network.layer4]


class _Block(nn.Module):
    """A residual block: its convolutions one after the other, the last one added to the shortcut."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        pairs = [(block.conv1, block.bn1), (block.conv2, block.bn2)]
        if isinstance(block, Bottleneck):
            pairs.append((block.conv3, block.bn3))
        self.convolutions = nn.ModuleList(_Convolution(*pair, relu=True) for pair in pairs)
        shortcut = block.downsample
        self.shortcut = None if shortcut is None else _Convolution(*shortcut, relu=False)

    def forward(self, images: Tensor) -> Tensor:
        shortcut = images if self.shortcut is None else self.shortcut(images)
        *first, last = self.convolutions
        for convolution in first:
            images = convolution(images)
        # Into the shortcut: nobody reads the block's input any more.
        return last(images, onto=shortcut)  # type: ignore[no-any-return]


class _Convolution(nn.Module):
    """A convolution with the normalisation behind it, and the ReLU behind that."""

    def __init__(self, convolution: nn.Conv2d, norm: nn.BatchNorm2d, *, relu: bool) -> None:
        super().__init__()
        self.weight, self.bias = folded_weights(convolution, norm)
        self.how = (
            list(convolution.padding),
            list(convolution.stride),
            list(convolution.dilation),
            convolution.groups,
        )
        self.relu = relu
        self.packed: Tensor | None = None

    def forward(self, images: Tensor, onto: Tensor | None = None) -> Tensor:
        oneDNN = torch.ops.mkldnn
        if self.packed is None:  # laid out for images like the first ones
            weight = self.weight.contiguous(memory_format=torch.channels_last)
            self.packed = oneDNN._reorder_convolution_weight(weight, *self.how, list(images.shape))
        after = "relu" if self.relu else "none"
        found: Tensor
        if onto is None:
            found = oneDNN._convolution_pointwise(images, self.packed, self.bias, *self.how, after, [], "")
        else:
            found = oneDNN._convolution_pointwise_.binary(
                onto, images, self.packed, self.bias, *self.how, "add", 1.0, after, [], ""
            )
        return found
