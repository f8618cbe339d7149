"""Batches for training: pictures (augmented on the device) or cached features, in an order fixed by the seed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from kedge.training.layout import ALONE, Layout

__all__ = ["Batch", "Examples", "Resident", "TrainingData", "fits_on", "seed_of"]

Batch = tuple[Tensor, Tensor]

_GALLERY = 10_000
_GALLERY_PER_CLASS, _GALLERY_AT_LEAST = 20, 1_000
"""So many training images are the gallery of the held-out ones; fewer where the 1-NN accuracy is not the target."""


_SHARE = 0.5
"""Of the device's free memory, so much may be taken by the training set; the network needs the rest."""
_WORKERS = 8
_SMALL, _LARGER = 3 * 64 * 64, 4
"""On a GPU, batches of pictures of so few bytes are so many times larger without gradients: fewer launches."""


class Examples(Protocol):
    """Inputs with labels that can be fetched a batch at a time: `Pictures` or `Features`."""

    def __len__(self) -> int: ...
    def __getitems__(self, indices: Sequence[int]) -> Batch: ...


@dataclass(frozen=True)
class Features:
    """Inputs that are tensors already, such as the outputs of a frozen encoder in place of pictures."""

    values: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.values)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        rows = torch.as_tensor(indices, device=self.values.device)
        return self.values[rows], self.labels[rows]


class Resident(Features):
    """Examples that live on a device, and whose batches are put together there."""

    @classmethod
    def of(cls, examples: Examples, device: torch.device) -> Resident:
        """A copy of all examples on `device`, made in steps."""
        parts = []
        for start in range(0, len(examples), 8192):
            values, labels = examples.__getitems__(range(start, min(start + 8192, len(examples))))
            parts.append((values.to(device, non_blocking=True), labels.to(device, non_blocking=True)))
        return cls(torch.cat([values for values, _ in parts]), torch.cat([labels for _, labels in parts]))


def fits_on(device: torch.device, examples: Sequence[Examples]) -> tuple[bool, str]:
    """Whether examples can live on the device, and the figures that decide it."""
    needed = sum(len(some) * some.__getitems__([0])[0].nbytes for some in examples if len(some))
    free = torch.cuda.mem_get_info(device)[0]
    figures = f"{needed / 2**30:.2f} GiB of pictures, {free / 2**30:.1f} GiB of GPU memory free"
    return needed <= _SHARE * free, figures


class HostBatches:
    """A loader that starts reading when its first batch is asked for.

    One with workers starts as soon as the trainer takes hold of it, before it knows which epoch is resumed.
    """

    batch_sampler = None

    def __init__(self, loader: DataLoader[Any], sampler: EpochOrder | range) -> None:
        self.loader, self.sampler = loader, sampler

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        yield from self.loader


