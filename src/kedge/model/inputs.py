"""Images of all kinds that users pass (files, PIL images, arrays, tensors, splits), as batches of pixels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kedge.console import stderr
from kedge.errors import ConfigError, ImageError
from kedge.images import Preprocessing, prefetch, read_image, upright

if TYPE_CHECKING:
    from kedge.datasets import ImageSplit

__all__ = ["ImageInput", "embed_split", "pixel_batches", "shape_text"]

ImageInput: TypeAlias = str | Path | Image.Image | np.ndarray | Tensor
"""A file, a PIL image, a uint8 array (H x W or H x W x 3) or a uint8 tensor (3 x H x W, or a batch)."""


def embed_split(
    embed: Callable[[Tensor], Tensor], split: ImageSplit, *, batch_size: int = 256, title: str = "images"
) -> Tensor:
    """What ``embed`` (such as ``Model.embed_pixels``) makes of all images of a split, float32 on its device.

    ``embed`` takes uint8 batches. A terminal sees a progress bar.
    """
    from rich.progress import track

    if batch_size < 1:
        raise ConfigError(f"batch_size is {batch_size}; give at least 1.")
    if len(split) == 0:
        raise ConfigError(f"There are no {title} to embed.")
    batches = np.split(np.arange(len(split)), range(batch_size, len(split), batch_size))
    terminal = stderr()
    progress = track(batches, f"embedding {title}", console=terminal, transient=True, disable=not terminal.is_terminal)
    with torch.inference_mode():
        return torch.cat([embed(split.take(rows)).float() for rows in progress])


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
    if isinstance(images, ImageInput):
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
    if isinstance(image, Tensor):
        kind, fits = "tensor 3 x H x W", image.ndim == 3 and image.shape[0] == 3
    elif isinstance(image, np.ndarray):
        kind, fits = "array H x W or H x W x 3", image.ndim == 2 or (image.ndim == 3 and image.shape[2] == 3)
    else:
        raise ConfigError(
            f"image {position} must be a path, a PIL image, an array or a tensor; found {type(image).__name__}."
        )
    if not fits or image.dtype not in (torch.uint8, np.uint8) or 0 in image.shape:
        found = f"{image.dtype}, {shape_text(image.shape)}"
        raise ConfigError(f"image {position} must be a uint8 {kind}; found {found}.")
    pixels = image.permute(1, 2, 0).cpu().numpy() if isinstance(image, Tensor) else image
    return Image.fromarray(np.ascontiguousarray(pixels))
