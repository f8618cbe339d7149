"""What users pass as pictures (files, images, arrays, tensors) as batches of pixels."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kedge.errors import ConfigError, PictureError
from kedge.images import Preprocessing, read_picture, upright

__all__ = ["Picture", "pixel_batches"]

Picture: TypeAlias = str | Path | Image.Image | np.ndarray | Tensor
"""A file, a PIL image, a uint8 array (H x W or H x W x 3) or a uint8 tensor (3 x H x W, or a batch)."""

_THREADS = min(8, os.cpu_count() or 1)


def pixel_batches(
    images: Picture | Iterable[Picture], preprocessing: Preprocessing, batch_size: int
) -> Iterator[Tensor]:
    """Batches of uint8 pixels, B x 3 x H x W, in order; the next one is decoded while the last one is used.

    A batch ends early where the size changes, which it can only if ``preprocessing`` has no size.
    """
    batch: list[np.ndarray] = []
    for pixels in _decoded(_each(images), preprocessing, ahead=batch_size):
        if batch and (len(batch) == batch_size or batch[-1].shape != pixels.shape):
            yield torch.from_numpy(np.stack(batch))
            batch = []
        batch.append(pixels)
    if batch:
        yield torch.from_numpy(np.stack(batch))


def _decoded(pictures: Iterator[Picture], preprocessing: Preprocessing, *, ahead: int) -> Iterator[np.ndarray]:
    with ThreadPoolExecutor(_THREADS) as pool:
        pending: deque[Future[np.ndarray]] = deque()
        try:
            for position, picture in enumerate(pictures):
                pending.append(pool.submit(_to_pixels, picture, position, preprocessing))
                if len(pending) > ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _each(images: Picture | Iterable[Picture]) -> Iterator[Picture]:
    """Pictures one by one, whatever the nesting of one, many, and batches."""
    if isinstance(images, Tensor):
        yield from images if images.ndim == 4 else (images,)
    elif isinstance(images, str | Path | Image.Image | np.ndarray):
        yield images
    elif isinstance(images, Iterable):
        for picture in images:
            if isinstance(picture, Tensor) and picture.ndim == 4:
                yield from picture
            else:
                yield picture
    else:
        raise ConfigError(f"images must be a picture or several; found {type(images).__name__}.")


def _to_pixels(picture: Picture, position: int, preprocessing: Preprocessing) -> np.ndarray:
    if isinstance(picture, str | Path):
        return preprocessing.to_pixels(read_picture(picture))
    if isinstance(picture, Image.Image):
        try:
            return preprocessing.to_pixels(upright(picture))
        except (
            OSError,
            SyntaxError,
            ValueError,
            PictureError,
        ) as error:  # PIL images are decoded late, and may fail then
            raise PictureError(f"picture {position} (a PIL image) cannot be read: {error}") from error
    return preprocessing.to_pixels(Image.fromarray(_as_array(picture, position)))


def _as_array(picture: np.ndarray | Tensor, position: int) -> np.ndarray:
    """A uint8 array, H x W or H x W x 3, as PIL takes it."""
    if isinstance(picture, Tensor):
        kind, wanted = "tensor", "3 x H x W"
        fits = picture.dtype == torch.uint8 and picture.ndim == 3 and picture.shape[0] == 3
    elif isinstance(picture, np.ndarray):
        kind, wanted = "array", "H x W or H x W x 3"
        fits = picture.dtype == np.uint8 and (picture.ndim == 2 or (picture.ndim == 3 and picture.shape[2] == 3))
    else:
        raise ConfigError(
            f"picture {position} must be a path, a PIL image, an array or a tensor; found {type(picture).__name__}."
        )
    if not fits or 0 in picture.shape:
        shape = " x ".join(map(str, picture.shape)) or "a single number"
        raise ConfigError(f"picture {position} must be a uint8 {kind} {wanted}; found {picture.dtype}, {shape}.")
    if isinstance(picture, Tensor):
        return np.ascontiguousarray(picture.permute(1, 2, 0).cpu().numpy())
    return np.ascontiguousarray(picture)
