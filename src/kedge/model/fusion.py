"""Batch normalisation folded into convolutions, and convolutions fused with what follows them, for oneDNN."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from kedge.encoders import Encoder

__all__ = ["fold_batchnorm", "fuse_convolutions"]

_ACTIVATIONS: dict[type[nn.Module], tuple[str, list[float]]] = {
    nn.ReLU: ("relu", []),
    nn.ReLU6: ("hardtanh", [0.0, 6.0]),
    nn.SiLU: ("swish", []),
    nn.Hardswish: ("hardswish", []),
}
"""What oneDNN computes at the end of a convolution: its name there, and its numbers."""
_BATCH = 8
"""Images for which the weights of batches are ordered, at least: the first batch may be a small one."""


def fold_batchnorm(encoder: Encoder, images: Tensor) -> Encoder | None:
    """A copy of the encoder with batch normalisation folded into convolutions; None if there is none to fold."""
    copy = deepcopy(encoder).requires_grad_(False)
    parents, is_folded = _parents(copy), False
    for norm, (convolution, _) in _trace(copy, images).items():
        if convolution is None or not isinstance(norm, nn.BatchNorm2d) or norm.running_mean is None:
            continue
        if (remaining := _remaining(norm)) is None:
            continue
        convolution.weight, convolution.bias = fuse_conv_bn_weights(
            *(convolution.weight, convolution.bias),
            *(norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias),  # type: ignore[arg-type]
        )
        _replace(parents, norm, remaining)
        is_folded = True
    return copy if is_folded else None


def fuse_convolutions(folded: Encoder, images: Tensor) -> bool:
    """Fuse the convolutions of a folded encoder, in place, with the activations behind them; False where it cannot.

    oneDNN takes an activation, and in torchvision's ResNets the addition of the shortcut, into the convolution, and
    reads weights that are reordered once, not in every call. These are the operators that torch's compiler calls.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if type(folded.backbone).__module__ == "torchvision.models.resnet":
        _fuse_resnet(folded.backbone)
        return True
    traced, parents, fused = _trace(folded, images), _parents(folded), dict[nn.Module, _FusedConv]()
    behind = {convolution: layer for layer, (convolution, _) in traced.items() if type(layer) in _ACTIVATIONS}
    for layer, (_, shape) in traced.items():
        if _FusedConv.fits(layer, shape):
            activation = behind.get(layer)
            fused[layer] = _FusedConv(layer, activation, shape)
            _replace(parents, layer, fused[layer])
            if activation is not None:
                _replace(parents, activation, nn.Identity())
    return bool(fused)


