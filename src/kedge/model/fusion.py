"""Batch normalisation folded into convolutions, and torchvision's ResNets fused for oneDNN."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

__all__ = ["fold_batchnorm", "fuse_resnet"]


def fold_batchnorm(encoder: nn.Module, images: Tensor) -> nn.Module | None:
    """A copy of the encoder with batch normalisation folded into convolutions; None if there is none to fold.

    Which normalisation follows which convolution is seen while `images` go through a hooked copy. Tracing would change
    every module of the process for a while, also under other threads.
    """
    copy = deepcopy(encoder)
    pairs = _conv_bn_pairs(copy, images)
    parents = {child: (parent, name) for parent in copy.modules() for name, child in parent.named_children()}
    for norm, convolution in pairs.items():
        convolution.weight, convolution.bias = _folded_weights(convolution, norm)
        parent, name = parents[norm]
        setattr(parent, name, _remaining(norm))
    return copy if pairs else None


def _conv_bn_pairs(encoder: nn.Module, images: Tensor) -> dict[nn.BatchNorm2d, nn.Conv2d]:
    """Normalisations whose input is the output of one convolution, both called once."""
    outputs: dict[int, tuple[nn.Conv2d, Tensor]] = {}
    calls: dict[nn.Module, int] = {}
    pairs: dict[nn.BatchNorm2d, nn.Conv2d] = {}

    def after(module: nn.Module, inputs: Any, output: Tensor) -> None:
        del inputs
        calls[module] = calls.get(module, 0) + 1
        if isinstance(module, nn.Conv2d):
            outputs[id(output)] = (module, output)  # the tensor is kept, so that no other one gets its id

    def before(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        producer = outputs.get(id(inputs[0]))
        if producer is not None and isinstance(module, nn.BatchNorm2d):
            pairs[module] = producer[0]

    hooks = []
    for module in encoder.modules():
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d):
            hooks += [module.register_forward_hook(after), module.register_forward_pre_hook(before)]
    try:
        with torch.inference_mode():
            encoder(images)
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


def _folded_weights(convolution: nn.Conv2d, norm: nn.BatchNorm2d) -> tuple[nn.Parameter, nn.Parameter]:
    if norm.running_mean is None or norm.running_var is None:
        raise ValueError("a normalisation without running statistics cannot be folded")
    weight, bias = fuse_conv_bn_weights(
        convolution.weight, convolution.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
    )
    return nn.Parameter(weight.detach(), requires_grad=False), nn.Parameter(bias.detach(), requires_grad=False)


def fuse_resnet(encoder: nn.Module) -> nn.Module | None:
    """A copy of an encoder over torchvision's ResNet with fused blocks; None for other networks.

    oneDNN takes the folded normalisation, the addition of the shortcut and the ReLU into the convolution, and reads
    weights that are reordered once instead of in every call. These are the operators that torch's compiler calls.
    """
    network = getattr(encoder, "backbone", None)
    if type(network) is not ResNet or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    if any(type(block) not in (BasicBlock, Bottleneck) for layer in _layers(network) for block in layer):
        return None
    copy = deepcopy(encoder)
    inner: ResNet = copy.backbone
    inner.conv1 = _FusedConv(inner.conv1, inner.bn1, relu=True)
    inner.bn1 = inner.relu = nn.Identity()
    for layer in _layers(inner):
        for name, block in layer.named_children():
            setattr(layer, name, _FusedBlock(block))
    return copy


def _layers(network: ResNet) -> list[nn.Sequential]:
    return [network.layer1, network.layer2, network.layer3, network.layer4]


class _FusedBlock(nn.Module):
    """A residual block; the last convolution adds the shortcut."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        pairs = [(block.conv1, block.bn1), (block.conv2, block.bn2)]
        if isinstance(block, Bottleneck):
            pairs.append((block.conv3, block.bn3))
        self.convolutions = nn.ModuleList(_FusedConv(*pair, relu=True) for pair in pairs)
        self.downsample = None if block.downsample is None else _FusedConv(*block.downsample, relu=False)

    def forward(self, images: Tensor) -> Tensor:
        shortcut = images if self.downsample is None else self.downsample(images)
        *first, last = self.convolutions
        for convolution in first:
            images = convolution(images)
        return last(images, add_to=shortcut)  # type: ignore[no-any-return]


class _FusedConv(nn.Module):
    """Convolution, batch normalisation and ReLU in one oneDNN call; `add_to` is added before the ReLU, in place."""

    def __init__(self, convolution: nn.Conv2d, norm: nn.BatchNorm2d, *, relu: bool) -> None:
        super().__init__()
        self.weight, self.bias = _folded_weights(convolution, norm)
        self.geometry = (
            list(convolution.padding),
            list(convolution.stride),
            list(convolution.dilation),
            convolution.groups,
        )
        self.activation = "relu" if relu else "none"
        self.packed: Tensor | None = None

    def forward(self, images: Tensor, add_to: Tensor | None = None) -> Tensor:
        mkldnn = torch.ops.mkldnn
        if self.packed is None:
            weight = self.weight.contiguous(memory_format=torch.channels_last)
            self.packed = mkldnn._reorder_convolution_weight(weight, *self.geometry, list(images.shape))
        output: Tensor
        if add_to is None:
            output = mkldnn._convolution_pointwise(
                images, self.packed, self.bias, *self.geometry, self.activation, [], ""
            )
        else:
            output = mkldnn._convolution_pointwise_.binary(
                add_to, images, self.packed, self.bias, *self.geometry, "add", 1.0, self.activation, [], ""
            )
        return output
