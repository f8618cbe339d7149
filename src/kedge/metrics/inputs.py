"""What the metrics accept: arrays checked once, at the door, with one sentence for each mistake."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from kedge.errors import DataError

Array = Tensor | npt.NDArray[Any] | Sequence[Any]

# Squares of larger values, summed over the dimensions, would leave the range of float32.
LARGEST_VALUE = 1e15


def check_pair(queries: Array, gallery: Array) -> tuple[Tensor, Tensor]:
    """Queries and gallery on the gallery's device, or on the CPU where that device has no float64."""
    device = gallery.device if isinstance(gallery, Tensor) and gallery.device.type != "mps" else torch.device("cpu")
    checked = _check_vectors("queries", queries, device), _check_vectors("gallery", gallery, device)
    if checked[0].shape[1] != checked[1].shape[1]:
        raise DataError(
            f"queries have {checked[0].shape[1]} dimensions but the gallery has {checked[1].shape[1]}; "
            "embed both with the same model."
        )
    return checked


def check_integers(name: str, values: Array, length: int, device: torch.device | None = None) -> Tensor:
    """One integer for each of ``length`` rows."""
    tensor = torch.as_tensor(values).detach()
    if tensor.is_floating_point() or tensor.is_complex():
        raise DataError(f"{name} holds {tensor.dtype} values; give integers.")
    if tensor.shape != (length,):
        raise DataError(f"{name} has shape {tuple(tensor.shape)} but there are {length} rows; give one per row.")
    return tensor.to(device=device, dtype=torch.int64)


def check_self_index(values: Array, queries: int, gallery: Tensor) -> Tensor:
    """For each query its own row in the gallery, or -1."""
    tensor = check_integers("self_index", values, queries, gallery.device)
    low, high = (int(bound) for bound in tensor.aminmax())
    if low < -1 or high >= len(gallery):
        raise DataError(
            f"self_index runs from {low} to {high} but the gallery has {len(gallery)} rows; "
            "give a row of the gallery, or -1 for a query that is not in it."
        )
    return tensor


def _check_vectors(name: str, vectors: Array, device: torch.device) -> Tensor:
    """A matrix of finite numbers, one row per item."""
    tensor = torch.as_tensor(vectors).detach().to(device)
    if tensor.ndim != 2 or 0 in tensor.shape:
        raise DataError(f"{name} has shape {tuple(tensor.shape)}; give a matrix with one embedding per row.")
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise DataError(f"{name} holds {tensor.dtype} values; give real numbers.")
    low, high = (float(bound) for bound in tensor.aminmax())
    if not (low >= -LARGEST_VALUE and high <= LARGEST_VALUE):
        raise DataError(
            f"{name} holds NaN, infinite or huge values (beyond {LARGEST_VALUE:g}); "
            "drop those rows or scale the embeddings down."
        )
    return tensor
