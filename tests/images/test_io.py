from __future__ import annotations

import io
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kedge.errors import ImageError
from kedge.images import read_image, to_rgb


def gradient(height: int = 20, width: int = 30) -> np.ndarray:
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows * 5, columns * 4, 255 - rows - columns], axis=-1).astype(np.uint8)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


@pytest.mark.parametrize("make", [str, Path, lambda p: p.read_bytes(), lambda p: io.BytesIO(p.read_bytes())])
def test_reads_paths_bytes_and_streams(tmp_path: Path, make) -> None:
    path = tmp_path / "ein Bild mit Wörtern 画像.png"
    Image.fromarray(gradient()).save(path)
    image = read_image(make(path))
    assert image.mode == "RGB"
    assert np.array_equal(np.asarray(image), gradient())


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation: int) -> None:
    pixels = gradient()
    # How a camera in that position stores the upright picture, by the EXIF standard.
    store = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a),
        7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
        8: lambda a: np.rot90(a, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(np.ascontiguousarray(store(pixels))), "PNG", exif=exif.tobytes())
    assert np.array_equal(np.asarray(read_image(data)), pixels)


def test_broken_exif_is_no_reason_to_refuse_the_pixels() -> None:
    data = encoded(Image.fromarray(gradient()), "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff" + b"\xff" * 40)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_image(data).size == (30, 20)


def test_transparency_lies_on_white() -> None:
    rgba = np.zeros((4, 4, 4), np.uint8)
    rgba[:2] = (10, 20, 30, 255)
    rgba[2] = (200, 0, 0, 0)
    rgba[3] = (0, 0, 0, 51)  # a fifth of black on white
    expected = [[10, 20, 30], [10, 20, 30], [255, 255, 255], [204, 204, 204]]
    for kind in ("PNG", "TIFF"):
        assert np.asarray(read_image(encoded(Image.fromarray(rgba), kind)))[:, 0].tolist() == expected
    grey = read_image(encoded(Image.fromarray(rgba).convert("LA"), "PNG"))
    assert np.asarray(grey)[2, 0].tolist() == [255, 255, 255]


def test_palette_with_transparency_lies_on_white() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putdata([0, 1])
    for kind in ("PNG", "GIF"):
        pixels = np.asarray(read_image(encoded(image, kind, transparency=1)))
        assert pixels[0].tolist() == [[255, 0, 0], [255, 255, 255]]
    some = np.asarray(read_image(encoded(image, "PNG", transparency=b"\xff\x00")))
    assert some[0].tolist() == [[255, 0, 0], [255, 255, 255]]


def test_opaque_modes_as_pillow_converts_them() -> None:
    rgb = Image.fromarray(gradient())
    for mode, kind in {"L": "PNG", "1": "PNG", "P": "PNG", "CMYK": "TIFF", "YCbCr": "TIFF"}.items():
        image = rgb.convert(mode)
        assert np.array_equal(np.asarray(read_image(encoded(image, kind))), np.asarray(image.convert("RGB")))
    cmyk = np.asarray(read_image(encoded(rgb.convert("CMYK"), "JPEG", quality=95))).astype(int)
    assert abs(cmyk - gradient()).mean() < 6


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_keep_their_high_byte(kind: str) -> None:
    values = (np.arange(256, dtype=np.uint16) * 257).reshape(16, 16)
    pixels = np.asarray(read_image(encoded(Image.fromarray(values), kind)))
    assert np.array_equal(pixels[..., 0], np.arange(256).reshape(16, 16))
    assert np.array_equal(pixels[..., 0], pixels[..., 2])


