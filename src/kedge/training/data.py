"""Training data: images (augmented on the device) or cached features, in batches whose order the seed fixes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from kedge.datasets import ImageSplit
from kedge.distributed import all_gather_rows, broadcast_object, is_rank_zero, shard_range, world_size
from kedge.encoders import Encoder
from kedge.images import Preprocessing
from kedge.io import atomic_write
from kedge.model import Model
from kedge.model.features import split_features
from kedge.training.parallel import SINGLE_PROCESS, Layout
from kedge.training.rng import derive_seed

__all__ = [
    "Batch",
    "DeviceDataset",
    "Examples",
    "TrainingData",
    "cached_features",
    "class_means",
    "feature_model",
    "fits_on",
]

Batch = tuple[Tensor, Tensor]

_GALLERY = 10_000
_GALLERY_PER_CLASS, _MIN_GALLERY = 20, 1_000
"""Training images that are the gallery of the held-out ones; fewer where the 1-NN accuracy is not the target."""
_MEMORY_SHARE = 0.5
"""Share of the device's free memory that the training set may take; the network needs the rest."""
_WORKERS = 8
_SMALL_IMAGE, _EVAL_BATCH_FACTOR = 3 * 64 * 64, 4
"""On a GPU, images of at most so many bytes are embedded in larger batches without gradients: fewer launches."""
_EMBED_BATCH = 64


class Examples(Protocol):
    """Inputs with labels that can be fetched a batch at a time: `ImageSplit` or `DeviceDataset`."""

    def __len__(self) -> int: ...
    def __getitems__(self, indices: Sequence[int]) -> Batch: ...


@dataclass(frozen=True)
class DeviceDataset:
    """Examples that live on a device, and whose batches are put together there: images, or features in their place."""

    values: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.values)

    def __getitems__(self, indices: Sequence[int] | Tensor) -> Batch:
        rows = torch.as_tensor(indices, device=self.values.device)
        return self.values[rows], self.labels[rows]

    def batches(self, rows: Tensor, size: int) -> Iterator[Batch]:
        """The examples of these rows, in their order."""
        for part in torch.split(rows.to(self.values.device), size):
            yield self.__getitems__(part)

    @classmethod
    def copy_of(cls, examples: Examples, device: torch.device) -> DeviceDataset:
        """Copy all examples to `device`, in steps."""
        parts = []
        for start in range(0, len(examples), 8192):
            values, labels = examples.__getitems__(range(start, min(start + 8192, len(examples))))
            parts.append((values.to(device, non_blocking=True), labels.to(device, non_blocking=True)))
        return cls(torch.cat([values for values, _ in parts]), torch.cat([labels for _, labels in parts]))


def fits_on(device: torch.device, examples: Sequence[Examples]) -> tuple[bool, str]:
    """Whether examples fit into the device's memory, and the figures that decide it."""
    needed = sum(len(part) * part.__getitems__([0])[0].nbytes for part in examples if len(part))
    free = torch.cuda.mem_get_info(device)[0]
    figures = f"{needed / 2**30:.2f} GiB of images, {free / 2**30:.1f} GiB of GPU memory free"
    return needed <= _MEMORY_SHARE * free, figures


