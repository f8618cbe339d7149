from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image
from scipy.fft import dctn

from kedge.images.phash import BITS, perceptual_hash


def photo(seed: int) -> Image.Image:
    """Soft blobs of colour, as photos have at a small scale, and some grain."""
    chance = np.random.default_rng(seed)
    coarse = Image.fromarray(chance.integers(0, 255, (9, 9, 3), dtype=np.uint8))
    pixels = np.asarray(coarse.resize((300, 220), Image.Resampling.BICUBIC), float) + chance.normal(0, 6, (220, 300, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def bits_apart(first: Image.Image, second: Image.Image) -> int:
    return (perceptual_hash(first) ^ perceptual_hash(second)).bit_count()


def recompressed(image: Image.Image, quality: int) -> Image.Image:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=quality)
    return Image.open(stream)


def test_the_bits_are_low_frequencies_above_their_median() -> None:
    for seed in range(5):
        small = photo(seed).resize((32, 32))  # nothing is left to resize
        frequencies = dctn(np.asarray(small.convert("L"), float), type=2)[:8, :8].ravel()[1:]
        expected = frequencies > np.median(frequencies)
        found = perceptual_hash(small)
        assert 0 <= found < 1 << BITS
        assert [bool(found >> (BITS - 1 - bit) & 1) for bit in range(BITS)] == expected.tolist()


@pytest.mark.parametrize("seed", range(8))
def test_copies_are_near_and_other_images_far(seed: int) -> None:
    original = photo(seed)
    assert bits_apart(original, original.resize((150, 110), Image.Resampling.LANCZOS)) <= 4
    assert bits_apart(original, original.resize((512, 375), Image.Resampling.BICUBIC)) <= 4
    assert bits_apart(original, recompressed(original, 40)) <= 4
    assert all(bits_apart(original, photo(other)) >= 12 for other in range(8) if other != seed)


def test_an_image_without_a_pattern() -> None:
    assert perceptual_hash(Image.new("RGB", (50, 40), (7, 9, 200))) == 0
