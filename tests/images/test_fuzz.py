"""Whatever the bytes, ``read_image`` gives an RGB image or one ImageError, soon, quietly and in little memory.

The cases are numbered, and a number always gives the same bytes (under one version of Pillow, which writes the
pictures that are damaged). They are read in a child process, which a crash, a hang or a bomb may take down;
``python tests/images/test_fuzz.py 1234`` reads case 1234 alone, with the name of what was damaged.
"""

from __future__ import annotations

import faulthandler
import io
import os
import random
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, features

from kedge.errors import ImageError
from kedge.images import EXTENSIONS, MAX_PIXELS, read_image

PATIENCE = 20  # seconds for one case
MEMORY = 4096  # MiB for all cases, beyond what Python and its libraries take before the first
HUGE = 1_000_000  # from this number on, the pictures of the corpus, each said to have 30,000 x 30,000 pixels

SIDES = (0, 1, 255, 256, 9_999, 10_000, 10_001, 16_383, 30_000, 65_535, 99_999_999, 2**24, 2**31 - 1, 2**32 - 1)


def saved(mode: str, kind: str, more: bool = False, **options: object) -> bytes:
    rows, columns = np.mgrid[:18, :24]
    pixels = np.stack([rows * 14, columns * 10, (rows * columns) % 256, 255 - rows], axis=-1).astype(np.uint8)
    image = Image.fromarray(pixels)
    if mode == "I;16":
        image = Image.fromarray(rows.astype(np.uint16) * 3000)
    else:
        image = image.convert("RGB").convert(mode) if mode not in ("RGBA", "LA") else image.convert(mode)
    if more:
        options |= {"save_all": True, "append_images": [Image.new("RGB", image.size, c) for c in ("red", "blue")]}
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def png(pixels: np.ndarray, colour_type: int, interlaced: bool) -> bytes:
    """What Pillow does not write: Adam7, and 16 bits per channel of colour."""
    height, width = pixels.shape[:2]
    adam7 = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)]
    passes = [pixels[y::dy, x::dx] for y, x, dy, dx in (adam7 if interlaced else [(0, 0, 1, 1)])]
    rows = b"".join(b"\0" + row.tobytes() for part in passes for row in part)
    header = struct.pack(">IIBBBBB", width, height, 8 * pixels.itemsize, colour_type, 0, 0, interlaced)
    chunks = {b"IHDR": header, b"IDAT": zlib.compress(rows), b"IEND": b""}
    blank = b"".join(struct.pack(">I", len(body)) + name + body + bytes(4) for name, body in chunks.items())
    return with_checksums(b"\x89PNG\r\n\x1a\n" + blank)


@cache
def corpus() -> dict[str, bytes]:
    """A whole picture of every kind, named by its extension."""
    exif = Image.Exif()
    exif.update({0x0112: 6, 0x010F: "Maker", 0x0132: "2024:01:01 00:00:00"})
    turned = {"exif": exif.tobytes()}
    colour16 = np.arange(18 * 24 * 3, dtype=">u2").reshape(18, 24, 3) * 50
    pictures = {
        "baseline.jpg": saved("RGB", "JPEG"),
        "progressive.jpeg": saved("RGB", "JPEG", progressive=True),
        "cmyk.jpe": saved("CMYK", "JPEG"),
        "exif.jfif": saved("RGB", "JPEG", **turned),
        "several.jpg": saved("RGB", "MPO", more=True),
        "colour.png": saved("RGB", "PNG", icc_profile=b"profile" * 20, **turned),
        "alpha.png": saved("RGBA", "PNG"),
        "grey16.png": saved("I;16", "PNG"),
        "colour16.png": png(colour16, colour_type=2, interlaced=False),
        "interlaced.png": png(colour16.astype(np.uint8), colour_type=2, interlaced=True),
        "palette.png": saved("P", "PNG", transparency=bytes(range(0, 250, 50))),
        "animated.png": saved("RGB", "PNG", more=True),
        "still.gif": saved("P", "GIF", transparency=3),
        "animated.gif": saved("P", "GIF", duration=40, loop=0, disposal=2, more=True),
        "plain.bmp": saved("RGB", "BMP"),
        "alpha.bmp": saved("RGBA", "BMP"),
        "palette.bmp": saved("P", "BMP"),
        "binary.ppm": saved("RGB", "PPM"),
        "text.ppm": b"P3\n# in digits\n3 2\n255\n" + b" ".join(b"%d" % (14 * n) for n in range(18)),
        "grey16.pgm": saved("I;16", "PPM"),
        "bits.pbm": saved("1", "PPM"),
        "floats.pnm": saved("F", "PPM"),
        "raw.tga": saved("RGBA", "TGA"),
        "runs.tga": saved("P", "TGA", compression="tga_rle"),
        "raw.tif": saved("RGB", "TIFF"),
        "floats.tif": saved("F", "TIFF"),
        "grey16.tif": saved("I;16", "TIFF", compression="tiff_lzw"),
        "cmyk.tif": saved("CMYK", "TIFF", compression="tiff_deflate"),
        "big.tif": saved("RGBA", "TIFF", big_tiff=True),
        "pages.tif": saved("RGB", "TIFF", compression="packbits", more=True),
        "strips.tif": saved("RGB", "TIFF", compression="tiff_lzw", strip_size=256, **turned),
        "jpeg.tiff": saved("RGB", "TIFF", compression="jpeg"),
        "group3.tiff": saved("1", "TIFF", compression="group3"),
        "group4.tiff": saved("1", "TIFF", compression="group4"),
    }
    if features.check("webp"):
        pictures["lossy.webp"] = saved("RGB", "WEBP", **turned)
        pictures["lossless.webp"] = saved("RGBA", "WEBP", lossless=True)
        pictures["animated.webp"] = saved("RGB", "WEBP", more=True)
    if features.check("jpg_2000"):
        pictures["box.jp2"] = saved("RGBA", "JPEG2000")
        pictures["tiles.jp2"] = saved("RGB", "JPEG2000", tile_size=(8, 8), irreversible=True)
        pictures["stream.jp2"] = saved("L", "JPEG2000", no_jp2=True)
    if features.check("avif"):
        pictures["alpha.avif"] = saved("RGBA", "AVIF", speed=10, **turned)
        pictures["animated.avif"] = saved("RGB", "AVIF", speed=10, more=True)
    return pictures