class EpochSampler(Sampler[int]):
    """A permutation that depends on seed and epoch alone, so that a resumed run sees the same batches.

    With several processes, it holds this rank's rows of every whole batch.
    """

    def __init__(self, size: int, seed: int, batch_size: int, layout: Layout) -> None:
        self.size, self.seed, self.epoch = size, seed, 0
        self.batch_size, self.layout = batch_size, layout

    def permutation(self) -> Tensor:
        """This epoch's rows."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, self.epoch))
        rows = torch.randperm(self.size, generator=generator)[: self.size - self.size % self.batch_size]
        shares = rows.view(-1, self.layout.processes, self.batch_size // self.layout.processes)
        return shares[:, self.layout.rank].flatten()

    def __iter__(self) -> Iterator[int]:
        yield from self.permutation().tolist()


class TrainingData:
    """Training batches, held-out batches and the gallery these are searched in.

    `classes` is their number, or None for a loss that predicts none, whose target metric is 1-NN accuracy.
    """

    def __init__(
        self,
        train: Examples,
        held_out: Examples | None,
        *,
        batch_size: int,
        seed: int,
        classes: int | None,
        for_gpu: bool = False,
        layout: Layout = SINGLE_PROCESS,
    ) -> None:
        self.train, self.held_out, self.for_gpu = train, held_out, for_gpu
        global_batch = layout.batch_size(batch_size, len(train))
        self.batch_size = global_batch // layout.parts
        """Images of one forward in one process."""
        self.steps_per_epoch = len(train) // global_batch
        """Optimizer steps."""
        self._sampler = EpochSampler(len(train), seed, global_batch, layout)
        gallery = _GALLERY if classes is None else min(_GALLERY, max(_MIN_GALLERY, _GALLERY_PER_CLASS * classes))
        self._gallery_rows = range(0, len(train), -(-len(train) // gallery))
        self._loaders: dict[str, DataLoader[Any]] = {}

    def train_batches(self, epoch: int) -> Iterable[Batch]:
        """Shuffled batches of one size."""
        self._sampler.epoch = epoch
        if isinstance(self.train, DeviceDataset):
            return self.train.batches(self._sampler.permutation(), self.batch_size)
        return self._loader("train", self.train, self._sampler, self.batch_size)

    def query_batches(self) -> Iterable[Batch]:
        """This rank's share of the held-out images."""
        return [] if self.held_out is None else self._in_order("queries", self.held_out, range(len(self.held_out)))

    def gallery_batches(self) -> Iterable[Batch]:
        """This rank's share of the training images that held-out ones are searched in."""
        return self._in_order("gallery", self.train, self._gallery_rows)

    def _in_order(self, name: str, examples: Examples, rows: range) -> Iterable[Batch]:
        share = shard_range(len(rows))
        rows, size = rows[share.start : share.stop], self.batch_size
        if self.for_gpu and examples.__getitems__([0])[0].nbytes <= _SMALL_IMAGE:
            size *= _EVAL_BATCH_FACTOR
        if isinstance(examples, DeviceDataset):
            # Made there: to copy the rows would be to wait for all the device still has to do.
            device = examples.values.device
            return examples.batches(torch.arange(rows.start, rows.stop, rows.step, device=device), size)
        return self._loader(name, examples, rows, size)

    def _loader(self, name: str, examples: Examples, rows: EpochSampler | range, size: int) -> DataLoader[Any]:
        """A loader that is made once: its workers stay."""
        if name not in self._loaders:
            options: dict[str, Any] = {"sampler": rows}
            if self.for_gpu:
                workers = min(_WORKERS, os.cpu_count() or 1)
                options |= {"num_workers": workers, "persistent_workers": True, "prefetch_factor": 4}
                options["pin_memory"] = True
            # Whole batches come from __getitems__, so there is nothing left to collate.
            self._loaders[name] = DataLoader(examples, size, collate_fn=_identity, **options)  # type: ignore[arg-type]
        return self._loaders[name]


def _identity(batch: Batch) -> Batch:
    return batch


def cached_features(
    path: Path, images: ImageSplit, encoder: Encoder, preprocessing: Preprocessing, device: torch.device
) -> DeviceDataset:
    """Outputs of a frozen encoder, as the head will see them: read from `path` if they are there, or computed.

    Several processes compute a share each; rank 0 writes. Features of files are not written: the cache has them.
    """
    if broadcast_object(path.exists()):
        values = load_file(path)["features"]
    else:
        model = feature_model(encoder, preprocessing, device)
        share = shard_range(len(images), whole=_EMBED_BATCH)
        own = images if world_size() == 1 else images.subset(np.arange(share.start, share.stop))
        # Out of inference mode: features are trained on.
        features = split_features(model, own, batch_size=_EMBED_BATCH).to(device)
        values = all_gather_rows(features).cpu().clone()
        encoder.train()  # as it is in a run that finds its features
        if is_rank_zero() and images.files is None:
            path.parent.mkdir(exist_ok=True)
            with atomic_write(path) as stream:
                stream.write(save({"features": values}))
    return DeviceDataset(values, torch.from_numpy(images.labels))


def feature_model(encoder: Encoder, preprocessing: Preprocessing, device: torch.device) -> Model:
    """A frozen encoder as a model that computes features."""
    return Model(encoder.to(device).eval(), anchors=None, classes=(), preprocessing=preprocessing)


def class_means(embeddings: Tensor, labels: np.ndarray, classes: int) -> Tensor:
    """The mean embedding of each class, classes × dim; zero for a class without images."""
    rows = torch.from_numpy(labels)
    sums = torch.zeros(classes, embeddings.shape[1]).index_add_(0, rows, embeddings.cpu())
    return sums / torch.bincount(rows, minlength=classes).clamp(min=1)[:, None]
