"""The kinds of image that users pass (files, PIL images, arrays, tensors), as batches of pixels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kedge.errors import ConfigError, ImageError
from kedge.images import Preprocessing, prefetch, read_image, upright

__all__ = ["ImageInput", "pixel_batches", "shape_text"]

ImageInput: TypeAlias = str | Path | Image.Image | np.ndarray | Tensor
"""A file, a PIL image, a uint8 array (H x W or H x W x 3) or a uint8 tensor (3 x H x W, or a batch)."""


def pixel_batches(
    images: ImageInput | Iterable[ImageInput], preprocessing: Preprocessing, batch_size: int
) -> Iterator[Tensor]:
    """Batches of uint8 pixels, B x 3 x H x W, in order; the next one is decoded while the last one is used.

    A batch ends early where the size changes, which it can only if ``preprocessing`` has no size.
    """

    def decode(item: tuple[int, ImageInput]) -> np.ndarray:
        return preprocessing.to_pixels(_to_pil(*item))

    batch: list[np.ndarray] = []
    for pixels in prefetch(decode, enumerate(_each(images)), ahead=batch_size):
        if batch and (len(batch) == batch_size or batch[-1].shape != pixels.shape):
            yield torch.from_numpy(np.stack(batch))
            batch = []
        batch.append(pixels)
    if batch:
        yield torch.from_numpy(np.stack(batch))


def shape_text(shape: Iterable[int]) -> str:
    """A shape as error messages write it."""
    return " x ".join(map(str, shape)) or "a single number"


def _each(images: ImageInput | Iterable[ImageInput]) -> Iterator[ImageInput]:
    """Images one by one, whatever the nesting of one, many, and batches."""
    if isinstance(images, str | Path | Image.Image | np.ndarray | Tensor):
        images = [images]
    elif not isinstance(images, Iterable):
        raise ConfigError(f"images must be an image or several; found {type(images).__name__}.")
    for image in images:
        if isinstance(image, Tensor) and image.ndim == 4:
            yield from image
        else:
            yield image


def _to_pil(position: int, image: ImageInput) -> Image.Image:
    if isinstance(image, str | Path):
        return read_image(image)
    if isinstance(image, Image.Image):
        try:
            return upright(image)
        except (OSError, SyntaxError, ValueError) as error:  # PIL images are decoded late, and may fail then
            raise ImageError(f"image {position} (a PIL image) cannot be read: {error}") from error
    return Image.fromarray(_to_array(position, image))


def _to_array(position: int, image: np.ndarray | Tensor) -> np.ndarray:
    """A uint8 array, H x W or H x W x 3, as PIL takes it."""
    if isinstance(image, Tensor):
        kind, expected = "tensor", "3 x H x W"
        fits = image.dtype == torch.uint8 and image.ndim == 3 and image.shape[0] == 3
    elif isinstance(image, np.ndarray):
        kind, expected = "array", "H x W or H x W x 3"
        fits = image.dtype == np.uint8 and (image.ndim == 2 or (image.ndim == 3 and image.shape[2] == 3))
    else:
        raise ConfigError(
            f"image {position} must be a path, a PIL image, an array or a tensor; found {type(image).__name__}."
        )
    if not fits or 0 in image.shape:
        found = f"{image.dtype}, {shape_text(image.shape)}"
        raise ConfigError(f"image {position} must be a uint8 {kind} {expected}; found {found}.")
    if isinstance(image, Tensor):
        image = image.permute(1, 2, 0).cpu().numpy()
    return np.ascontiguousarray(image)
