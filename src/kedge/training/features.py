"""Features of a frozen encoder, computed once and kept in the run's folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from kedge.datasets import ImageSplit
from kedge.distributed import all_gather_rows, broadcast_object, is_rank_zero, shard_range, world_size
from kedge.encoders import Encoder
from kedge.images import Preprocessing
from kedge.io import atomic_write
from kedge.model import embed_split
from kedge.training.data import Features

__all__ = ["cached_features", "class_means"]

_BATCH = 64


def cached_features(
    path: Path, pictures: ImageSplit, encoder: Encoder, preprocessing: Preprocessing, device: torch.device
) -> Features:
    """What the head will see of `pictures`: read from `path` if a run left it there, computed otherwise.

    Several processes compute a share each; the leader writes.
    """
    if broadcast_object(path.exists()):
        values = load_file(path)["features"]
    else:
        encoder.to(device).eval()

        def embed(pixels: Tensor) -> Tensor:
            return encoder.features(preprocessing.to_input(pixels.to(device)), flip_tta=preprocessing.flip_tta)

        share = shard_range(len(pictures), whole=_BATCH)
        own = pictures if world_size() == 1 else pictures.subset(np.arange(share.start, share.stop))
        # Out of inference mode: features are trained on.
        values = all_gather_rows(embed_split(embed, own, batch_size=_BATCH)).cpu().clone()
        encoder.train()  # as it is in a run that finds its features
        if is_rank_zero():
            path.parent.mkdir(exist_ok=True)
            with atomic_write(path) as stream:
                stream.write(save({"features": values}))
    return Features(values, torch.from_numpy(pictures.labels))


def class_means(embed: Callable[[Tensor], Tensor], pictures: ImageSplit, classes: int) -> Tensor:
    """The mean embedding of each class, classes × dim; zero for a class without pictures."""
    title = "pictures for the class means"
    embeddings = embed_split(embed, pictures, batch_size=_BATCH, title=title).cpu()
    labels = torch.from_numpy(pictures.labels)
    sums = torch.zeros(classes, embeddings.shape[1]).index_add_(0, labels, embeddings)
    return sums / torch.bincount(labels, minlength=classes).clamp(min=1)[:, None]