def with_checksums(data: bytes) -> bytes:
    """A PNG whose chunks check out again, as far as they can be followed; anything else as it is."""
    result = bytearray(data)
    start = 8 if data.startswith(b"\x89PNG") else len(data)
    while start + 12 <= len(data):
        end = start + 8 + int.from_bytes(data[start : start + 4], "big")
        if end + 4 > len(data):
            break
        result[end : end + 4] = zlib.crc32(data[start + 4 : end]).to_bytes(4, "big")
        start = end + 4
    return bytes(result)


def with_size(name: str, data: bytes, width: int, height: int) -> bytes:
    """The picture with another size in its header, as far as the fields there can hold it."""
    result = bytearray(data)

    def put(offset: int, *values: int, size: int, order: str = "big") -> None:
        for position, value in enumerate(values):
            field = (value % 256**size).to_bytes(size, order)
            result[offset + position * size : offset + (position + 1) * size] = field

    kind = name.rpartition(".")[2]
    if kind == "png":
        put(16, width, height, size=4)
        return with_checksums(bytes(result))
    if kind in ("jpg", "jpeg", "jpe", "jfif") and (frame := re.search(rb"\xff[\xc0\xc2]\0.\x08", data, re.DOTALL)):
        put(frame.end(), height, width, size=2)
    elif kind == "gif":
        put(6, width, height, size=2, order="little")
        if (frame := re.search(rb"\x2c\0\0\0\0", data)) and width % 2:
            put(frame.end(), width, height, size=2, order="little")
    elif kind == "bmp":
        put(18, width, height, size=4, order="little")
    elif kind == "tga":
        put(12, width, height, size=2, order="little")
    elif kind in ("ppm", "pgm", "pbm", "pnm"):
        return re.sub(rb"\d+\s\d+\s", b"%d %d\n" % (width, height), data, count=1)
    elif kind in ("tif", "tiff"):
        for tag, value in ((b"\0\1", width), (b"\1\1", height)):
            if entry := re.search(tag + b"[\3\4]\0\1\0{3}", data):
                put(entry.start() + 2, 4, size=2, order="little")
                put(entry.end(), value, size=4, order="little")
    elif kind == "webp":
        if (found := data.find(b"VP8X")) >= 0:
            put(found + 12, max(width - 1, 0), max(height - 1, 0), size=3, order="little")
        if (found := data.find(b"\x9d\x01\x2a")) >= 0:
            put(found + 3, width % 2**14, height % 2**14, size=2, order="little")
        elif (found := data.find(b"VP8L")) >= 0:
            bits = int.from_bytes(data[found + 9 : found + 13], "little") >> 28 << 28
            put(found + 9, bits | max(width - 1, 0) % 2**14 | max(height - 1, 0) % 2**14 << 14, size=4, order="little")
    elif kind == "jp2":
        if (found := data.find(b"ihdr")) >= 0:
            put(found + 4, height, width, size=4)
        put(data.find(b"\xff\x4f\xff\x51") + 8, width, height, size=4)
        if width % 2:  # one tile for all of it
            put(data.find(b"\xff\x4f\xff\x51") + 24, width, height, size=4)
    elif kind == "avif":
        for found in re.finditer(b"ispe", data):
            put(found.end() + 4, width, height, size=4)
    return bytes(result)


