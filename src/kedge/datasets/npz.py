"""A dataset of one's own, as arrays in an .npz file."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from kedge.datasets.base import Dataset, ImageSplit
from kedge.errors import DataError

__all__ = ["arrays"]

_REQUIRED = ("x_train", "y_train", "x_test", "y_test")


def arrays(path: str | Path, flip: bool = True) -> Dataset:
    """Read x_train, y_train, x_test, y_test and, if there are names, classes from an .npz file.

    Images are uint8, N x H x W x 3 or, grey, N x H x W; labels are integers from 0.
    """
    path = Path(path).expanduser()
    values = _load(path)
    if missing := [name for name in _REQUIRED if name not in values]:
        raise DataError(
            f"{path} lacks {', '.join(missing)}: it must hold {', '.join(_REQUIRED)}, and may hold classes."
        )
    train, test = (_split(path, values, split) for split in ("train", "test"))
    if len(np.unique(train.labels)) < 2:
        raise DataError(f"{path} has training images of one class only: at least two classes are needed.")
    if "classes" in values:
        classes = tuple(map(str, values["classes"].reshape(-1)))
    else:
        largest = int(max(split.labels.max(initial=0) for split in (train, test)))
        if largest >= len(train):
            raise DataError(f"{path} has a label {largest} but {len(train)} training images: number classes from 0.")
        classes = tuple(map(str, range(largest + 1)))
    return Dataset(name=path.stem, classes=classes, train=train, test=test, flip=flip)


def _load(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise DataError(f"File {path} does not exist; pass the path of an .npz file.")
    try:
        with np.load(path, allow_pickle=False) as loaded:
            return {name: loaded[name] for name in (*_REQUIRED, "classes") if name in loaded.files}
    except (AttributeError, TypeError, OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read as an .npz file of plain arrays, as numpy.savez writes.") from error


def _split(path: Path, values: dict[str, np.ndarray], split: str) -> ImageSplit:
    images, labels = values[f"x_{split}"], values[f"y_{split}"]
    if images.dtype != np.uint8 or images.shape[3:] not in ((), (3,)) or images.ndim < 3:
        raise DataError(
            f"x_{split} in {path} must be uint8 of shape N x H x W x 3 or N x H x W, not {images.dtype} {images.shape}."
        )
    if images.ndim == 3:
        images = np.repeat(images[..., None], 3, axis=3)
    try:
        return ImageSplit(np.ascontiguousarray(images.transpose(0, 3, 1, 2)), labels)
    except DataError as error:
        raise DataError(f"y_{split} in {path} does not fit x_{split}: {error}") from error
