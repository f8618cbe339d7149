"""TrivialAugmentWide for whole batches: every image gets one operation of its own.

Nothing is sorted by operation, which would synchronise with the GPU. The batch goes through three steps
instead (take pixels from elsewhere, look levels up in a table, blend with another image), each of which leaves
an image as it is where its operation asks for nothing; one operation asks for something in one step only.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["BINS", "OPERATIONS", "choose", "from_center", "gather_pixels", "grayscale", "trivial_augment"]

BINS = 31
"""How many magnitudes an operation has."""
_NUDGE = 1e-4

OPERATIONS = (
    *("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"),
    *("Brightness", "Contrast", "Posterize", "Solarize", "AutoContrast", "Equalize", "Color", "Sharpness"),
)
# The parameters of the three steps, and the value of each that leaves an image as it is.
_NEUTRAL = {
    **{"cos": 1.0, "sin": 0.0, "shear_x": 0.0, "shear_y": 0.0, "shift_x": 0.0, "shift_y": 0.0},
    "factor": 1.0,  # levels are multiplied with this,
    "mean": 0.0,  # and so much of the mean grey is added
    "step": 1.0,  # levels are rounded down to a multiple of this
    "threshold": 256.0,  # levels from here on are inverted
    "stretch": 0.0,  # 1: the levels found are spread over all
    "equalize": 0.0,  # 1: so that all are about equally frequent
    "color": 1.0,  # pixels are multiplied with this,
    "grey": 0.0,  # and so much of the grey image is added
    "blur": 0.0,  # so much of the difference to the blurred image is added
}
_PER_STEP = (6, 6, 3)


def choose(draws: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Operation, magnitude bin and sign of every image, from three rows of uniform numbers."""
    return (draws[0] * len(OPERATIONS)).long(), (draws[1] * BINS).long(), draws[2] < 0.5


def trivial_augment(images: Tensor, operations: Tensor, bins: Tensor, negative: Tensor) -> Tensor:
    """Change uint8 images, image i by OPERATIONS[operations[i]] with the magnitude of bins[i].

    ``negative`` turns the magnitude's sign, for the operations that have one.
    """
    params = _choices(images.device)[(operations * BINS + bins) * 2 + negative]
    move, level, blend = params.split(_PER_STEP, dim=1)
    return _blend(_look_up(_move(images, move), level), blend)


def _move(images: Tensor, params: Tensor) -> Tensor:
    """Shear about the corner, rotate about the centre, or shift: each pixel is the nearest one, zero outside."""
    height, width = images.shape[-2:]
    x, y = from_center(images)
    cos, sin, shear_x, shear_y, shift_x, shift_y = params.T[:, :, None, None]
    from_x = cos * x + sin * y + shear_x * (y + height / 2) - shift_x
    from_y = cos * y - sin * x + shear_y * (x + width / 2) - shift_y
    # One pixel of zeros around the image stands for all that lies outside. Half way between two pixels (a diagonal
    # of a square turned by 45 degrees, say) the nudge decides, and not how the device rounds.
    rows = (from_y + (height / 2 + 1 + _NUDGE)).clamp_(0, height + 1).long()
    columns = (from_x + (width / 2 + 1 + _NUDGE)).clamp_(0, width + 1).long()
    return gather_pixels(images, rows, columns, padding=1)


def _look_up(images: Tensor, params: Tensor) -> Tensor:
    """All that maps a level of a channel to another: a table of 256 levels for each, then one look-up."""
    factor, mean_share, step, threshold, stretch, equalize = params.T[:, :, None, None]
    levels = torch.arange(256, device=images.device, dtype=torch.float32)
    places = images.flatten(2).long()
    mean = grayscale(images).floor_().mean(dim=(-2, -1))[..., None]
    table = torch.addcmul(levels * factor, mean, mean_share).clamp_(0, 255)
    table = (table / step).floor_() * step
    table = torch.where(table >= threshold, 255 - table, table)
    table = torch.where(stretch > 0, _stretched(images, levels), table)
    table = torch.where(equalize > 0, _equalized(places, levels), table)
    return table.to(torch.uint8).gather(2, places).view_as(images)


def _stretched(images: Tensor, levels: Tensor) -> Tensor:
    """The table that spreads every channel over all levels."""
    low, high = (end.float()[..., None] for end in torch.aminmax(images.flatten(2), dim=2))
    spread = (levels - low) / ((high - low) * (1 / 255))
    return torch.where(high > low, spread.clamp_(0, 255), levels).floor_()


