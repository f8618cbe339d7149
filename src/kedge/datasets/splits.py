"""Splits by class, the same for the same seed: held-out rows and few-shot sets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from kedge.datasets.base import Dataset, ImageSplit
from kedge.errors import ConfigError

__all__ = ["few_shot", "hold_out", "keep_classes", "leave_classes_out", "shot_counts", "train_val_split"]

_MIN_IMAGES = 5
"""Of a class with fewer, none is held out to choose by: training would lose more than is learned from it."""


def train_val_split(
    train: ImageSplit, holdout: float, shots: int | None, seed: int = 0
) -> tuple[ImageSplit, ImageSplit | None]:
    """The pictures that are trained on (with `shots`, so many of each class), and those held out, if any."""
    rows, kept = hold_out(train.labels, holdout, seed, at_least=_MIN_IMAGES)
    if shots is not None:
        rows = rows[few_shot(train.labels[rows], shots, seed)]
    return train.subset(rows), train.subset(kept) if len(kept) else None


def hold_out(
    labels: np.ndarray, fraction: float = 0.1, seed: int = 0, *, at_least: int = 2
) -> tuple[np.ndarray, np.ndarray]:
    """Training rows and held-out rows, both sorted: of every class the fraction, at least one image.

    A class with fewer than `at_least` images keeps them all for training.

    >>> train_rows, held_out_rows = hold_out(np.array([0] * 20 + [1] * 10 + [2]))
    >>> len(train_rows), len(held_out_rows)
    (28, 3)
    """
    if not 0 <= fraction < 1:
        raise ConfigError(f"fraction must lie between 0 and 1 (1 excluded), not {fraction}.")
    held_out = [np.empty(0, dtype=np.int64)]
    if fraction > 0:
        for rows in _shuffled_by_class(labels, seed):
            if len(rows) >= at_least:
                held_out.append(rows[: min(len(rows) - 1, max(1, round(fraction * len(rows))))])
    chosen = np.sort(np.concatenate(held_out))
    return np.setdiff1d(np.arange(len(labels)), chosen, assume_unique=True), chosen


def leave_classes_out(dataset: Dataset, share: float, seed: int = 0) -> Dataset:
    """The dataset without a share of its classes, whose images of both splits are `Dataset.unseen`.

    At least one class is left out where the share is above 0, and at least two are kept.
    """
    if share == 0:
        return dataset
    count = len(dataset.classes)
    if count < 3:
        raise ConfigError(f"split.unseen is {share:g} but {dataset.name} has {count} classes: at least 3 are needed.")
    unseen = np.random.default_rng(seed).permutation(count)[: min(count - 2, max(1, round(share * count)))]
    return keep_classes(dataset, np.setdiff1d(np.arange(count), unseen))


def keep_classes(dataset: Dataset, kept: np.ndarray) -> Dataset:
    """The dataset with these classes, by their sorted numbers; images of the others are `Dataset.unseen`."""

    def seen(split: ImageSplit) -> ImageSplit:
        split = split.subset(np.flatnonzero(np.isin(split.labels, kept)))
        return replace(split, labels=np.searchsorted(kept, split.labels))

    others = (split.subset(np.flatnonzero(~np.isin(split.labels, kept))) for split in (dataset.train, dataset.test))
    return replace(
        dataset,
        classes=tuple(dataset.classes[label] for label in kept),
        train=seen(dataset.train),
        test=seen(dataset.test),
        unseen=tuple(split for split in others if len(split)),
        unseen_gallery=None,
    )


def few_shot(labels: np.ndarray, shots: int, seed: int = 0) -> np.ndarray:
    """Sorted rows of ``shots`` pictures of every class (all, where a class has fewer).

    With one seed the sets are nested: more shots add pictures and drop none.

    >>> len(few_shot(np.array([0, 0, 0, 1, 1, 1]), 2))
    4
    """
    if shots < 1:
        raise ConfigError(f"shots must be at least 1, not {shots}.")
    chosen = [rows[:shots] for rows in _shuffled_by_class(labels, seed)]
    return np.sort(np.concatenate([np.empty(0, dtype=np.int64), *chosen]))


def shot_counts(labels: np.ndarray) -> list[int]:
    """1, 2, 4, 8 ... doubling until all pictures are used.

    >>> shot_counts(np.array([0, 0, 0, 0, 0, 1]))
    [1, 2, 4, 8]
    """
    largest = int(np.bincount(labels).max(initial=1))
    return [2**power for power in range((largest - 1).bit_length() + 1)]


def _shuffled_by_class(labels: np.ndarray, seed: int) -> Iterator[np.ndarray]:
    """The rows of each class in an order of its own, which no other class has a say in."""
    labels = np.asarray(labels)
    for label in np.unique(labels):
        yield np.random.default_rng([seed, int(label)]).permutation(np.flatnonzero(labels == label))
