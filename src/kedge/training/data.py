"""Training data: images (augmented on the device) or cached features, in batches whose order the seed fixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kedge.distributed import shard_range
from kedge.images import prefetch
from kedge.training.parallel import SINGLE_PROCESS, Layout

__all__ = ["Batch", "ClassGroups", "DeviceDataset", "Examples", "TrainingData", "derive_seed", "fits_on"]

Batch = tuple[Tensor, Tensor]

_GALLERY = 10_000
_GALLERY_PER_CLASS, _MIN_GALLERY = 20, 1_000
"""Training images that are the gallery of the held-out ones; fewer where the 1-NN accuracy is not the target."""
_MEMORY_SHARE = 0.5
"""Share of the device's free memory that the training set may take; the network needs the rest."""
_PREFETCH = 16
"""Batches that are read ahead."""
_SMALL_IMAGE, _EVAL_BATCH_FACTOR = 3 * 64 * 64, 4
"""On a GPU, images of at most so many bytes are embedded in larger batches without gradients: fewer launches."""


def derive_seed(*parts: int) -> int:
    """One seed from several integers, far from those of neighbouring integers."""
    mixed = 0
    for part in parts:
        mixed = (mixed * 6364136223846793005 + part * 1442695040888963407 + 1) % 2**63
    return mixed


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
        return self.values.index_select(0, rows), self.labels.index_select(0, rows)

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


class ClassGroups:
    """Draws the order of an epoch in groups of `size` images of one class, groups and members shuffled.

    Every image comes once, but for what is left of a class after its last whole group; a class with fewer than `size`
    images fills one group by repeating them.
    """

    def __init__(self, labels: np.ndarray, size: int) -> None:
        self.size = size
        self._rows = [torch.from_numpy(np.flatnonzero(labels == label)) for label in np.unique(labels)]
        self._groups = sum(max(1, len(rows) // size) for rows in self._rows)

    def __len__(self) -> int:
        return self._groups * self.size

    def draw(self, generator: torch.Generator) -> Tensor:
        """The rows of one epoch."""
        groups = []
        for rows in self._rows:
            drawn = rows[torch.randperm(len(rows), generator=generator)]
            drawn = drawn.repeat(-(-self.size // len(rows)))
            groups.append(drawn[: max(1, len(rows) // self.size) * self.size].view(-1, self.size))
        together = torch.cat(groups)
        return together[torch.randperm(len(together), generator=generator)].flatten()


class TrainingData:
    """Training batches, held-out batches and the gallery these are searched in.

    `classes` is their number, or None for a loss that predicts none, whose target metric is 1-NN accuracy. With
    `per_class`, images come in `ClassGroups` by their `labels`; with `views`, each comes so many times in a row, to be
    augmented differently.
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
        labels: np.ndarray | None = None,
        per_class: int | None = None,
        views: int = 1,
    ) -> None:
        self.train, self.held_out, self.for_gpu = train, held_out, for_gpu
        self._seed, self._layout, self._views = seed, layout, views
        self._classes = None
        count = len(train)
        if per_class is not None and labels is not None:
            self._classes = ClassGroups(labels, per_class)
            count = len(self._classes)
        global_batch = layout.batch_size(batch_size, count * views)
        self.batch_size = global_batch // layout.parts
        """Images of one forward in one process."""
        self.steps_per_epoch = count * views // global_batch
        """Optimizer steps."""
        gallery = _GALLERY if classes is None else min(_GALLERY, max(_MIN_GALLERY, _GALLERY_PER_CLASS * classes))
        self._gallery_rows = range(0, len(train), -(-len(train) // gallery))

    def train_batches(self, epoch: int) -> Iterator[Batch]:
        """Shuffled batches of one size: this rank's rows of every whole batch.

        Their order depends on seed and epoch alone, so that a resumed run sees the same batches.
        """
        generator = torch.Generator().manual_seed(derive_seed(self._seed, epoch))
        share = self.batch_size * self._layout.accumulate
        drawn = (
            torch.randperm(len(self.train), generator=generator)
            if self._classes is None
            else self._classes.draw(generator)
        )
        rows = drawn.repeat_interleave(self._views)
        whole = rows[: self.steps_per_epoch * share * self._layout.processes].view(-1, self._layout.processes, share)
        return self._batches(self.train, whole[:, self._layout.rank].flatten(), self.batch_size)

    def query_batches(self) -> Iterator[Batch]:
        """This rank's share of the held-out images."""
        return iter(()) if self.held_out is None else self._in_order(self.held_out, range(len(self.held_out)))

    def gallery_batches(self) -> Iterator[Batch]:
        """This rank's share of the training images that held-out ones are searched in."""
        return self._in_order(self.train, self._gallery_rows)

    def _in_order(self, examples: Examples, rows: range) -> Iterator[Batch]:
        share = shard_range(len(rows))
        rows, size = rows[share.start : share.stop], self.batch_size
        if self.for_gpu and examples.__getitems__([0])[0].nbytes <= _SMALL_IMAGE:
            size *= _EVAL_BATCH_FACTOR
        # Made on the device: to copy the rows would be to wait for all it still has to do.
        device = examples.values.device if isinstance(examples, DeviceDataset) else None
        return self._batches(examples, torch.arange(rows.start, rows.stop, rows.step, device=device), size)

    def _batches(self, examples: Examples, rows: Tensor, size: int) -> Iterator[Batch]:
        """The examples of these rows; for a GPU, threads read those on the host ahead into pinned memory."""
        if isinstance(examples, DeviceDataset):
            yield from map(examples.__getitems__, torch.split(rows.to(examples.values.device), size))
            return
        torch.empty((), dtype=torch.int64).random_()  # as a DataLoader draws: dropout on a CPU stays what it was
        first, *rest = (part.tolist() for part in torch.split(rows, size))
        yield examples.__getitems__(first)  # in this thread, since it may have a folder decoded
        if not self.for_gpu:
            yield from map(examples.__getitems__, rest)
            return

        def read(part: list[int]) -> Batch:
            inputs, labels = examples.__getitems__(part)
            return (inputs.pin_memory(), labels.pin_memory()) if torch.cuda.is_available() else (inputs, labels)

        yield from prefetch(read, rest, ahead=_PREFETCH)
