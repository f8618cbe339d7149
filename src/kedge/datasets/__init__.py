"""The paper's four datasets, a bundled sample, and one's own pictures in folders or arrays."""

from __future__ import annotations

from kedge.datasets.arrays import arrays
from kedge.datasets.base import Dataset, Pictures
from kedge.datasets.cifar100 import cifar100
from kedge.datasets.folder import folder
from kedge.datasets.food101 import food101
from kedge.datasets.sample import sample
from kedge.datasets.splits import divide, few_shot, hold_out, shot_counts
from kedge.datasets.svhn import svhn
from kedge.datasets.tiny_imagenet import tiny_imagenet

__all__ = [
    "Dataset",
    "Pictures",
    "arrays",
    "cifar100",
    "divide",
    "few_shot",
    "folder",
    "food101",
    "hold_out",
    "sample",
    "shot_counts",
    "svhn",
    "tiny_imagenet",
]
