"""Features of a frozen encoder, computed once and kept in the run's folder."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.progress import track
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kedge.datasets import Pictures
from kedge.images import Preprocessing
from kedge.training.data import Features

__all__ = ["cached_features", "embed_all"]

_BATCH = 64


def cached_features(
    path: Path, backbone: nn.Module, pictures: Pictures, preprocessing: Preprocessing, device: torch.device
) -> Features:
    """The backbone's outputs for `pictures`: read from `path` if a run left them there, computed otherwise."""
    labels = torch.from_numpy(pictures.labels)
    if path.exists():
        values = load_file(path)["features"]
    else:
        values = embed_all(backbone, pictures, preprocessing, device, what="features")
        part = path.with_suffix(".part")
        save_file({"features": values}, part)
        part.replace(path)
    return Features(values, labels)


@torch.inference_mode()
def embed_all(
    network: nn.Module, pictures: Pictures, preprocessing: Preprocessing, device: torch.device, *, what: str
) -> Tensor:
    """The network's outputs for all pictures, unaugmented, on the CPU."""
    network.to(device).eval()
    starts = range(0, len(pictures), _BATCH)
    found = []
    for start in track(starts, description=what, transient=True, disable=len(starts) < 20):
        pixels = pictures.take(range(start, min(start + _BATCH, len(pictures)))).to(device)
        found.append(network(preprocessing.normalise(pixels)).float().cpu())
    return torch.cat(found)
