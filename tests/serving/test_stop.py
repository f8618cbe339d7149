from __future__ import annotations

import hashlib
import http.client
import io
import json
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit
from urllib.request import urlopen

import numpy as np
import pytest
from PIL import Image

from kedge.gallery import Gallery
from kedge.serving.client import Client

SEARCHERS = 16
WRITERS = 2
BUSY = (429, 503)
"""What a server may answer that has too much to do, or stops."""


class Server(Protocol):
    process: subprocess.Popen[str]
    url: str
    log: Path

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int: ...


Serving = Callable[..., AbstractContextManager[Server]]
InThread = Callable[..., AbstractContextManager[Any]]
Query = Callable[..., bytes]


@dataclass
class Caller:
    """Calls a server over new connections, until one is refused."""

    url: str
    key: str
    answers: list[tuple[float, int, dict[str, Any]]] = field(default_factory=list)
    """When it came, its status, what it said."""
    lost: list[str] = field(default_factory=list)
    """What became of requests on accepted connections that got no whole answer."""
    refused: float | None = None
    """When the first connection was refused."""

    def ask(self, method: str, path: str, content: bytes | None = None) -> tuple[int, dict[str, Any]] | None:
        """The answer; none if the connection was refused, or the answer lost."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=60)
        try:
            connection.connect()
        except ConnectionRefusedError:
            self.refused = time.monotonic()
            return None
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "image/png"}
        try:
            connection.request(method, f"/api/v1{path}", content, headers)
            answer = connection.getresponse()
            found = json.loads(answer.read() or b"{}")
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.lost.append(f"{method} {path}: {error!r}")
            return None
        finally:
            connection.close()
        self.answers.append((time.monotonic(), answer.status, found))
        return answer.status, found

    @property
    def is_over(self) -> bool:
        return self.refused is not None or bool(self.lost)


class Searcher(Caller):
    """Searches with one picture, again and again."""

    def work(self, picture: bytes) -> None:
        while not self.is_over:
            self.ask("POST", "/search?k=5", picture)


class Writer(Caller):
    """Adds pictures and removes every third of them, and keeps what it was told."""

    def __init__(self, url: str, key: str, seed: int) -> None:
        super().__init__(url, key)
        self.chance = np.random.default_rng(seed)
        self.added: dict[int, bytes] = {}
        self.removed: dict[int, bytes] = {}
        self.open: list[bytes] = []
        """Pictures whose adding or removing was never acknowledged."""

    def work(self) -> None:
        while not self.is_over:
            picture = new_picture(self.chance)
            answer = self.ask("POST", "/items?label=new", picture)
            if answer is None or answer[0] != 201:
                self.open.append(picture)
                continue
            self.added[answer[1]["id"]] = picture
            if (len(self.added) + len(self.removed)) % 3 == 0:
                self.remove(answer[1]["id"])

    def remove(self, id: int) -> None:
        answer = self.ask("DELETE", f"/items/{id}")
        picture = self.added.pop(id)
        if answer is None or answer[0] != 204:
            self.open.append(picture)
        else:
            self.removed[id] = picture


def new_picture(chance: np.random.Generator) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(chance.integers(0, 256, (12, 12, 3), np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def digest_of(picture: bytes) -> str:
    return hashlib.sha256(picture).hexdigest()


def start(act: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=act, args=arguments, daemon=True)
    thread.start()
    return thread


def wait_until(holds: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def check_written(gallery: Path, url: str, key: str, before: set[str], writers: list[Writer]) -> None:
    """All that was acknowledged is as it was said to be, and nothing else has changed."""
    client = Client(url, key)
    there = {item["id"]: item for item in client.items()}
    for writer in writers:
        for id in writer.added:
            assert there[id] == {"id": id, "name": None, "label": "new", "metadata": {}}
            Image.open(io.BytesIO(client.thumbnail(id))).load()
        for id in writer.removed:
            assert id not in there
    names = names_in(gallery)
    added = {digest_of(picture) for writer in writers for picture in writer.added.values()}
    unsure = {digest_of(picture) for writer in writers for picture in writer.open}
    assert before | added <= names <= before | added | unsure
    assert len(names) == len(there)
    last = next(iter(reversed(writers[0].added.items())))
    nearest = client.search(last[1], k=1, method="brute_force")["searches"][0]["hits"][0]
    assert nearest["id"] == last[0]
    assert nearest["distance"] < 1e-3


def names_in(gallery: Path) -> set[str]:
    return {Path(path).name for batch in Gallery.open(gallery).batches(["path"]) for path in batch["path"].to_pylist()}


def test_a_stop_under_load_answers_what_it_has_begun(
    own_gallery: Path, serving: Serving, serving_in_thread: InThread, key: str, query: Query
) -> None:
    before = names_in(own_gallery)
    with serving(own_gallery, "--writable", key=key) as server:
        searchers = [Searcher(server.url, key) for _ in range(SEARCHERS)]
        writers = [Writer(server.url, key, seed) for seed in range(WRITERS)]
        threads = [start(searcher.work, query("level", row % 10)) for row, searcher in enumerate(searchers)]
        threads += [start(writer.work) for writer in writers]
        callers: list[Caller] = [*searchers, *writers]
        wait_until(lambda: all(caller.answers for caller in callers))
        time.sleep(1)
        stopped = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        log = server.log.read_text()

    # Connections whose request has not arrived are closed without a word; no answer is cut off.
    for caller in callers:
        assert all("Reset" in error or "RemoteDisconnected" in error or "Broken" in error for error in caller.lost)
    for searcher in searchers:
        for _, status, answer in searcher.answers:
            if status == 200:
                hits = answer["searches"][0]["hits"]
                # The list that is being written may hold fewer.
                assert len(hits) == 5 or {hit["label"] for hit in hits} == {"new"}
            else:
                assert status in BUSY
                assert answer["error"].endswith(".")
    assert any(when > stopped and status == 200 for searcher in searchers for when, status, _ in searcher.answers)
    for writer in writers:
        assert {status for _, status, _ in writer.answers} <= {201, 204}
    assert key not in log
    assert "Traceback" not in log

    with serving_in_thread(own_gallery, key=key) as restarted:
        check_written(own_gallery, restarted.url, key, before, writers)


class Slow:
    """A connection that sends a search piece by piece."""

    def __init__(self, url: str, picture: bytes) -> None:
        place = urlsplit(url)
        assert place.hostname is not None
        self.socket = socket.create_connection((place.hostname, place.port or 80), timeout=60)
        head = f"POST /api/v1/search?k=5 HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: image/png\r\n"
        self.left = f"{head}Content-Length: {len(picture)}\r\n\r\n".encode() + picture

    def send(self, count: int | None = None) -> None:
        self.socket.sendall(self.left[:count])
        self.left = self.left[len(self.left) if count is None else count :]

    def status(self) -> int:
        """Of the answer, once all of it is there."""
        with self.socket:
            answer = http.client.HTTPResponse(self.socket, method="POST")
            answer.begin()
            assert len(json.loads(answer.read())["searches"][0]["hits"]) == 5
            return answer.status


def refuses_connections(url: str) -> bool:
    place = urlsplit(url)
    try:
        socket.create_connection((place.hostname or "", place.port or 80), timeout=0.2).close()
    except OSError:
        return True
    return False


def test_an_upload_that_has_begun_when_the_signal_comes_is_answered(
    built: Path, serving_in_thread: InThread, query: Query
) -> None:
    with serving_in_thread(built) as server:
        idle, halfway = (Slow(server.url, query("level")) for _ in range(2))
        halfway.send(-50)
        arriving = f"kedge_upload_bytes {len(query('level')) - 50:.1f}"
        wait_until(lambda: arriving in fetched(f"{server.url}/metrics"))
        server.uvicorn.handle_exit(signal.SIGTERM, None)
        wait_until(lambda: refuses_connections(server.url))
        assert idle.socket.recv(1) == b""
        halfway.send()
        assert halfway.status() == 200


def fetched(url: str) -> str:
    with urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


def test_what_another_process_writes_is_seen_at_once(
    own_gallery: Path, serving_in_thread: InThread, tmp_path: Path, query: Query
) -> None:
    picture = tmp_path / "another.png"
    picture.write_bytes(query("slanted", 3))
    with serving_in_thread(own_gallery) as server:
        client = Client(server.url)
        first = client.info()
        other = Gallery.open(own_gallery)
        [id] = other.add([picture], ["another"])

        assert client.info()["items"] == first["items"] + 1
        assert client.info()["record"]["version"] > first["record"]["version"]
        assert client.item(id)["name"] == "another.png"
        assert {"name": "another", "items": 1} in client.classes()
        for method in ("two_stage", "brute_force"):
            [search] = client.search(picture, k=1, method=method, labels=["another"], probes=5)["searches"]
            assert [hit["id"] for hit in search["hits"]] == [id]

        other.remove(id)
        assert client.info()["items"] == first["items"]
        assert id not in [item["id"] for item in client.items()]
        assert id not in [
            hit["id"] for hit in client.search(picture, k=200, method="brute_force")["searches"][0]["hits"]
        ]

        other.optimize()
        assert client.info()["items"] == first["items"]
        assert client.search(picture, k=1)["searches"][0]["hits"][0]["label"] == "slanted"


def kill_again_and_again(
    gallery: Path, serving: Serving, serving_in_thread: InThread, key: str, kills: int, seed: int
) -> None:
    chance = random.Random(seed)
    for _ in range(kills):
        names = names_in(gallery)
        with serving(gallery, "--writable", key=key) as server:
            writers = [Writer(server.url, key, chance.getrandbits(64)) for _ in range(WRITERS)]
            threads = [start(writer.work) for writer in writers]
            wait_until(lambda: all(writer.removed for writer in writers))  # noqa: B023
            time.sleep(chance.uniform(0, 0.5))
            assert server.stop(signal.SIGKILL) == -signal.SIGKILL
            for thread in threads:
                thread.join(30)
            assert not any(thread.is_alive() for thread in threads)
            assert all(writer.is_over for writer in writers)
        with serving_in_thread(gallery, key=key) as restarted:
            check_written(gallery, restarted.url, key, names, writers)


def test_what_was_acknowledged_outlives_a_kill(
    own_gallery: Path, serving: Serving, serving_in_thread: InThread, key: str
) -> None:
    kill_again_and_again(own_gallery, serving, serving_in_thread, key, kills=1, seed=0)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_what_was_acknowledged_outlives_many_kills(
    own_gallery: Path, serving: Serving, serving_in_thread: InThread, key: str
) -> None:
    kill_again_and_again(own_gallery, serving, serving_in_thread, key, kills=10, seed=1)
