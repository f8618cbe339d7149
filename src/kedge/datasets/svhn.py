"""SVHN: 73,257 training and 26,032 test images of house-number digits, 32 x 32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np

from kedge.datasets.base import Dataset, Pictures
from kedge.datasets.download import Source, data_root, fetch
from kedge.errors import DataError

__all__ = ["svhn"]

SOURCES: Mapping[str, Source] = MappingProxyType(
    {
        "train": Source(
            "http://ufldl.stanford.edu/housenumbers/train_32x32.mat", "md5:e26dedcc434d2e4c54c9b2d4a06d8373"
        ),
        "test": Source("http://ufldl.stanford.edu/housenumbers/test_32x32.mat", "md5:eb5a983be6a315427106f1b164d9cef3"),
    }
)


def svhn(root: str | Path | None = None, sources: Mapping[str, Source] = SOURCES) -> Dataset:
    """SVHN's cropped digits; downloaded (246 MB) on first use. Never mirrored: a mirrored digit is none."""
    folder = data_root(root) / "svhn"
    train, test = (_read(folder, sources[split]) for split in ("train", "test"))
    return Dataset("svhn", tuple("0123456789"), train, test, flip=False)


def _read(folder: Path, source: Source) -> Pictures:
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise DataError("SVHN comes as Matlab files, which need scipy: pip install 'kedge[svhn]'.") from error
    path = fetch(source.url, folder / source.filename, checksum=source.checksum)
    try:
        contents = loadmat(path, variable_names=("X", "y"))
        images, labels = contents["X"], contents["y"].reshape(-1)
    except Exception as error:  # scipy promises no particular error for a file that is not Matlab's
        raise DataError(f"{path} is not SVHN's Matlab file ({error}).") from error
    labels = labels.astype(np.int64)
    labels[labels == 10] = 0  # the files call the digit 0 "10"
    return Pictures(np.ascontiguousarray(images.transpose(3, 2, 0, 1)), labels)
