"""A dataset of one's own, as arrays in an .npz file."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from kedge.datasets.base import Dataset, ImageSplit
from kedge.errors import DataError

__all__ = ["arrays"]

_NEEDED = ("x_train", "y_train", "x_test", "y_test")


def arrays(path: str | Path, flip: bool = True) -> Dataset:
    """Read x_train, y_train, x_test, y_test and, if there are names, classes from an .npz file.

    Images are uint8, N x H x W x 3 or, grey, N x H x W; labels are integers from 0.
    """
    path = Path(path).expanduser()
    found = _load(path)
    if missing := [name for name in _NEEDED if name not in found]:
        raise DataError(f"{path} lacks {', '.join(missing)}: it must hold {', '.join(_NEEDED)}, and may hold classes.")
    train, test = (_pictures(path, found, split) for split in ("train", "test"))
    if "classes" in found:
        classes = tuple(str(name) for name in found["classes"].reshape(-1))
    else:
        largest = max(pictures.labels.max(initial=0) for pictures in (train, test))
        if largest >= len(train):
            raise DataError(
                f"{path} has a label {largest} but {len(train)} training pictures: number the classes from 0."
            )
        classes = tuple(str(label) for label in range(int(largest) + 1))
    if len(np.unique(train.labels)) < 2:
        raise DataError(f"{path} has training pictures of one class only: at least two classes are needed.")
    return Dataset(name=path.stem, classes=classes, train=train, test=test, flip=flip)


def _load(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise DataError(f"There is no file {path}: give the path of an .npz file.")
    try:
        loaded = np.load(path, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            raise DataError(f"{path} holds a single array: save all arrays in one .npz file with numpy.savez.")
        with loaded:
            return {name: loaded[name] for name in (*_NEEDED, "classes") if name in loaded.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read as an .npz file of plain arrays, as numpy.savez writes.") from error


def _pictures(path: Path, found: dict[str, np.ndarray], split: str) -> ImageSplit:
    images, labels = found[f"x_{split}"], found[f"y_{split}"]
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] != 3):
        raise DataError(
            f"x_{split} in {path} must be uint8 of shape N x H x W x 3 or N x H x W, not {images.dtype} {images.shape}."
        )
    if labels.shape != (len(images),) or not np.issubdtype(labels.dtype, np.integer):
        raise DataError(
            f"y_{split} in {path} must be {len(images)} integers, one for each picture, "
            f"not {labels.dtype} {labels.shape}."
        )
    if images.ndim == 3:
        images = np.repeat(images[..., None], 3, axis=3)
    return ImageSplit(np.ascontiguousarray(images.transpose(0, 3, 1, 2)), labels)