def _trace(encoder: Encoder, images: Tensor) -> dict[Any, tuple[Any, torch.Size]]:
    """Layers that are called once, the convolution (called once) whose output each takes, and its input's shape.

    Seen while `images` go through a hooked copy: tracing would change every module of the process for a while, also
    under other threads.
    """
    outputs: dict[int, tuple[nn.Conv2d, Tensor, int]] = {}
    calls: Counter[nn.Module] = Counter()
    traced: dict[nn.Module, tuple[nn.Conv2d | None, torch.Size]] = {}

    def enter(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        calls[layer] += 1
        convolution, _, version = outputs.get(id(inputs[0]), (None, None, 0))
        # What was added in place, such as a shortcut, is no output of a convolution any more.
        traced[layer] = convolution if inputs[0]._version == version else None, inputs[0].shape

    def leave(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        del inputs
        if isinstance(layer, nn.Conv2d):
            outputs[id(output)] = layer, output, output._version  # it is kept, so that no other one gets its id

    kinds = (nn.Conv2d, nn.BatchNorm2d, *_ACTIVATIONS)
    layers = [layer for layer in encoder.modules() if isinstance(layer, kinds)]
    hooks = [layer.register_forward_pre_hook(enter) for layer in layers]
    hooks += [layer.register_forward_hook(leave) for layer in layers]
    try:
        with torch.no_grad():  # in inference mode, tensors have no versions
            encoder.features(images)
    finally:
        for hook in hooks:
            hook.remove()
    return {
        layer: (None if convolution is not None and calls[convolution] > 1 else convolution, shape)
        for layer, (convolution, shape) in traced.items()
        if calls[layer] == 1
    }


def _parents(encoder: nn.Module) -> dict[nn.Module, tuple[nn.Module, str]]:
    return {child: (parent, name) for parent in encoder.modules() for name, child in parent.named_children()}


def _replace(parents: dict[nn.Module, tuple[nn.Module, str]], layer: nn.Module, by: nn.Module) -> None:
    parent, name = parents[layer]
    setattr(parent, name, by)


def _remaining(norm: nn.BatchNorm2d) -> nn.Module | None:
    """What stays in place of a folded normalisation: nothing, or the activation inside timm's `BatchNormAct2d`."""
    if type(norm) is nn.BatchNorm2d:
        return nn.Identity()
    activation = getattr(norm, "act", None)
    return activation if type(norm).__name__ == "BatchNormAct2d" and isinstance(activation, nn.Module) else None


def _fuse_resnet(network: Any) -> None:
    from torchvision.models.resnet import (
        BasicBlock,
        Bottleneck,
    )  # takes a second, which other encoders need not wait for

    for layer in (network.layer1, network.layer2, network.layer3, network.layer4):
        for name, block in layer.named_children():
            if type(block) in (BasicBlock, Bottleneck):
                setattr(layer, name, _FusedBlock(block))
    network.conv1 = _FusedConv(network.conv1, network.relu)
    network.relu = nn.Identity()


class _FusedBlock(nn.Module):
    """A residual block; the last convolution adds the shortcut."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        convolutions = [block.conv1, block.conv2, *([block.conv3] if hasattr(block, "conv3") else [])]
        self.convolutions = nn.ModuleList(_FusedConv(convolution, block.relu) for convolution in convolutions)
        self.downsample = None if block.downsample is None else _FusedConv(block.downsample[0])

    def forward(self, images: Tensor) -> Tensor:
        shortcut = images if self.downsample is None else self.downsample(images)
        *first, last = self.convolutions
        for convolution in first:
            images = convolution(images)
        return last(images, add_to=shortcut)  # type: ignore[no-any-return]


class _FusedConv(nn.Module):
    """Convolution and activation in one oneDNN call; `add_to` is added before the activation, in place.

    TensorFlow's padding (timm's `Conv2dSame`) may need a pixel more behind an image than before it, which oneDNN does
    not have: a kernel with a row and a column of zeros before its own takes as many on both sides. Images of a size
    that needs another padding than those of `shape` go through the convolution as it was.
    """

    def __init__(
        self, convolution: nn.Conv2d, activation: nn.Module | None = None, shape: torch.Size | None = None
    ) -> None:
        super().__init__()
        self.activation = ("none", list[float]()) if activation is None else _ACTIVATIONS[type(activation)]
        self.same = None if shape is None else _same_padding(convolution, shape)
        self.weight, self.bias, padding = convolution.weight, convolution.bias, list(convolution.padding)
        if self.same is not None:
            self.unfused = nn.Sequential(convolution, activation or nn.Identity())
            padding = [-(-pixels // 2) for pixels in self.same]
            rows, columns = (pixels % 2 for pixels in self.same)
            self.weight = nn.Parameter(F.pad(self.weight, (columns, 0, rows, 0)), requires_grad=False)
        self.geometry = padding, list(convolution.stride), list(convolution.dilation), convolution.groups
        self.packed: dict[bool, Tensor] = {}
        """The weight in the order that suits a single image (False) or a batch (True), which differ by a factor."""

    @classmethod
    def fits(cls, layer: nn.Module, shape: torch.Size) -> bool:
        """Whether a layer is a convolution that can be computed in this way, for inputs of this shape."""
        if type(layer) is nn.Conv2d:
            return layer.padding_mode == "zeros" and isinstance(layer.padding, tuple)
        same = _same_padding(layer, shape)
        return same is not None and layer.dilation == (1, 1)

    def forward(self, images: Tensor, add_to: Tensor | None = None) -> Tensor:
        if self.same is not None and self.same != _same_padding(self.unfused[0], images.shape):
            return self.unfused(images)  # type: ignore[no-any-return]
        mkldnn, (name, numbers), is_batch = torch.ops.mkldnn, self.activation, len(images) > 1
        if is_batch not in self.packed:
            weight = self.weight.contiguous(memory_format=torch.channels_last)
            shape = [max(_BATCH, len(images)) if is_batch else 1, *images.shape[1:]]
            self.packed[is_batch] = mkldnn._reorder_convolution_weight(weight, *self.geometry, shape)
        arguments = (images, self.packed[is_batch], self.bias, *self.geometry)
        output: Tensor
        if add_to is None:
            output = mkldnn._convolution_pointwise(*arguments, name, numbers, "")
        else:
            output = mkldnn._convolution_pointwise_.binary(add_to, *arguments, "add", 1.0, name, numbers, "")
        return output


def _same_padding(layer: Any, shape: torch.Size) -> tuple[int, int] | None:
    """The pixels that TensorFlow's padding adds to height and width; None for a layer that has other padding."""
    if type(layer).__name__ != "Conv2dSame":
        return None
    sides = zip(shape[-2:], layer.kernel_size, layer.stride, layer.dilation, strict=True)
    rows, columns = (
        max(0, (-(-side // stride) - 1) * stride + (kernel - 1) * dilation + 1 - side)
        for side, kernel, stride, dilation in sides
    )
    return rows, columns
