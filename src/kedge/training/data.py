"""Batches for training: pictures (augmented on the device) or cached features, in an order fixed by the seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

__all__ = ["Batch", "Examples", "TrainingData", "seed_of"]

Batch = tuple[Tensor, Tensor]

_REFERENCE_AT_MOST = 10_000
"""So many training images serve as the gallery of the 1-NN target metric."""


class Examples(Protocol):
    """Inputs with labels that can be fetched a batch at a time: `Pictures` or `Features`."""

    def __len__(self) -> int: ...
    def __getitems__(self, indices: Sequence[int]) -> Batch: ...


@dataclass(frozen=True)
class Features:
    """Outputs of a frozen encoder, in place of pictures."""

    values: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.values)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        rows = torch.as_tensor(indices)
        return self.values[rows], self.labels[rows]


def seed_of(*parts: int) -> int:
    """One seed from several numbers, far from that of any neighbour."""
    mixed = 0
    for part in parts:
        mixed = (mixed * 6364136223846793005 + part * 1442695040888963407 + 1) % 2**63
    return mixed


class EpochOrder(Sampler[int]):
    """A permutation that depends on seed and epoch alone, so that a resumed run sees the same batches."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed, self.epoch = size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Called by the trainer before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(seed_of(self.seed, self.epoch))
        yield from torch.randperm(self.size, generator=generator).tolist()


class TrainingData(L.LightningDataModule):
    """Training batches, held-out batches and, where the target metric is 1-NN accuracy, its gallery."""

    def __init__(
        self, train: Examples, held_out: Examples | None, *, batch_size: int, seed: int, with_reference: bool
    ) -> None:
        super().__init__()
        self.train, self.held_out = train, held_out
        self.batch_size = min(batch_size, len(train))
        self.seed = seed
        self.with_reference = with_reference

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled batches of one size."""
        order = EpochOrder(len(self.train), self.seed)
        return self._loader(self.train, sampler=order, drop_last=True)

    def val_dataloader(self) -> list[DataLoader[Any]]:
        """The held-out images, and behind them the gallery of the 1-NN metric."""
        if self.held_out is None:
            return []
        loaders = [self._loader(self.held_out)]
        if self.with_reference:
            step = -(-len(self.train) // _REFERENCE_AT_MOST)
            loaders.append(self._loader(self.train, sampler=range(0, len(self.train), step)))
        return loaders

    def _loader(self, examples: Examples, **options: Any) -> DataLoader[Any]:
        # Whole batches come from __getitems__, so there is nothing left to collate.
        return DataLoader(examples, batch_size=self.batch_size, collate_fn=_as_is, **options)  # type: ignore[arg-type]


def _as_is(batch: Batch) -> Batch:
    return batch