def _equalized(places: Tensor, levels: Tensor) -> Tensor:
    """The table that makes all levels of a channel about equally frequent, in Pillow's whole numbers."""
    counts = torch.zeros(*places.shape[:2], 256, dtype=torch.int32, device=places.device)
    counts = counts.scatter_add_(2, places, torch.ones_like(counts[:, :, :1]).expand_as(places))
    below = counts.cumsum(dim=2, dtype=torch.int32) - counts
    brightest = counts.gather(2, places.amax(dim=2, keepdim=True))
    step = (places.shape[2] - brightest) // 255
    table = ((below + step // 2) // step.clamp(min=1)).clamp_(0, 255)
    return torch.where(step > 0, table, levels)


def _blend(images: Tensor, params: Tensor) -> Tensor:
    """Towards the grey image or away from it, or the blurred one."""
    color, grey_share, blur_share = params.T[:, :, None, None, None]
    pixels = images.float()
    blended = torch.addcmul(pixels * color, grayscale(pixels).floor_(), grey_share)
    if min(images.shape[-2:]) >= 3:  # the edge is not blurred: nothing is left of a smaller image
        inner = pixels[..., 1:-1, 1:-1]
        # The mean of a pixel, counted five times, and its eight neighbours; sums of whole numbers are exact.
        rows = (pixels[..., :-2, :] + pixels[..., 1:-1, :]).add_(pixels[..., 2:, :])
        square = (rows[..., :-2] + rows[..., 1:-1]).add_(rows[..., 2:])
        blurred = square.add_(inner, alpha=4).div_(13).round_()
        blended[..., 1:-1, 1:-1].addcmul_(blurred.sub_(inner), blur_share)
    return blended.clamp_(0, 255).to(torch.uint8)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _choices(device: torch.device) -> Tensor:
    """`_table`, which torch.compile takes as it is: tracing it would take half a minute."""
    return _table(device)


@cache
def _table(device: torch.device) -> Tensor:
    """The parameters of every operation, bin and sign: a row of values for each."""
    rows = [_NEUTRAL | _parameters(name, bin_, sign) for name in OPERATIONS for bin_ in range(BINS) for sign in (1, -1)]
    return torch.tensor([list(row.values()) for row in rows]).to(device, non_blocking=True)


def _parameters(name: str, bin_: int, sign: int) -> dict[str, float]:
    """What one operation, bin and sign asks for beyond the neutral; magnitudes as in torchvision."""
    largest = {"TranslateX": 32.0, "TranslateY": 32.0, "Rotate": 135.0}.get(name, 0.99)
    magnitude = sign * torch.linspace(0, largest, BINS)[bin_].item()
    turn = math.radians(magnitude)
    return {
        "ShearX": {"shear_x": magnitude},
        "ShearY": {"shear_y": magnitude},
        "TranslateX": {"shift_x": float(int(magnitude))},
        "TranslateY": {"shift_y": float(int(magnitude))},
        "Rotate": {"cos": math.cos(turn), "sin": -math.sin(turn)},  # anticlockwise
        "Brightness": {"factor": 1 + magnitude},
        "Contrast": {"factor": 1 + magnitude, "mean": -magnitude},
        "Posterize": {"step": 2.0 ** round(6 * bin_ / (BINS - 1))},
        "Solarize": {"threshold": 255 * torch.linspace(1, 0, BINS)[bin_].item()},
        "AutoContrast": {"stretch": 1.0},
        "Equalize": {"equalize": 1.0},
        "Color": {"color": 1 + magnitude, "grey": -magnitude},
        "Sharpness": {"blur": -magnitude},
    }.get(name, {})


def gather_pixels(images: Tensor, rows: Tensor, columns: Tensor, padding: int) -> Tensor:
    """Image i's pixels at rows[i] and columns[i], which broadcast to H x W, once it is padded with zeros."""
    images = F.pad(images, (padding, padding, padding, padding))
    count, channels, _, width = images.shape
    positions = rows * width + columns
    index = positions.flatten(1)[:, None].expand(count, channels, -1)
    return images.flatten(2).gather(2, index).view(count, channels, *positions.shape[1:])


def from_center(images: Tensor) -> tuple[Tensor, Tensor]:
    """The columns (W) and rows (H x 1) of the pixels, counted from the centre of the image."""
    y, x = (
        torch.arange(side, device=images.device, dtype=torch.float32) - (side - 1) / 2 for side in images.shape[-2:]
    )
    return x, y[:, None]


def grayscale(images: Tensor) -> Tensor:
    """How bright each pixel looks, as one channel of floats."""
    red, green, blue = images.unbind(dim=1)
    return (0.2989 * red).add_(green, alpha=0.587).add_(blue, alpha=0.114)[:, None]
