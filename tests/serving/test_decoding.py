"""Pictures that take too long, crash their decoder or take all memory: the server goes on."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image

from kedge.errors import ImageError
from kedge.gallery import Gallery
from kedge.images import Preprocessing, read_image
from kedge.serving import batching
from kedge.serving.app import create_app
from kedge.serving.batching import Decoders
from kedge.serving.settings import Settings

pytestmark = pytest.mark.timeout(120)

Query = Callable[..., bytes]

SMALL = Preprocessing(8)
PROGRAM = """
import os, time
from kedge.images import decoder

real = decoder.read_image

def read(source, **options):
    if source == b"slow" or (not isinstance(source, bytes) and open(source, "rb").read(4) == b"slow"):
        time.sleep(600)
    if source == b"crash":
        os.abort()
    if source == b"large":
        bytearray(decoder._MEMORY)
    return real(source, **options)

decoder.read_image = read
decoder.main()
"""
"""The decoder, with some pictures that are worse than can be made without knowing of a fault in a library."""


def with_decoders(seconds: float, act: Callable[[Decoders], Awaitable[None]]) -> None:
    """Call it with a pool of one decoder, which is closed afterwards."""

    async def work() -> None:
        decoders = Decoders(1, seconds, 50_000_000)
        try:
            await act(decoders)
        finally:
            await decoders.close()

    asyncio.run(work())


def test_what_is_decoded_elsewhere_is_the_same(stripe_files: Path) -> None:
    file = next((stripe_files / "test").rglob("*.png"))

    async def decode(decoders: Decoders) -> None:
        for preprocessing in (SMALL, Preprocessing(None), Preprocessing(7, crop_pct=0.8, interpolation="bicubic")):
            expected = preprocessing.to_pixels(read_image(file))
            assert np.array_equal(await decoders.pixels(file.read_bytes(), preprocessing), expected)
        with pytest.raises(ImageError, match=r"^The image cannot be read: it is not an image of a known format\.$"):
            await decoders.pixels(b"certainly not", SMALL)
        with pytest.raises(ImageError, match="more than the limit of 50,000,000"):
            await decoders.pixels(b"P6 9000 9000 255 " + bytes(60_000), SMALL)

    with_decoders(30, decode)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"slow", "decoding it takes longer than 2 seconds"),
        (b"crash", "its decoder failed"),
        (b"large", "it takes too much memory"),
    ],
)
def test_a_bad_picture_ends_alone(query: Query, content: bytes, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_PROGRAM", PROGRAM)

    async def decode(decoders: Decoders) -> None:
        for _ in range(2):
            with pytest.raises(ImageError, match=f"^The image cannot be read: {sentence}.$"):
                await decoders.pixels(content, SMALL)
            assert (await decoders.pixels(query("level"), SMALL)).shape == (3, 8, 8)

    with_decoders(2, decode)


def test_a_request_that_is_given_up_leaves_no_answer_to_the_next(query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_PROGRAM", PROGRAM)

    async def decode(decoders: Decoders) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await decoders.pixels(b"slow", SMALL)
        assert (await decoders.pixels(query("level"), SMALL)).shape == (3, 8, 8)

    with_decoders(30, decode)


def test_no_process_stays_behind(query: Query) -> None:
    async def decode(decoders: Decoders) -> None:
        await decoders.pixels(query("level"), SMALL)
        [process] = decoders._idle
        assert process.returncode is None
        await decoders.close()
        assert process.returncode is not None

    with_decoders(30, decode)


def test_a_decoder_ends_with_its_input() -> None:
    """So that none is left when a server is killed."""

    async def end() -> int:
        process = await batching._start()
        assert process.stdin is not None
        process.stdin.close()
        return await process.wait()

    assert asyncio.run(end()) == 0


@pytest.fixture
def pictures(built: Path, stripe_files: Path, tmp_path: Path) -> Path:
    """A gallery without thumbnails of its own, over four pictures of which one is slow to decode."""
    gallery = Gallery.create(tmp_path / "gallery", Gallery.open(built).model)
    files = []
    for number, file in enumerate(sorted((stripe_files / "train/level").iterdir())[:4]):
        files.append(tmp_path / f"{number}.png")
        files[-1].write_bytes(file.read_bytes())
    gallery.add(files)
    files[0].write_bytes(b"slow")
    return tmp_path / "gallery"


def in_background(count: int, act: Callable[[], int]) -> tuple[ThreadPoolExecutor, list[int]]:
    """Requests that take their time, once all have been sent."""
    ended: list[int] = []
    sent = threading.Barrier(count + 1)

    def work() -> None:
        sent.wait()
        ended.append(act())

    pool = ThreadPoolExecutor(count)
    for _ in range(count):
        pool.submit(work)
    sent.wait()
    time.sleep(1)  # so that they have come in
    return pool, ended


def test_slow_uploads_and_slow_thumbnails_keep_nobody_else_waiting(
    pictures: Path, query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "_PROGRAM", PROGRAM)
    settings = Settings(decode_seconds=4, images=(pictures.parent,))
    with TestClient(create_app(pictures, settings), base_url="http://localhost") as client:
        ids = [item["id"] for item in client.get("/api/v1/items").json()["items"]]
        kind = {"Content-Type": "image/png"}

        def upload(content: bytes) -> int:
            return client.post("/api/v1/search", content=content, headers=kind).status_code

        def thumbnail(id: int) -> int:
            return client.get(f"/api/v1/items/{id}/thumbnail").status_code

        workers = min(4, os.cpu_count() or 1)
        assert (upload(query("level")), thumbnail(ids[1])) == (200, 200)  # a decoder of each kind has started
        pool, ended = in_background(workers, lambda: upload(b"slow"))
        assert [thumbnail(id) for id in ids[2:]] == [200, 200]
        assert ended == []
        pool.shutdown()
        assert ended == [422] * workers
        assert upload(query("level")) == 200

        pool, ended = in_background(workers, lambda: thumbnail(ids[0]))
        assert upload(query("level")) == 200
        assert ended == []
        pool.shutdown()
        assert ended == [404] * workers
        assert thumbnail(ids[1]) == 200


def test_the_progressive_bomb_is_refused_by_the_server(pictures: Path) -> None:
    import io

    stream = io.BytesIO()
    Image.new("L", (7000, 7000), 90).save(stream, "JPEG", progressive=True)
    whole = stream.getvalue()
    last, end = whole.rindex(b"\xff\xda"), whole.rindex(b"\xff\xd9")
    bomb = whole[:last] + whole[last:end] * 20_000 + whole[end:]
    with TestClient(create_app(pictures), base_url="http://localhost") as client:
        answer = client.post("/api/v1/search", content=bomb, headers={"Content-Type": "image/jpeg"})
    assert answer.status_code == 422
    assert "scans of 7000 x 7000 pixels, which is too much to decode" in answer.json()["error"]