def damaged(draw: random.Random, data: bytes) -> bytes:
    """One wound: bits flipped, bytes overwritten, deleted, doubled or cut off, or spliced with another picture."""
    start = draw.randrange(min(len(data), 200) if draw.random() < 0.5 else len(data)) if data else 0
    end = min(start + draw.choice((1, 2, 4, 16, 200)), len(data))
    extreme = draw.choice((0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 30_000, 100_000_000))
    match draw.randrange(8):
        case 0 | 1:
            bits = bytearray(data)
            for _ in range(draw.choice((1, 1, 4, 30)) if bits else 0):
                bits[draw.randrange(len(bits))] ^= 1 << draw.randrange(8)
            return bytes(bits)
        case 2:
            return data[:start] + draw.randbytes(end - start) + data[end:]
        case 3:
            field = extreme.to_bytes(4, draw.choice(("little", "big")))
            field = field.strip(b"\0") if draw.random() < 0.5 else field
            return data[:start] + field + data[start + len(field) :]
        case 4:
            return data[:start] + data[end:]
        case 5:
            return data[:start] + data[start:end] * draw.choice((2, 3, 1000)) + data[end:]
        case 6:
            return data[: draw.randrange(len(data) + 1)]
        case _:
            other = draw.choice(list(corpus().values()))
            return data[:start] + other[draw.randrange(len(other)) :]


def case(number: int) -> tuple[str, bytes, int]:
    """What was damaged, the bytes, and the limit of pixels they are read under."""
    if number >= HUGE:
        name = list(corpus())[number - HUGE]
        return name, with_size(name, corpus()[name], 30_000, 30_000), MAX_PIXELS
    draw = random.Random(f"kedge {number}")
    limit = draw.choice((MAX_PIXELS, MAX_PIXELS, 18 * 24, 1000))
    if draw.random() < 0.05:
        return "random bytes", draw.randbytes(draw.choice((0, 1, 10, 100, 5000))), limit
    name = draw.choice(list(corpus()))
    data = corpus()[name]
    resized = draw.random() < 0.2
    if resized:
        data = with_size(name, data, draw.choice(SIDES), draw.choice(SIDES))
    for _ in range(draw.choice((0, 0, 1)) if resized else draw.choice((1, 1, 2, 4))):
        data = damaged(draw, data)
    if draw.random() < 0.5:
        data = with_checksums(data)
    return name, data, limit


def fault(data: bytes, limit: int, read: Callable[..., object] = read_image) -> str | None:
    """Why the way these bytes were read cannot stand."""
    # Of Python's standard error: libtiff writes its own lines past it, and Pillow has no switch for them.
    with warnings.catch_warnings(record=True) as heard, redirect_stderr(io.StringIO()) as spoken:
        warnings.simplefilter("always")
        try:
            image = read(data, max_pixels=limit)
        except ImageError as error:
            text = str(error)
            if not re.fullmatch(r"The image cannot be read: [^\n]{3,300}\.", text) or "memory" in text.lower():
                return f"no good sentence: {text!r}"
        except BaseException as error:
            return f"raised {error!r}"
        else:
            if not isinstance(image, Image.Image) or image.mode != "RGB":
                return f"gave {image!r}"
            if not 0 < image.width * image.height <= limit:
                return f"gave {image!r} under a limit of {limit} pixels"
            image.load()
    if heard:
        return f"warned {heard[0].message!r}"
    return f"wrote {spoken.getvalue()!r} to standard error" if spoken.getvalue() else None


def allow_memory(mebibytes: int) -> None:
    try:
        import resource

        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):
        return  # only Linux tells, or keeps to it
    resource.setrlimit(resource.RLIMIT_AS, (taken + mebibytes * 2**20, resource.RLIM_INFINITY))


