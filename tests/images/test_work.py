"""What a picture may cost is bounded before it is decoded: scans, frames, pixels, memory."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.TiffImagePlugin import TiffImageFile

from kedge.errors import ImageError
from kedge.images import MAX_PIXELS, read_image


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def with_scans(side: int, scans: int, between: bytes = b"") -> bytes:
    """A progressive JPEG whose last scan, which refines nothing, is there so many times."""
    whole = encoded(Image.new("L", (side, side), 90), "JPEG", progressive=True)
    last, end = whole.rindex(b"\xff\xda"), whole.rindex(b"\xff\xd9")
    return whole[:last] + (between + whole[last:end]) * scans + whole[end:]


def must_not_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda *_: pytest.fail("decoded"))


@pytest.mark.parametrize(
    "between",
    [b"", b"\xff\xfe\x00\x06\xff\xd9\xff\xd9", b"\xff\xff\xff"],
    ids=["plain", "an end in a comment", "filled"],
)
def test_a_jpeg_of_very_many_scans_is_refused_undecoded(between: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = with_scans(7000, 2000, between)
    assert len(bomb) < 1_000_000
    must_not_decode(monkeypatch)
    with pytest.raises(ImageError, match=r"it has 2,00\d scans of 7000 x 7000 pixels, which is too much to decode"):
        read_image(bomb)


def test_the_bomb_is_a_picture() -> None:
    assert read_image(with_scans(70, 2000, b"\xff\xfe\x00\x06\xff\xd9\xff\xd9")).size == (70, 70)


def test_what_follows_a_jpeg_or_stands_in_its_segments_is_no_scan() -> None:
    """Telephones put films behind their pictures, and previews into segments."""
    whole = encoded(Image.new("RGB", (4000, 3000), "red"), "JPEG", progressive=True)
    segment = b"\xff\xe5\xff\xff" + (b"\xff\xda\x00" * 22_000)[:65_533]
    assert read_image(whole[:2] + segment + whole[2:] + b"\xff\xda\x00\x08" * 100_000).size == (4000, 3000)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "TGA", "TIFF", "BMP"])
def test_few_bytes_that_say_many_pixels_are_refused_undecoded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(encoded(Image.new("L", (24, 24)), kind))
    monkeypatch.setattr(ImageFile.ImageFile, "size", property(lambda image: (10_000, 10_000)))
    must_not_decode(monkeypatch)
    assert MAX_PIXELS == 10_000 * 10_000
    with pytest.raises(ImageError, match=r"its header says 10000 x 10000 pixels, which its [\d,]+ bytes cannot hold"):
        read_image(bytes(data))


def test_large_jpegs_are_decoded_at_a_part_of_their_size() -> None:
    for side, expected in ((4000, 4000), (4100, 2050), (8300, 2075)):
        assert read_image(encoded(Image.new("L", (side, side)), "JPEG")).size == (expected, expected)
    assert read_image(encoded(Image.new("L", (9000, 1000)), "JPEG")).size == (9000, 1000)
    columns = np.tile(np.linspace(0, 255, 4200).astype(np.uint8), (4200, 1))
    small = np.asarray(read_image(encoded(Image.fromarray(columns), "JPEG", quality=90)))[1000, :, 0]
    assert np.abs(small - np.linspace(0, 255, 2100)).max() < 6


def test_frames_are_never_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = [Image.new("RGB", (8, 6), colour) for colour in ("red", "blue", "green")]
    for kind, reader in {"TIFF": TiffImageFile, "GIF": GifImageFile}.items():
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
        seek = reader._seek
        monkeypatch.setattr(
            reader,
            "_seek",
            lambda self, frame, *rest, seek=seek: seek(self, frame, *rest) if frame == 0 else pytest.fail("counted"),
        )
        assert np.asarray(read_image(data))[0, 0].tolist() == [255, 0, 0]


MEMORY = """
import resource, sys
from pathlib import Path
from kedge.errors import ImageError
from kedge.images import prefetch, read_image
from kedge.images.io import center_square

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

def decode(file):
    try:
        return center_square(read_image(file), 32)
    except ImageError:
        return None

files = sorted(Path(sys.argv[1]).iterdir())
before = peak()
decoded = [pixels for pixels in prefetch(decode, files, workers=4) if pixels is not None]
print(peak() - before, len(decoded))
"""


def mebibytes(folder: Path, readable: int) -> int:
    """What decoding the files of a folder in four threads takes at its peak, beyond what it took before."""
    done = subprocess.run([sys.executable, "-c", MEMORY, folder], capture_output=True, text=True, check=True)
    taken, decoded = map(int, done.stdout.split())
    assert decoded == readable
    return taken


def test_decoding_large_images_takes_the_memory_of_one(tmp_path: Path) -> None:
    data = encoded(Image.new("RGBA", (5000, 5000), (200, 0, 0, 99)), "PNG", compress_level=1)
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(data)
    # 95 MiB decoded, and as much as RGB; what the one before it is resized from may still be there.
    assert mebibytes(tmp_path, 4) < 400


def test_decoding_malformed_files_takes_hardly_any(tmp_path: Path) -> None:
    for number in range(40):
        data = bytearray(encoded(Image.new("L", (24, 24)), "JPEG", progressive=bool(number % 2)))
        frame = data.index(b"\xff\xc2" if number % 2 else b"\xff\xc0")
        data[frame + 5 : frame + 9] = (10_000).to_bytes(2, "big") * 2
        (tmp_path / f"{number}.jpg").write_bytes(data)
    assert mebibytes(tmp_path, 0) < 100
