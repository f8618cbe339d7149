"""Check that the weights of a model's folder fit its description, before memory is allocated for them.

A few bytes of `model.json` can describe a network of any size. It is built on torch's meta device first, where tensors
have shapes and no numbers, and only as far as the file with the weights has tensors to fill it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from kedge.encoders import Encoder
from kedge.model.inputs import shape_text

__all__ = ["check_shapes"]

Shapes = Mapping[str, tuple[int, ...]]

_SPARE_TENSORS, _SPARE_NUMBERS = 1000, 2**24
"""Beyond twice what the file holds: classifiers and poolers that are built and cut off."""


def check_shapes(spec: Mapping[str, Any], shapes: Shapes) -> None:
    """Raise a ValueError unless `shapes`, by their names in the encoder, are those of the encoder in `spec`."""
    with torch.device("meta"), _bounded(shapes):
        expected = {name: tuple(tensor.shape) for name, tensor in Encoder.from_spec(spec).state_dict().items()}
    wrong = sorted(name for name in {*expected, *shapes} if expected.get(name) != shapes.get(name))
    if wrong:
        first = wrong[0]
        described, stored = (shape_text(each[first]) if first in each else "missing" for each in (expected, shapes))
        more = f", and {', '.join(wrong[1:4])} differ too" if len(wrong) > 1 else ""
        raise ValueError(f"{first} is {described} in its description and {stored} in its weights{more}")


@contextmanager
def _bounded(shapes: Shapes) -> Iterator[None]:
    """Stop building a network that has far more tensors, or larger ones, than there are weights for."""
    tensors = 2 * len(shapes) + _SPARE_TENSORS
    numbers = 2 * sum(prod(shape) for shape in shapes.values()) + _SPARE_NUMBERS
    thread = threading.get_ident()

    def count(network: nn.Module, name: str, tensor: Tensor | None) -> None:
        nonlocal tensors, numbers
        del network, name
        if tensor is None or threading.get_ident() != thread:
            return
        tensors -= 1
        numbers -= tensor.numel()
        if tensors < 0 or numbers < 0:
            raise ValueError("its description is of a far larger network than its weights are")

    handles = [
        hooks.register_module_parameter_registration_hook(count),
        hooks.register_module_buffer_registration_hook(count),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