class DeviceBatches:
    """Iterates over resident examples in the order of a sampler; what a `DataLoader` is to the trainer."""

    batch_sampler = None
    """The trainer looks for one beside the sampler."""

    def __init__(self, examples: Resident, sampler: EpochOrder | range, batch_size: int, *, drop_last: bool) -> None:
        self.examples, self.sampler = examples, sampler
        self.batch_size, self.drop_last = batch_size, drop_last

    def __len__(self) -> int:
        whole = len(self.sampler) // self.batch_size
        return whole if self.drop_last else -(-len(self.sampler) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        order = self._order()
        for place in range(len(self)):
            rows = order[place * self.batch_size : (place + 1) * self.batch_size]
            yield self.examples.values[rows], self.examples.labels[rows]

    def _order(self) -> Tensor:
        device = self.examples.values.device
        if isinstance(self.sampler, EpochOrder):
            return self.sampler.order().to(device)
        # Made there: to copy it would be to wait for all the device still has to do.
        return torch.arange(self.sampler.start, self.sampler.stop, self.sampler.step, device=device)


def seed_of(*parts: int) -> int:
    """One seed from several numbers, far from that of any neighbour."""
    mixed = 0
    for part in parts:
        mixed = (mixed * 6364136223846793005 + part * 1442695040888963407 + 1) % 2**63
    return mixed


class EpochOrder(Sampler[int]):
    """A permutation that depends on seed and epoch alone, so that a resumed run sees the same batches.

    With a batch size and several processes, it holds this one's rows of every whole batch.
    """

    def __init__(self, size: int, seed: int, batch_size: int = 1, layout: Layout = ALONE) -> None:
        self.size, self.seed, self.epoch = size, seed, 0
        self.batch_size, self.layout = batch_size, layout

    def set_epoch(self, epoch: int) -> None:
        """Called by the trainer before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        if self.layout.parts == 1:
            return self.size
        return self.size // self.batch_size * (self.batch_size // self.layout.processes)

    def order(self) -> Tensor:
        """This epoch's permutation."""
        generator = torch.Generator().manual_seed(seed_of(self.seed, self.epoch))
        rows = torch.randperm(self.size, generator=generator)
        if self.layout.parts == 1:
            return rows
        whole = rows[: self.size - self.size % self.batch_size]
        batches = whole.view(-1, self.layout.processes, self.batch_size // self.layout.processes)
        return batches[:, self.layout.rank].flatten()

    def __iter__(self) -> Iterator[int]:
        yield from self.order().tolist()


class TrainingData(L.LightningDataModule):
    """Training batches, held-out batches and the gallery these are searched in.

    `classes` is their number, or None for a loss that knows none, whose target metric is 1-NN accuracy.
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
        layout: Layout = ALONE,
    ) -> None:
        super().__init__()
        self.train, self.held_out = train, held_out
        self.layout = layout
        self.whole = layout.batch_size(batch_size, len(train))
        """The batch of all processes."""
        self.batch_size = self.whole // layout.parts
        self.seed = seed
        self.gallery = (
            _GALLERY if classes is None else min(_GALLERY, max(_GALLERY_AT_LEAST, _GALLERY_PER_CLASS * classes))
        )
        """How many training images the held-out ones are searched in."""
        self.for_gpu = for_gpu

    def train_dataloader(self) -> Iterable[Batch]:
        """Shuffled batches of one size."""
        order = EpochOrder(len(self.train), self.seed, self.whole, self.layout)
        return self._batches(self.train, order, drop_last=True)

    def val_dataloader(self) -> list[Iterable[Batch]]:
        """The held-out images, and behind them the gallery they are searched in; of both, this process's share."""
        if self.held_out is None:
            return []
        step = -(-len(self.train) // self.gallery)
        return [
            self._batches(self.held_out, self._share(range(len(self.held_out)))),
            self._batches(self.train, self._share(range(0, len(self.train), step))),
        ]

    def _share(self, rows: range) -> range:
        start, stop = (len(rows) * one // self.layout.processes for one in (self.layout.rank, self.layout.rank + 1))
        return rows[start:stop]

    def _batches(self, examples: Examples, order: EpochOrder | range, *, drop_last: bool = False) -> Iterable[Batch]:
        size = self.batch_size
        if self.for_gpu and isinstance(order, range) and examples.__getitems__([0])[0].nbytes <= _SMALL:
            size *= _LARGER
        if isinstance(examples, Resident):
            return DeviceBatches(examples, order, size, drop_last=drop_last)
        options: dict[str, Any] = {"sampler": order, "drop_last": drop_last}
        if self.for_gpu:
            workers = min(_WORKERS, os.cpu_count() or 1)
            options |= {"num_workers": workers, "pin_memory": True, "persistent_workers": True, "prefetch_factor": 4}
        # Whole batches come from __getitems__, so there is nothing left to collate.
        loader: DataLoader[Any] = DataLoader(examples, size, collate_fn=_as_is, **options)  # type: ignore[arg-type]
        return HostBatches(loader, order)


def _as_is(batch: Batch) -> Batch:
    return batch