def test_wide_integers_and_floats() -> None:
    wide = Image.fromarray(np.array([[0, 256, 65535, 70000, -5]], np.int32))
    assert np.asarray(to_rgb(wide))[0, :, 0].tolist() == [0, 1, 255, 255, 0]
    narrow = Image.fromarray(np.array([[0, 7, 255]], np.int32))
    assert np.asarray(to_rgb(narrow))[0, :, 0].tolist() == [0, 7, 255]
    fractions = Image.fromarray(np.array([[0, 0.2, 1, np.nan, -np.inf]], np.float32))
    assert np.asarray(to_rgb(fractions))[0, :, 0].tolist() == [0, 51, 255, 0, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        below = Image.fromarray(np.array([[-3e38, 0.2]], np.float32))
        assert np.asarray(to_rgb(below))[0, :, 0].tolist() == [0, 51]
    values = Image.fromarray(np.array([[0, 99.6, np.inf]], np.float32))
    assert np.asarray(to_rgb(values))[0, :, 0].tolist() == [0, 100, 255]


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_animations_give_their_first_frame(kind: str) -> None:
    frames = [Image.new("RGB", (8, 6), colour) for colour in ("red", "blue")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert np.asarray(read_image(data))[0, 0].tolist() == [255, 0, 0]
    later = Image.open(io.BytesIO(data))
    later.seek(1)
    assert np.asarray(to_rgb(later))[0, 0].tolist() == [255, 0, 0]


def test_bad_files_are_named_with_the_reason(tmp_path: Path) -> None:
    whole = encoded(Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)), "JPEG")
    contents = {
        "empty.jpg": (b"", "empty"),
        "text.jpg": (b"certainly not a picture", "not an image"),
        "cut off.jpg": (whole[: len(whole) // 2], "truncated"),
        "cut off.png": (encoded(Image.fromarray(gradient()), "PNG")[:-60], "cannot be read"),
        "script.eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
    }
    for name, (content, why) in contents.items():
        (tmp_path / name).write_bytes(content)
        for source in (tmp_path / name, content):
            with pytest.raises(ImageError, match=why) as caught:
                read_image(source)
            assert isinstance(source, bytes) or name in str(caught.value)
    with pytest.raises(ImageError, match=r"absent\.jpg cannot be read: there is no such file"):
        read_image(tmp_path / "absent.jpg")
    with pytest.raises(ImageError, match="it is a folder"):
        read_image(tmp_path)


def test_damaged_bytes_raise_nothing_but_picture_errors() -> None:
    generator = np.random.default_rng(0)
    image = Image.fromarray(generator.integers(0, 255, (24, 24, 3), np.uint8))
    for kind in ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP", "PPM"):
        data = np.frombuffer(encoded(image, kind), np.uint8)
        for _ in range(40):
            damaged = data.copy()
            damaged[generator.integers(0, len(data), 8)] = generator.integers(0, 256, 8)
            with suppress(ImageError):
                assert read_image(damaged.tobytes()).mode == "RGB"


def test_a_link_to_itself_is_named(tmp_path: Path) -> None:
    (tmp_path / "loop.jpg").symlink_to("loop.jpg")
    with pytest.raises(ImageError, match=r"loop\.jpg cannot be read: .*symbolic links"):
        read_image(tmp_path / "loop.jpg")


def test_icons_are_refused_undecoded() -> None:
    with pytest.raises(ImageError, match="not an image of a known format"):
        read_image(encoded(Image.fromarray(gradient()), "ICO", sizes=[(16, 16)]))


def test_pixel_limit_is_checked_before_decoding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "large.png"
    Image.new("RGB", (100, 50)).save(path)
    assert read_image(path, max_pixels=5000).size == (100, 50)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda *_: pytest.fail("decoded"))
    with pytest.raises(
        ImageError, match=r"large\.png cannot be read: it has 100 x 50 pixels, more than the limit of 4,999"
    ):
        read_image(path, max_pixels=4999)


def test_no_warnings_and_the_users_filters_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(Image.new("RGB", (100, 50)), "PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = list(warnings.filters)
        with ThreadPoolExecutor(8) as pool:
            assert all(image.size == (100, 50) for image in pool.map(read_image, [data] * 64))
        assert list(warnings.filters) == before
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2000)
    with pytest.raises(ImageError, match="Pillow's own limit"):
        read_image(data)


def test_modes_that_pillow_cannot_convert_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("conversion not supported")

    data = encoded(Image.new("L", (2, 2)), "PNG")
    monkeypatch.setattr(Image.Image, "convert", refuse)
    with pytest.raises(ImageError, match="The image cannot be read: mode L cannot be turned into RGB"):
        read_image(data)
