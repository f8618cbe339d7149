"""Benchmarks of the paper and of unseen classes, a sample, and one's own: folders, arrays, PyTorch, Hugging Face."""

from __future__ import annotations

import warnings
from typing import Any

from kedge.datasets.base import Dataset, ImageSplit
from kedge.datasets.benchmarks import cifar100, food101, sample, svhn, tiny_imagenet
from kedge.datasets.cache import stored
from kedge.datasets.external import as_dataset, huggingface, is_external
from kedge.datasets.folder import folder
from kedge.datasets.npz import arrays
from kedge.datasets.splits import few_shot, hold_out, leave_classes_out, shot_counts, train_val_split
from kedge.datasets.unseen import cars196, cub200, inshop, online_products

__all__ = [
    "Dataset",
    "ImageSplit",
    "arrays",
    "as_dataset",
    "cars196",
    "cifar100",
    "cub200",
    "few_shot",
    "folder",
    "food101",
    "hold_out",
    "huggingface",
    "inshop",
    "is_external",
    "leave_classes_out",
    "online_products",
    "sample",
    "shot_counts",
    "stored",
    "svhn",
    "tiny_imagenet",
    "train_val_split",
]

# Old names, accepted until the next release.
_RENAMED: dict[str, Any] = {"Pictures": ImageSplit, "divide": train_val_split, "is_given": is_external}


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        new = _RENAMED[name]
        warnings.warn(f"kedge.datasets.{name} is now {new.__name__}.", DeprecationWarning, stacklevel=2)
        return new
    raise AttributeError(f"module 'kedge.datasets' has no attribute {name!r}")
