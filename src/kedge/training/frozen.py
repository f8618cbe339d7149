"""A frozen encoder: its features, what training gained over them and when an image is unknown, by held-out images."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn.functional import normalize

from kedge.datasets import ImageSplit
from kedge.distributed import all_gather_rows, broadcast_object, is_rank_zero, shard_range, world_size
from kedge.errors import ConfigError
from kedge.io import atomic_write
from kedge.metrics import rank_relevant
from kedge.model import Calibration, Model
from kedge.model.calibration import familiarity_with
from kedge.model.features import split_features
from kedge.training.data import DeviceDataset
from kedge.training.quality import chance_level, frozen_summary

__all__ = ["Gain", "calibrate", "frozen_features", "measure_gain"]

_EMBED_BATCH = 64
_QUERIES = 2000
"""Held-out images that the gain is measured on, spread evenly where there are more."""
_ACCEPT = 0.95


def frozen_features(path: Path, images: ImageSplit, model: Model) -> DeviceDataset:
    """Features of images, as the head will see them: read from `path` if they are there, or computed.

    Several processes compute a share each; rank 0 writes. Features of files are not written: the cache has them.
    """
    if broadcast_object(path.exists()):
        values = load_file(path)["features"]
    else:
        share = shard_range(len(images), whole=_EMBED_BATCH)
        own = images if world_size() == 1 else images.subset(range(share.start, share.stop))
        features = split_features(model, own, batch_size=_EMBED_BATCH).to(model.device)
        values = all_gather_rows(features).cpu().clone()  # out of inference mode: features are trained on
        if is_rank_zero() and images.files is None:
            path.parent.mkdir(exist_ok=True)
            with atomic_write(path) as stream:
                stream.write(save({"features": values}))
    return DeviceDataset(values, torch.from_numpy(images.labels))


@dataclass(frozen=True)
class Gain:
    """Held-out images searched among the training images by brute force: by embedding, and by raw features (cosine)."""

    queries: int
    gallery: int
    embeddings: dict[str, float]
    """mAP, and 1-NN: the share of queries whose first hit is right."""
    features: dict[str, float]

    chance: float
    """The share of right hits where they are drawn at random."""

    def __str__(self) -> str:
        return frozen_summary(self.queries, self.chance, self.embeddings, self.features)

    def save(self, path: Path) -> None:
        """Write it as JSON, all or nothing."""
        with atomic_write(path) as stream:
            stream.write((json.dumps(asdict(self), indent=2) + "\n").encode())


def measure_gain(model: Model, train: DeviceDataset, held_out: DeviceDataset) -> Gain:
    """The gain of a model over the features it was trained on."""
    count = min(_QUERIES, len(held_out))
    queries, labels = held_out.__getitems__(torch.arange(count) * len(held_out) // count)

    def scores(queries: Tensor, gallery: Tensor) -> dict[str, float]:
        ranking = rank_relevant(queries, labels, gallery, train.labels, ks=(1,))
        return {"mAP": ranking.mean()["mAP"], "1-NN": float(ranking.precision[1].mean())}

    embeddings = scores(model.embed_features(queries), model.embed_features(train.values))
    features = scores(normalize(queries, dim=1), normalize(train.values, dim=1))
    chance = chance_level(labels.cpu().numpy(), train.labels.cpu().numpy())
    return Gain(count, len(train), embeddings, features, chance)


def calibrate(model: Model, train: DeviceDataset, held_out: DeviceDataset) -> Calibration | None:
    """How familiar an image must look to be known, by the held-out images; None where too few are held out."""
    if model.anchors is None:
        return None
    embeddings = model.embed_features(held_out.values)
    values = familiarity_with(train.values, train.labels, held_out.values, embeddings, model.anchors)
    with suppress(ConfigError):
        return Calibration.from_distances(-values, _ACCEPT)
    return None
