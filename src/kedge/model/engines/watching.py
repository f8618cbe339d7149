"""Whether an encoder still is what an engine was made of."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

__all__ = ["Watch", "is_plain"]


class Watch:
    """Remembers an encoder's modules and weights, and notices when they are others.

    Every parameter and buffer is known by its place in memory, which is kept from being used again, and by torch's
    count of its changes; that takes in training, `load_state_dict`, `to` and exchanged layers. Writing past the count
    (`weight.data.mul_(2)`, a NumPy view) is noticed by one value of each tensor, so that a tensor which is changed as
    a whole is; whoever writes single values in this way sets `Model.engine` anew.
    """

    def __init__(self, encoder: nn.Module) -> None:
        self._modules = _modules(encoder)
        self._known = [(tensor.detach(), tensor.data_ptr(), tensor._version) for tensor in _tensors(self._modules)]
        self._spots = [
            tensor.view(-1)[tensor.numel() // 2].view(1)
            for tensor, _, _ in self._known
            if tensor.is_floating_point() and tensor.numel() and tensor.is_contiguous()
        ]
        self._values = torch.cat(self._spots) if self._spots else torch.empty(0)

    def holds(self, encoder: nn.Module) -> bool:
        """Whether nothing has changed."""
        modules = _modules(encoder)
        if len(modules) != len(self._modules):
            return False
        for module, same in zip(modules, self._modules, strict=True):
            if module is not same or module.training or module._forward_hooks or module._forward_pre_hooks:
                return False
        known = iter(self._known)
        for tensor in _tensors(modules):
            _, place, count = next(known, (None, -1, -1))
            if tensor.data_ptr() != place or tensor._version != count:
                return False
        if next(known, None) is not None:
            return False
        return not self._spots or torch.equal(torch.cat(self._spots), self._values)


def is_plain(encoder: nn.Module) -> bool:
    """Whether a copy can stand in for it: evaluating, in float32 on the CPU, counted, and with nobody listening."""
    modules = _modules(encoder)
    if any(module.training or module._forward_hooks or module._forward_pre_hooks for module in modules):
        return False
    return all(
        tensor.device.type == "cpu"
        and not tensor.is_inference()  # torch does not count what changes these
        and (tensor.dtype == torch.float32 or not tensor.is_floating_point())
        for tensor in _tensors(modules)
    )


def _modules(root: nn.Module) -> list[nn.Module]:
    """All modules, as often as they are used: `Module.modules` leaves out what comes twice, in thrice the time."""
    found = [root]
    for module in found:
        found.extend([child for child in module._modules.values() if child is not None])
    return found


def _tensors(modules: list[nn.Module]) -> Iterator[Tensor]:
    for module in modules:
        for tensor in module._parameters.values():
            if tensor is not None:
                yield tensor
        for buffer in module._buffers.values():
            if buffer is not None:
                yield buffer
