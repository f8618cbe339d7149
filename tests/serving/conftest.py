from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np
import pytest
import uvicorn
from PIL import Image

from kedge.gallery import Gallery
from kedge.serving.app import create_app, uvicorn_config
from kedge.serving.service import Service
from kedge.serving.settings import Settings
from kedge.training import train

KEY = "a key that nobody guesses"


class Server:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: Path) -> None:
        self.process, self.url, self.log = process, url, log

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(60)


@contextmanager
def serving(gallery: Path, *options: str, key: str | None = None) -> Iterator[Server]:
    """`kedge serve`, until the block ends."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    environment.pop("KEDGE_KEY", None)
    if key is not None:
        environment["KEDGE_KEY"] = key
    log = gallery.parent / f"serve-{time.monotonic_ns()}.log"
    command = [sys.executable, "-m", "kedge", "serve", str(gallery), "--port", "0", *options]
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        yield Server(process, wait_until_ready(process, log), log)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture(scope="session", name="serving")
def _serving() -> Callable[..., AbstractContextManager[Server]]:
    """`with serving(gallery, "--writable", key=KEY) as server:`"""
    return serving


@contextmanager
def serving_in_thread(gallery: Path, **settings: Any) -> Iterator[ThreadServer]:
    """A server in a thread of this process, which is there sooner and takes every setting."""
    app = create_app(gallery, Settings(**settings))
    server = uvicorn.Server(uvicorn_config(app))
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        end = time.monotonic() + 60
        while not server.started:
            assert time.monotonic() < end
            time.sleep(0.01)
        yield ThreadServer(listening.getsockname()[1], app.state.service, server)
    finally:
        server.should_exit = True
        thread.join(60)
        listening.close()


@dataclass
class ThreadServer:
    """Where it listens, and its insides."""

    port: int
    service: Service
    uvicorn: uvicorn.Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture(scope="session", name="serving_in_thread")
def _serving_in_thread() -> Callable[..., AbstractContextManager[ThreadServer]]:
    """`with serving_in_thread(gallery, writable=True, key=KEY) as server:`"""
    return serving_in_thread


@pytest.fixture(scope="session", name="key")
def _key() -> str:
    return KEY


def wait_until_ready(process: subprocess.Popen[str], log: Path) -> str:
    """The server's address, once it answers."""
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        lines = [line for line in log.read_text().splitlines() if line.startswith("The page: ")]
        if lines:
            url = lines[0].removeprefix("The page: ").partition("#")[0].rstrip("/")
            try:
                with urlopen(f"{url}/api/v1/ready", timeout=5) as answer:
                    assert json.load(answer) == {"status": "ready"}
                    return url
            except URLError:
                pass
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def as_png(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture(scope="session")
def stripe_files(stripes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stripes as files: train/CLASS/NUMBER.png and test/CLASS/NUMBER.png."""
    root = tmp_path_factory.mktemp("stripes")
    with np.load(stripes) as arrays:
        for part in ("train", "test"):
            for number, (image, label) in enumerate(zip(arrays[f"x_{part}"], arrays[f"y_{part}"], strict=True)):
                folder = root / part / str(arrays["classes"][label])
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{number:03d}.png").write_bytes(as_png(image))
    return root


@pytest.fixture(scope="session")
def built(stripe_files: Path, tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gallery that knows four classes of stripes, calibrated, with thumbnails."""
    root = tmp_path_factory.mktemp("built")
    # The paper's loss: embeddings that scatter around their anchors, where there is something to see.
    paper = ["loss.discriminate=0", "loss.normalize=false"]
    model = train(overrides=[*tiny, *paper, "recipe.epochs=6"], folder=root / "run")
    gallery = Gallery.create(root / "gallery", model, thumbnails=32)
    gallery.add(stripe_files / "train")
    gallery.calibrate(stripe_files / "test")
    gallery.optimize()
    return root / "gallery"


@pytest.fixture
def own_gallery(built: Path, tmp_path: Path) -> Path:
    """A copy that may be written to."""
    return Path(shutil.copytree(built, tmp_path / "gallery"))


@pytest.fixture(scope="session")
def query(stripe_files: Path) -> Callable[[str], bytes]:
    """A test picture of a class."""

    def find(label: str, number: int = 0) -> bytes:
        return sorted((stripe_files / "test" / label).iterdir())[number].read_bytes()

    return find


@pytest.fixture(scope="session")
def black_picture() -> bytes:
    """A picture that is like none of the classes."""
    return as_png(np.zeros((12, 12, 3), np.uint8))


@pytest.fixture(scope="session")
def bearer() -> dict[str, str]:
    """What whoever knows the key sends."""
    return {"Authorization": f"Bearer {KEY}"}
