"""The paper's four datasets, a bundled sample, and one's own in folders, arrays, PyTorch or Hugging Face."""

from __future__ import annotations

from kedge.datasets.arrays import arrays
from kedge.datasets.base import Dataset, Pictures
from kedge.datasets.cifar100 import cifar100
from kedge.datasets.folder import folder
from kedge.datasets.food101 import food101
from kedge.datasets.given import as_dataset, is_given
from kedge.datasets.huggingface import huggingface
from kedge.datasets.sample import sample
from kedge.datasets.splits import divide, few_shot, hold_out, shot_counts
from kedge.datasets.stored import stored
from kedge.datasets.svhn import svhn
from kedge.datasets.tiny_imagenet import tiny_imagenet

__all__ = [
    "Dataset",
    "Pictures",
    "arrays",
    "as_dataset",
    "cifar100",
    "divide",
    "few_shot",
    "folder",
    "food101",
    "hold_out",
    "huggingface",
    "is_given",
    "sample",
    "shot_counts",
    "stored",
    "svhn",
    "tiny_imagenet",
]