def read_cases(first: int, last: int, memory: int, patience: float) -> None:
    """The child: says the number of a case before it reads it, and after it what was wrong."""
    faulthandler.enable()
    faulthandler.register(signal.SIGALRM, chain=True)  # a watching thread would want memory of its own
    corpus()
    read_image(corpus()["baseline.jpg"])
    allow_memory(memory)
    for number in range(first, last):
        print(number, flush=True)
        signal.setitimer(signal.ITIMER_REAL, patience)
        name, data, limit = case(number) if number >= 0 else ("a bad reader", b"", 1)
        read = BAD_READERS.get(number, read_image)
        found = fault(data, limit, read)
        if found and "memory" in found.lower():
            # Pillow also calls it a MemoryError when it cannot count a size: then ever more memory changes nothing.
            allow_memory(16 * memory)
            found = None if fault(data, limit, read) == found else found
            allow_memory(memory)
        if found:
            print(number, name, found, flush=True)
    signal.setitimer(signal.ITIMER_REAL, 0)


def faults(first: int, last: int, memory: int = MEMORY, patience: float = PATIENCE) -> list[str]:
    """The parent: everything that was wrong with these cases, crashes and hangs of the child among it."""
    found: list[str] = []
    while first < last:
        command = [sys.executable, __file__, *map(str, (first, last, memory, patience))]
        with tempfile.TemporaryFile() as errors:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, check=False)
            errors.seek(0)
            spoken = errors.read().decode(errors="replace")
        lines = done.stdout.splitlines()
        found += [line for line in lines if " " in line]
        reached = [int(line) for line in lines if " " not in line]
        if done.returncode == 0:
            return found
        if not reached:
            raise RuntimeError(f"The child did not start: {spoken}")
        found.append(f"{reached[-1]} ended the process ({done.returncode}): {spoken[-2000:]}")
        first = reached[-1] + 1
    return found


BAD_READERS: dict[int, Callable[..., object]] = {
    -7: lambda *_, **__: time.sleep(60),
    -6: lambda *_, **__: os.abort(),
    -5: lambda *_, **__: np.zeros(2**33, np.uint8),
    -4: lambda *_, **__: Image.new("L", (1, 1)),
    -3: lambda *_, **__: Image.new("RGB", (2, 1)),
    -2: lambda *_, **__: warnings.warn("a word", stacklevel=1) or Image.new("RGB", (1, 1)),
    -1: lambda *_, **__: print("a word", file=sys.stderr) or Image.new("RGB", (1, 1)),
}


def test_the_watch_sees_what_it_watches_for() -> None:
    found = faults(min(BAD_READERS), 0, patience=1)
    hung = f"({-signal.SIGALRM})"
    expected = [hung, "Abort", "MemoryError", "mode=L", "under a limit of 1 pixels", "warned", "standard error"]
    assert len(found) == len(expected)
    for line, (number, word) in zip(found, zip(BAD_READERS, expected, strict=True), strict=True):
        assert line.startswith(f"{number} ")
        assert word in line


def test_every_kind_of_picture_is_among_those_damaged() -> None:
    optional = {".avif": "avif", ".webp": "webp", ".jp2": "jpg_2000"}
    expected = {extension for extension in EXTENSIONS if features.check(optional.get(extension, "jpg"))}
    assert {Path(name).suffix for name in corpus()} == expected
    for name, data in corpus().items():
        assert fault(data, MAX_PIXELS) is None, name
        assert read_image(data).size in {(24, 18), (18, 24), (3, 2)}, name


def test_500_damaged_pictures() -> None:
    assert faults(0, 500) == []


def test_sizes_of_30_000_by_30_000_pixels_take_little_memory() -> None:
    assert faults(HUGE, HUGE + len(corpus()), memory=64) == []


def test_a_picture_of_30_000_by_30_000_pixels_is_refused_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.broadcast_to(np.uint8(0), (30_000, 30_000 // 8))
    data = bytearray(png(rows, colour_type=0, interlaced=False))
    data[16:25] = struct.pack(">IIB", 30_000, 30_000, 1)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda *_: pytest.fail("decoded"))
    with pytest.raises(ImageError, match="it has more pixels than Pillow's own limit allows"):
        read_image(with_checksums(bytes(data)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    with pytest.raises(ImageError, match="it has 30000 x 30000 pixels, more than the limit of 100,000,000"):
        read_image(with_checksums(bytes(data)))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_10_000_damaged_pictures() -> None:
    assert faults(0, 10_000) == []


if __name__ == "__main__":
    if len(sys.argv) == 2:
        number = int(sys.argv[1])
        name, data, limit = case(number)
        print(f"Case {number}: {name}, {len(data)} bytes, at most {limit} pixels")
        print(read_image(data, max_pixels=limit))
    else:
        read_cases(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
