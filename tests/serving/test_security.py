from __future__ import annotations

import asyncio
import hashlib
import hmac
import http.client
import inspect
import json
import logging
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NoReturn, Protocol
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from filelock import FileLock

import kedge
from kedge.cli import serve as verb
from kedge.errors import ConfigError, DataError, GalleryError
from kedge.gallery import Gallery
from kedge.gallery import table as gallery_module
from kedge.gallery.table import LOCK
from kedge.serving import app as app_module
from kedge.serving import batching
from kedge.serving.app import create_app
from kedge.serving.catalogue import ImageFiles
from kedge.serving.settings import Settings

PNG = {"Content-Type": "image/png"}
FRIEND, STRANGER = "https://friend.example", "https://stranger.example"
SAFE_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
NOTHING_FROM_ELSEWHERE = {
    "default-src": ["'none'"],
    "script-src": ["'self'"],
    "style-src": ["'self'"],
    "connect-src": ["'self'"],
    "img-src": ["'self'", "blob:", "data:"],
    "manifest-src": ["'self'"],
    "base-uri": ["'none'"],
    "form-action": ["'none'"],
    "frame-ancestors": ["'none'"],
}


class Server(Protocol):
    process: subprocess.Popen[str]
    url: str
    log: Path


Serving = Callable[..., AbstractContextManager[Server]]
Query = Callable[..., bytes]


def client_of(gallery: Path, settings: Settings | None = None) -> TestClient:
    app = create_app(gallery, settings)
    return TestClient(app, base_url="http://localhost", raise_server_exceptions=False)


@pytest.fixture(scope="module")
def reader(built: Path) -> Iterator[TestClient]:
    """Everybody may read."""
    with client_of(built) as client:
        yield client


@pytest.fixture(scope="module")
def locked(built: Path, key: str) -> Iterator[TestClient]:
    """Only those who know the key may read."""
    with client_of(built, Settings(key=key)) as client:
        yield client


@pytest.fixture
def writable(own_gallery: Path, key: str) -> Iterator[TestClient]:
    """Those who know the key may write."""
    with client_of(own_gallery, Settings(key=key, writable=True)) as client:
        yield client


@pytest.fixture(scope="module")
def untouched(built: Path, key: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """The same for all tests that must not succeed in writing."""
    gallery = shutil.copytree(built, tmp_path_factory.mktemp("untouched") / "gallery")
    with client_of(gallery, Settings(key=key, writable=True)) as client:
        before = Gallery.open(gallery).ids()
        yield client
        assert Gallery.open(gallery).ids() == before


@pytest.fixture(scope="module")
def served(built: Path, serving: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A process that has made up its own key."""
    gallery = shutil.copytree(built, tmp_path_factory.mktemp("served") / "gallery")
    with serving(gallery, "--writable") as server:
        yield server


def made_up_key(server: Server) -> str:
    [line] = [line for line in server.log.read_text().splitlines() if line.startswith("The page: ")]
    return line.partition("#key=")[2]


def place_of(server: Server) -> tuple[str, int]:
    parts = urlsplit(server.url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def raw(server: Server, method: str, target: str, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    """The answer to a request whose target is sent as it is, dots and all."""
    connection = http.client.HTTPConnection(*place_of(server), timeout=30)
    try:
        connection.putrequest(method, target, skip_accept_encoding=True)
        for name, value in (headers or {}).items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def sentence_of(answer: httpx.Response) -> str:
    said = answer.json()
    assert list(said) == ["error"]
    return str(said["error"])


def service_of(client: TestClient) -> Any:
    assert isinstance(client.app, FastAPI)
    return client.app.state.service


def calls_of(app: Any) -> list[tuple[str, str]]:
    """Every call that the API describes, and those it does not describe."""
    described = [
        (method.upper(), path.format(id=0, anchor=0))
        for path, methods in app.openapi()["paths"].items()
        for method in methods
    ]
    return [*described, ("GET", "/metrics"), ("GET", "/api/v1/openapi.json")]


OPEN_CALLS = [("GET", "/api/v1/health"), ("GET", "/api/v1/ready")]


# ---------------------------------------------------------------------- where it listens


def own_addresses() -> list[str]:
    found = ["127.0.0.2"] if sys.platform.startswith("linux") else []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
            found.append(probe.getsockname()[0])
        except OSError:
            pass
    return [address for address in found if address != "127.0.0.1"]


def test_it_listens_on_loopback_unless_told_otherwise(served: Server) -> None:
    assert inspect.signature(verb.serve).parameters["host"].default == "127.0.0.1"
    host, port = place_of(served)
    assert host == "127.0.0.1"
    socket.create_connection((host, port), timeout=5).close()
    for address in own_addresses():
        with pytest.raises(OSError):
            socket.create_connection((address, port), timeout=5)


# ---------------------------------------------------------------------- the key


def test_every_call_but_health_and_ready_needs_the_key(locked: TestClient, key: str, bearer: dict[str, str]) -> None:
    calls = calls_of(locked.app)
    assert len(calls) > 12
    assert set(OPEN_CALLS) < set(calls)
    for method, path in calls:
        answer = locked.request(method, path)
        if (method, path) in OPEN_CALLS:
            assert answer.status_code == 200
            continue
        assert answer.status_code == 401, path
        assert "key" in sentence_of(answer)
        assert answer.headers["www-authenticate"] == "Bearer"
        assert locked.request(method, path, headers=bearer).status_code != 401
    assert locked.get("/").status_code == 200


@pytest.mark.parametrize(
    "header",
    [
        "Bearer a key that nobody guessed",
        "Bearer {key}x",
        "Bearer",
        "Bearer ",
        "Basic {key}",
        "Token {key}",
        "{key}",
        "Bearer Bearer {key}",
        "Bearer ключ",
    ],
)
def test_nothing_but_the_key_opens(locked: TestClient, key: str, header: str) -> None:
    for path in ("/api/v1/info", "/metrics", "/api/v1/items/0/thumbnail"):
        headers = {"Authorization": header.format(key=key).encode()}
        assert locked.get(path, headers=headers).status_code == 401


def test_a_key_in_the_address_does_not_open(locked: TestClient, key: str) -> None:
    for name in ("key", "token", "access_token", "api_key", "authorization"):
        assert locked.get("/api/v1/info", params={name: key}).status_code == 401
        assert locked.get("/api/v1/info", cookies={name: key}).status_code == 401
    assert locked.get("/api/v1/info", auth=("kedge", key)).status_code == 401


@pytest.mark.parametrize("path", ["//api/v1/info", "/page/../api/v1/info", "/api/v1/health/../info", "/api/v1/info/"])
def test_no_other_spelling_of_a_path_opens(served: Server, path: str) -> None:
    status, content = raw(served, "GET", path)
    assert status in (401, 404)
    assert b"fingerprint" not in content


@pytest.mark.parametrize("same", [True, False])
def test_keys_are_compared_in_constant_time(
    locked: TestClient, key: str, bearer: dict[str, str], monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    compared: list[set[bytes]] = []

    def judge(one: bytes, other: bytes) -> bool:
        compared.append({one, other})
        return same

    monkeypatch.setattr(hmac, "compare_digest", judge)
    wrong = {"Authorization": "Bearer not the key at all"}
    expected = 200 if same else 401
    assert locked.get("/api/v1/info", headers=bearer).status_code == expected
    assert locked.get("/api/v1/info", headers=wrong).status_code == expected
    assert compared == [{key.encode()}, {key.encode(), b"not the key at all"}]


def test_no_server_is_writable_without_a_key(built: Path, reader: TestClient, query: Query) -> None:
    for key in (None, ""):
        with pytest.raises(ConfigError, match="needs an API key"):
            Settings(writable=True, key=key)
    with pytest.raises(ConfigError, match="at least 16"):
        Settings(key="short")
    count = len(Gallery.open(built))
    assert reader.post("/api/v1/items", content=query("level"), headers=PNG).status_code == 403
    assert reader.delete("/api/v1/items/0").status_code == 403
    assert len(Gallery.open(built)) == count


def test_a_key_alone_makes_no_server_writable(locked: TestClient, bearer: dict[str, str], query: Query) -> None:
    assert locked.post("/api/v1/items", content=query("level"), headers=PNG | bearer).status_code == 403
    assert locked.delete("/api/v1/items/0", headers=bearer).status_code == 403


def test_writing_needs_the_key(writable: TestClient, bearer: dict[str, str], query: Query) -> None:
    wrong = {"Authorization": "Bearer a key that nobody guessed"}
    for headers in ({}, wrong):
        assert writable.post("/api/v1/items", content=query("level"), headers=PNG | headers).status_code == 401
        assert writable.delete("/api/v1/items/0", headers=headers).status_code == 401
    assert writable.delete("/api/v1/items/0", headers=bearer).status_code == 204


def test_a_writable_server_without_a_key_makes_one_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found: list[tuple[Settings, bool]] = []

    def instead(gallery: Path, settings: Settings, *, generated: bool, **others: object) -> None:
        del gallery, others
        found.append((settings, generated))

    monkeypatch.setattr(app_module, "serve", instead)
    monkeypatch.delenv("KEDGE_KEY", raising=False)
    for _ in range(2):
        verb.serve(tmp_path, writable=True)
    monkeypatch.setenv("KEDGE_KEY", "a key of one's own")
    verb.serve(tmp_path, writable=True)
    monkeypatch.delenv("KEDGE_KEY")
    verb.serve(tmp_path)
    (first, generated), (second, _), (own, was_generated), (none, _) = found
    assert first.key is not None
    assert second.key is not None
    assert len(first.key) >= 32
    assert first.key != second.key
    assert generated
    assert (own.key, was_generated) == ("a key of one's own", False)
    assert (none.key, none.writable) == (None, False)


def test_a_made_up_key_is_printed_in_the_address_of_the_page_only(served: Server) -> None:
    key = made_up_key(served)
    assert len(key) >= 32
    assert raw(served, "GET", "/api/v1/info")[0] == 401
    assert raw(served, "GET", "/api/v1/info", {"Authorization": f"Bearer {key}"})[0] == 200
    assert raw(served, "GET", f"/api/v1/info?key={key}")[0] == 401
    assert raw(served, "GET", f"/?key={key}")[0] == 200
    assert raw(served, "DELETE", "/api/v1/items/999999", {"Authorization": f"Bearer {key}"})[0] == 404
    text = served.log.read_text()
    assert f"The page: {served.url}/#key={key}\n" in text
    assert text.count(key) == 1


# ---------------------------------------------------------------------- how much, how large, how long


@pytest.mark.parametrize("path", ["/api/v1/search", "/api/v1/items"])
def test_a_body_that_says_it_is_too_large_is_refused_before_it_is_sent(served: Server, path: str) -> None:
    headers = {
        "Authorization": f"Bearer {made_up_key(served)}",
        "Content-Type": "image/png",
        "Content-Length": str(20 * 2**20 + 1),
        "Expect": "100-continue",
    }
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", *(f"{name}: {value}" for name, value in headers.items())]
    with socket.create_connection(place_of(served), timeout=8) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


async def given(app: Any, path: str, headers: dict[str, str], body: AsyncIterator[bytes]) -> tuple[int, bytes]:
    """The answer to a request whose body comes in parts."""
    found: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        part = await anext(body, None)
        return {"type": "http.request", "body": part or b"", "more_body": part is not None}

    async def send(message: Any) -> None:
        found.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (name.lower().encode(), value.encode()) for name, value in {"Host": "localhost", **headers}.items()
        ],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "state": {},
    }
    await app(scope, receive, send)
    return found[0]["status"], b"".join(message.get("body", b"") for message in found[1:])


class Body:
    """Parts of a hundred bytes, some time apart; `taken` says how many of them were asked for."""

    def __init__(self, parts: int, pause: float = 0) -> None:
        self.parts, self.pause, self.taken = parts, pause, 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for _ in range(self.parts):
            self.taken += 1
            await asyncio.sleep(self.pause)
            yield b"x" * 100


@pytest.mark.parametrize("kind", ["image/png", "application/octet-stream", "multipart/form-data; boundary=x"])
def test_a_body_without_a_length_is_cut_at_the_limit(built: Path, kind: str) -> None:
    app, body = create_app(built, Settings(max_bytes=1000)), Body(1000)
    status, content = asyncio.run(given(app, "/api/v1/search", {"Content-Type": kind}, aiter(body)))
    assert status == 413
    assert json.loads(content) == {"error": "The image is larger than 1,000 bytes."}
    assert body.taken == 11


def test_nothing_is_read_of_a_body_that_says_it_is_too_large(built: Path) -> None:
    app, body = create_app(built, Settings(max_bytes=1000)), Body(20)
    headers = {"Content-Type": "image/png", "Content-Length": "2000"}
    assert asyncio.run(given(app, "/api/v1/search", headers, aiter(body)))[0] == 413
    assert body.taken == 0


def test_nothing_is_read_of_what_is_refused_anyway(own_gallery: Path, key: str) -> None:
    app = create_app(own_gallery, Settings(key=key, writable=True))
    attempts: list[tuple[dict[str, str], int]] = [
        (PNG, 401),
        (PNG | {"Host": "stranger.example"}, 400),
        (PNG | {"Authorization": f"Bearer {key}", "Origin": STRANGER}, 403),
        ({"Content-Type": "text/html", "Authorization": f"Bearer {key}"}, 415),
    ]
    for headers, expected in attempts:
        body = Body(10)
        assert asyncio.run(given(app, "/api/v1/items", headers, aiter(body)))[0] == expected
        assert body.taken == 0


def claiming(width: int, height: int) -> bytes:
    """The head of a PNG that says it is so large, and a few bytes of pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


NOTING = """
from PIL import ImageFile
from kedge.images.decoder import main

load = ImageFile.ImageFile.load

def noted(self):
    with open({log!r}, "a") as log:
        print(*self.size, file=log)
    return load(self)

ImageFile.ImageFile.load = noted
main()
"""


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], set[str]]:
    """The sizes of pictures whose pixels were asked for, in the processes that decode."""
    log = tmp_path / "decoded"
    log.touch()
    monkeypatch.setattr(batching, "_PROGRAM", NOTING.format(log=str(log)))
    return lambda: set(log.read_text().splitlines())


@pytest.mark.parametrize("size", [(60_000, 60_000), (8_000, 8_000), (50_000_001, 1)])
def test_a_picture_with_too_many_pixels_is_not_decoded(
    writable: TestClient, bearer: dict[str, str], decoded: Callable[[], set[str]], size: tuple[int, int]
) -> None:
    for path in ("/api/v1/search", "/api/v1/items"):
        answer = writable.post(path, content=claiming(*size), headers=PNG | bearer)
        assert answer.status_code == 422
        assert "pixels" in sentence_of(answer)
    assert decoded() == set()


def test_the_limit_of_pixels_can_be_lower(built: Path, query: Query, decoded: Callable[[], set[str]]) -> None:
    with client_of(built, Settings(max_pixels=12 * 12 - 1)) as client:
        answer = client.post("/api/v1/search", content=query("level"), headers=PNG)
        assert answer.status_code == 422
        assert "the limit of 143" in sentence_of(answer)
        assert decoded() == set()
    with client_of(built, Settings(max_pixels=12 * 12)) as client:
        assert client.post("/api/v1/search", content=query("level"), headers=PNG).status_code == 200
        assert decoded() == {"12 12"}


def test_a_body_that_trickles_is_cut_off(built: Path) -> None:
    app, body = create_app(built, Settings(upload_seconds=0.3)), Body(100, pause=0.05)
    status, content = asyncio.run(given(app, "/api/v1/search", PNG, aiter(body)))
    assert status == 408
    assert json.loads(content) == {"error": "The upload took too long; try again."}
    assert body.taken < 20


def test_a_search_that_takes_too_long_is_given_up(built: Path, query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    with client_of(built, Settings(seconds=0.3)) as client:
        search = Gallery.search_embeddings

        def slowly(*arguments: Any, **others: Any) -> Any:
            gate.wait(5)
            return search(*arguments, **others)

        monkeypatch.setattr(Gallery, "search_embeddings", slowly)
        for ask in (
            lambda: client.post("/api/v1/search", content=query("level"), headers=PNG),
            lambda: client.get("/api/v1/items/0/similar"),
        ):
            answer = ask()
            assert answer.status_code == 503
            assert sentence_of(answer) == "The request took too long; try again."
        gate.set()


def test_a_body_whose_end_is_uncertain_is_refused(served: Server) -> None:
    head = "POST /api/v1/search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    smuggled = "0\r\n\r\nGET /api/v1/health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(place_of(served), timeout=30) as connection:
        connection.sendall((head + smuggled).encode())
        found = b""
        while part := connection.recv(4096):
            found += part
    assert found.startswith(b"HTTP/1.1 400 ")
    assert found.count(b"HTTP/1.1 ") == 1  # the second request is not answered
    said = json.loads(found.partition(b"\r\n\r\n")[2])
    assert said == {"error": "A request has Content-Length or Transfer-Encoding, not both."}


# ---------------------------------------------------------------------- what can be fetched


SECRETS = [b"root:", b"create_app", b"[project]"]
"""What is in /etc/passwd, in the server's own code and in the repository's files."""
UP = [
    "..",
    "%2e%2e",
    ".%2e",
    "%2E.",
    "..%2f..",
    "%2e%2e%2f%2e%2e",
    "..%5c..",
    "%252e%252e",
    "....//",
    "..;",
    "%c0%ae%c0%ae",
]


@pytest.mark.parametrize("up", UP)
def test_no_file_beside_the_page_can_be_named(served: Server, up: str) -> None:
    targets = ["app.py", "../pyproject.toml", "/etc/passwd", "etc/passwd"]
    key = {"Authorization": f"Bearer {made_up_key(served)}"}
    for base in ("/page", "/page/x", "/api/v1/items/0", "/api/v1/items", ""):
        for depth in (1, 3, 12):
            for target in targets:
                path = "/".join([base, *[up] * depth, target])
                status, content = raw(served, "GET", path, key)
                assert status in (400, 401, 404, 405, 422), path
                assert not any(secret in content for secret in SECRETS)


@pytest.mark.parametrize(
    "path",
    [
        "/page//etc/passwd",
        "/page/%2fetc%2fpasswd",
        "/page/%2Fetc/passwd",
        "/page/file:%2f%2f%2fetc%2fpasswd",
        "/page/app.js%00.py",
        "/page/",
        "/page",
        "/page/.",
        "/page/app.py",
        "/page/page/api.js",
        "//etc/passwd",
        "http://localhost/etc/passwd",
    ],
)
def test_no_absolute_path_can_be_named(served: Server, path: str) -> None:
    key = {"Authorization": f"Bearer {made_up_key(served)}"}
    status, content = raw(served, "GET", path, key)
    assert status in (307, 400, 404)
    assert not any(secret in content for secret in SECRETS)


@pytest.mark.parametrize(
    ("id", "status"),
    [
        ("160", 404),
        ("1000000", 404),
        (str(2**63 - 1), 404),
        (str(2**63), 422),
        ("-1", 422),
        ("0x1", 422),
        ("passwd", 422),
        ("0 OR 1=1", 422),
        ("1/../../etc/passwd", 404),
        ("1%2F..%2F..%2Fetc%2Fpasswd", 404),
        ("%2Fetc%2Fpasswd", 404),
        ("..%2f..%2fabout.json", 404),
    ],
)
def test_only_pictures_of_the_gallery_can_be_fetched(served: Server, id: str, status: int) -> None:
    key = {"Authorization": f"Bearer {made_up_key(served)}"}
    assert raw(served, "GET", "/api/v1/items/0/thumbnail", key)[0] == 200
    for rest in ("/thumbnail", "", "/similar"):
        found, content = raw(served, "GET", f"/api/v1/items/{id}{rest}".replace(" ", "%20"), key)
        assert found == status
        assert list(json.loads(content)) == ["error"]


@pytest.fixture
def bare(built: Path, stripe_files: Path, tmp_path: Path) -> Path:
    """A gallery that keeps no thumbnails; its pictures are files beside it."""
    files = [
        Path(shutil.copy(file, tmp_path / f"{row}.png"))
        for row, file in enumerate(sorted((stripe_files / "train" / "level").iterdir())[:3])
    ]
    gallery = Gallery.create(tmp_path / "bare", Gallery.open(built).model)
    assert gallery.add(files) == [0, 1, 2]
    return gallery.path


def shown(gallery: Path, *images: Path, count: int = 3) -> list[int]:
    """The statuses of the thumbnails of the first items."""
    with client_of(gallery, Settings(images=images)) as client:
        return [client.get(f"/api/v1/items/{id}/thumbnail").status_code for id in range(count)]


def test_a_picture_goes_with_its_item(bare: Path) -> None:
    with client_of(bare, Settings(images=(bare.parent,))) as client:
        for id in range(3):
            assert client.get(f"/api/v1/items/{id}/thumbnail").status_code == 200
        Gallery.open(bare).remove(1)
        assert [client.get(f"/api/v1/items/{id}/thumbnail").status_code for id in range(3)] == [200, 404, 200]


def test_only_files_below_a_named_folder_are_shown(bare: Path, tmp_path: Path) -> None:
    assert shown(bare) == [404, 404, 404]
    assert shown(bare, tmp_path) == [200, 200, 200]
    other = tmp_path / "other"
    other.mkdir()
    assert shown(bare, other) == [404, 404, 404]
    # A folder whose name only begins the same, a link out of a named folder, a folder that is a link itself.
    (tmp_path / "2.png").rename(other / "2.png")
    (tmp_path / "2.png").symlink_to(other / "2.png")
    link = tmp_path / "link"
    link.symlink_to(other)
    gallery = Gallery.create(tmp_path / "stranger", Gallery.open(bare).model)
    (tmp_path / "other-secret").mkdir()
    shutil.copy(tmp_path / "0.png", tmp_path / "other-secret/0.png")
    (other / "out.png").symlink_to(tmp_path / "1.png")
    assert gallery.add([tmp_path / "other-secret/0.png", other / "out.png", other / "2.png"]) == [0, 1, 2]
    for folder in (other, link):
        assert shown(gallery.path, folder) == [404, 404, 200]
    with pytest.raises(ConfigError, match="--images must be a folder"):
        create_app(bare, Settings(images=(tmp_path / "0.png",)))


def test_a_strangers_gallery_cannot_make_the_disk_its_uploads(bare: Path, tmp_path: Path) -> None:
    (bare / "uploads").symlink_to(tmp_path)
    assert shown(bare) == [404, 404, 404]


def test_a_path_that_no_file_can_have_is_no_picture(built: Path, tmp_path: Path) -> None:
    files = ImageFiles(tmp_path, (tmp_path,))
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for path in (None, "", "a\0b", "x" * 5000, str(tmp_path), str(tmp_path / "folder"), str(tmp_path / "pipe")):
        assert files.find(path) is None


def test_an_upload_is_shown(built: Path, key: str, tmp_path: Path, bearer: dict[str, str], query: Query) -> None:
    gallery = Gallery.create(tmp_path / "g", Gallery.open(built).model)
    with client_of(gallery.path, Settings(key=key, writable=True)) as client:
        id = client.post("/api/v1/items", content=query("level"), headers=PNG | bearer).json()["id"]
        assert client.get(f"/api/v1/items/{id}/thumbnail", headers=bearer).status_code == 200


def folders_of(*paths: Path) -> list[str]:
    """Folders of the server that no answer may name."""
    parts = [*paths, *(path.parent for path in paths), Path(kedge.__file__).parent, Path(sys.prefix), Path.home()]
    return sorted({str(path.resolve()) for path in parts if path.resolve() != Path("/")})


def test_no_answer_holds_a_folder_of_the_server(
    writable: TestClient, own_gallery: Path, stripe_files: Path, bearer: dict[str, str], query: Query
) -> None:
    writable.headers.update(bearer)
    picture = query("level")
    answers = [writable.request(method, path, headers=PNG) for method, path in calls_of(writable.app)]
    answers += [
        writable.post("/api/v1/search?method=both&k=100", content=picture, headers=PNG),
        writable.post("/api/v1/items?label=x", content=picture, headers=PNG),
        writable.post("/api/v1/items?label=x", content=picture, headers=PNG),
        writable.get("/api/v1/items?limit=500"),
        writable.get("/api/v1/items/160"),
        writable.get("/api/v1/anchors/1"),
        writable.get("/api/v1/items/1000"),
        writable.get("/api/v1/items/1000/thumbnail"),
        writable.get("/api/v1/nowhere"),
        writable.post("/api/v1/search", content=b"no picture", headers=PNG),
    ]
    assert {200, 201, 204, 404, 409, 422} <= {answer.status_code for answer in answers}
    hidden = folders_of(own_gallery, stripe_files)
    for answer in answers:
        assert not [folder for folder in hidden if folder in answer.text]
        assert not [folder for folder in hidden if folder in str(answer.headers)]


@pytest.mark.parametrize("kind", [GalleryError, ConfigError, DataError, OSError, RuntimeError])
def test_no_error_names_a_file(
    built: Path, reader: TestClient, kind: type[Exception], query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **others: object) -> NoReturn:
        del arguments, others
        raise kind(f"There is something wrong with {built}/lists.")

    for name in ("search_embeddings", "item", "versions"):
        monkeypatch.setattr(Gallery, name, fail)
    answers = [
        reader.post("/api/v1/search", content=query("level"), headers=PNG),
        reader.get("/api/v1/items/0"),
        reader.get("/api/v1/items/0/similar"),
        reader.get("/api/v1/info"),
    ]
    for answer in answers:
        assert answer.status_code >= 400
        assert sentence_of(answer).endswith(".")
        assert str(built) not in answer.text
        assert "lists" not in answer.text


def test_a_gallery_that_is_in_use_does_not_say_where_it_is(
    writable: TestClient, own_gallery: Path, bearer: dict[str, str], query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gallery_module, "_LOCK_SECONDS", 0.1)
    with FileLock(own_gallery / LOCK):
        answer = writable.post("/api/v1/items", content=query("level"), headers=PNG | bearer)
    assert answer.status_code == 503
    assert sentence_of(answer) == "The gallery is not available at the moment; try again."


def test_a_picture_that_is_gone_does_not_say_where_it_was(bare: Path) -> None:
    (bare.parent / "1.png").unlink()
    (bare.parent / "2.png").write_bytes(b"damaged")
    with client_of(bare, Settings(images=(bare.parent,))) as client:
        for id in (1, 2):
            answer = client.get(f"/api/v1/items/{id}/thumbnail")
            assert answer.status_code == 404
            assert sentence_of(answer) == f"There is no image of an item {id}."


# ---------------------------------------------------------------------- what a request names


class Watch:
    """Notes what this process asks of the file system, while it is on."""

    def __init__(self) -> None:
        self.on, self.seen = False, list[str]()
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.on and event.partition(".")[0] in ("open", "os", "shutil", "tempfile", "pathlib", "glob"):
            self.seen.append(f"{event} {arguments}")

    @contextmanager
    def __call__(self) -> Iterator[list[str]]:
        self.seen.clear()
        self.on = True
        try:
            yield self.seen
        finally:
            self.on = False


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


def files_in(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


NAMES = ["../../evil.png", "/tmp/evil.png", "evil.png", "..\\evil.png", "evil.png\0.txt", "~/evil"]


def test_of_a_name_in_a_request_only_a_safe_last_part_reaches_the_file_system(
    writable: TestClient, own_gallery: Path, tmp_path: Path, bearer: dict[str, str], query: Query, watch: Watch
) -> None:
    before = files_in(tmp_path)
    expected = set()
    for row, name in enumerate(NAMES):
        picture, label = query("level", row), name.replace("\0", "")
        form = {"file": (name, picture, "image/png")}
        with watch() as seen:
            searched = writable.post("/api/v1/search", params={"label": name}, files=form, headers=bearer)
        assert [line for line in seen if "evil" in line] == []
        with watch() as seen:
            added = writable.post("/api/v1/items", params={"label": label}, files=form, headers=bearer)
        assert (searched.status_code, added.status_code) == (200, 201)
        kept = added.json()["name"]
        assert re.fullmatch(r"evil[\w.]*", kept)
        assert added.json()["label"] == label
        folder = own_gallery / "uploads" / hashlib.sha256(picture).hexdigest()[:32]
        expected.add(folder / kept)
        # Whatever has the name in it is that file, in the folder of its content, or the one that is renamed to it.
        named = [line for line in seen if "evil" in line]
        assert named
        assert all(f"{folder}/" in line and ".." not in line for line in named)
    new = files_in(tmp_path) - before
    assert {path for path in new if path.is_relative_to(own_gallery / "uploads") and path.is_file()} == expected
    assert all(path.is_relative_to(own_gallery) for path in new)


def test_a_label_cannot_leave_its_string(writable: TestClient, bearer: dict[str, str], query: Query) -> None:
    writable.headers.update(bearer | PNG)
    own = writable.post("/api/v1/items", params={"label": "it's"}, content=query("slanted")).json()["id"]

    def found(label: str) -> list[int]:
        asked = {"label": label, "k": 200, "method": "brute_force"}
        answers = [
            writable.post("/api/v1/search", params=asked, content=query("slanted")),
            writable.get("/api/v1/items/0/similar", params=asked),
        ]
        assert {answer.status_code for answer in answers} == {200}
        ids = [[hit["id"] for hit in answer.json()["searches"][0]["hits"]] for answer in answers]
        listed = [item["id"] for item in writable.get("/api/v1/items", params={"label": label}).json()["items"]]
        assert ids[0] == ids[1] == listed
        return listed

    assert found("it's") == [own]
    for label in (
        "' OR 1=1 --",
        "level' OR 'a'='a",
        "') OR (1=1",
        "\\' OR 1=1 --",
        "x\\",
        "''",
        "'; DROP TABLE items; --",
        '" OR 1=1 --',
        "%",
        "_____",
        "*",
    ):
        assert found(label) == []


# ---------------------------------------------------------------------- what browsers are told


def check_headers(answer: httpx.Response) -> None:
    assert {name: answer.headers.get(name) for name in SAFE_HEADERS} == SAFE_HEADERS
    rules = [rule.split() for rule in answer.headers["content-security-policy"].split(";")]
    assert {name: sources for name, *sources in rules} == NOTHING_FROM_ELSEWHERE


def test_every_answer_tells_browsers_to_be_careful(
    built: Path, key: str, bearer: dict[str, str], query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client_of(built, Settings(key=key, max_bytes=10_000)) as client:

        def ask(expected: int, method: str, path: str, **others: Any) -> httpx.Response:
            others["headers"] = bearer | others.get("headers", {})
            answer = client.request(method, path, follow_redirects=False, **others)
            assert answer.status_code == expected
            check_headers(answer)
            return answer

        ask(200, "GET", "/")
        script = ask(200, "GET", "/page/api.js")
        ask(304, "GET", "/page/api.js", headers={"If-None-Match": script.headers["etag"]})
        ask(200, "GET", "/page/icon.svg")
        assert "no-store" not in ask(200, "GET", "/api/v1/items/0/thumbnail").headers["cache-control"]
        assert ask(200, "GET", "/api/v1/info").headers["cache-control"] == "no-store"
        ask(200, "GET", "/api/v1/openapi.json")
        ask(200, "GET", "/metrics")
        ask(200, "POST", "/api/v1/search", content=query("level"), headers=PNG)
        ask(400, "GET", "/", headers={"Host": "stranger.example"})
        ask(401, "GET", "/api/v1/info", headers={"Authorization": "Bearer no"})
        ask(403, "DELETE", "/api/v1/items/0")
        ask(403, "DELETE", "/api/v1/items/0", headers={"Origin": STRANGER})
        ask(404, "GET", "/nowhere")
        ask(404, "GET", "/page/nothing.js")
        ask(404, "GET", "/api/v1/items/1000000/thumbnail")
        ask(405, "PUT", "/api/v1/info")
        ask(413, "POST", "/api/v1/search", content=bytes(10_001), headers=PNG)
        ask(415, "POST", "/api/v1/search", content=b"<html>", headers={"Content-Type": "text/html"})
        ask(422, "GET", "/api/v1/items/x")

        def fail(*arguments: object) -> NoReturn:
            del arguments
            raise RuntimeError("a secret of the server")

        monkeypatch.setattr(Gallery, "versions", fail)
        assert "secret" not in ask(500, "GET", "/api/v1/info").text
        monkeypatch.setattr(Gallery, "item", lambda *_: fail())
        ask(500, "GET", "/api/v1/items/0")


# ---------------------------------------------------------------------- other sites


def cors_of(answer: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name.startswith("access-control-")}


def preflight(client: TestClient, origin: str, method: str = "POST") -> httpx.Response:
    asked = {
        "Origin": origin,
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    return client.options("/api/v1/search", headers=asked)


def test_no_other_site_may_read_unless_told_otherwise(reader: TestClient, locked: TestClient) -> None:
    for client in (reader, locked):
        for origin in (STRANGER, "null", "http://localhost"):
            answers = [client.get(path, headers={"Origin": origin}) for path in ("/", "/page/api.js", "/api/v1/info")]
            for answer in (*answers, preflight(client, origin)):
                assert cors_of(answer) == {}
            assert not preflight(client, origin).is_success


def test_an_allowed_site_and_only_that_may_read(built: Path, key: str, bearer: dict[str, str], query: Query) -> None:
    with client_of(built, Settings(key=key, origins=(FRIEND,))) as client:
        first = preflight(client, FRIEND)
        assert first.status_code == 200
        assert cors_of(first)["access-control-allow-origin"] == FRIEND
        assert "POST" in cors_of(first)["access-control-allow-methods"]
        assert "authorization" in cors_of(first)["access-control-allow-headers"].lower()
        assert "access-control-allow-credentials" not in cors_of(first)
        check_headers(first)

        from_friend = PNG | {"Origin": FRIEND, "Sec-Fetch-Site": "cross-site"}
        picture = query("level")
        assert client.post("/api/v1/search", content=picture, headers=from_friend).status_code == 401
        answer = client.post("/api/v1/search", content=picture, headers=from_friend | bearer)
        assert answer.status_code == 200
        assert cors_of(answer)["access-control-allow-origin"] == FRIEND

        for origin in (STRANGER, "null", FRIEND + ".stranger.example", "http://friend.example", FRIEND + ":8443"):
            refused = preflight(client, origin)
            assert not refused.is_success
            assert "access-control-allow-origin" not in cors_of(refused)
            read = client.get("/api/v1/info", headers=bearer | {"Origin": origin})
            assert "access-control-allow-origin" not in cors_of(read)
            written = client.post("/api/v1/search", content=picture, headers=PNG | bearer | {"Origin": origin})
            assert written.status_code == 403


def test_only_a_question_before_the_question_needs_no_key(built: Path, key: str) -> None:
    with client_of(built, Settings(key=key, origins=(FRIEND,))) as client:
        for method in ("GET", "HEAD", "POST", "DELETE"):
            asked = {"Origin": FRIEND, "Access-Control-Request-Method": method}
            assert client.request(method, "/api/v1/items/0", headers=asked).status_code == 401
        plain = client.options("/api/v1/items/0", headers={"Origin": FRIEND})
        assert plain.status_code in (401, 405)
        for origin in (STRANGER, "null", ""):
            assert preflight(client, origin).status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": STRANGER},
        {"Origin": "null"},
        {"Origin": "http://localhost:1234"},
        {"Origin": "http://localhost.stranger.example"},
        {"Origin": "http://stranger.example/localhost"},
        {"Origin": "http://["},
        {"Origin": "localhost"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "anything"},
        {"Origin": "http://localhost", "Sec-Fetch-Site": "cross-site"},
        {"Origin": STRANGER, "Sec-Fetch-Site": "same-origin"},
    ],
)
def test_no_other_site_can_write(
    untouched: TestClient, bearer: dict[str, str], query: Query, headers: dict[str, str]
) -> None:
    picture = query("level")
    form = {"file": ("a.png", picture, "image/png")}
    answers = [
        untouched.post("/api/v1/items", content=picture, headers=bearer | PNG | headers),
        untouched.post("/api/v1/items", files=form, headers=bearer | headers),
        untouched.post("/api/v1/search", content=picture, headers=bearer | PNG | headers),
        untouched.delete("/api/v1/items/0", headers=bearer | headers),
    ]
    assert [answer.status_code for answer in answers] == [403] * 4
    assert untouched.get("/api/v1/info", headers=bearer).json()["items"] == 160


def test_another_site_cannot_write_by_reading(untouched: TestClient, bearer: dict[str, str]) -> None:
    for method, path in calls_of(untouched.app):
        if method in ("POST", "DELETE"):
            for other in ("GET", "HEAD", "OPTIONS"):
                tricks = {"X-HTTP-Method-Override": method, "X-Method-Override": method, "Origin": STRANGER}
                untouched.request(other, f"{path}?_method={method}", headers=bearer | tricks)
    assert untouched.get("/api/v1/info", headers=bearer).json()["items"] == 160


def test_programs_and_the_page_itself_may_write(writable: TestClient, bearer: dict[str, str], query: Query) -> None:
    own = {"Origin": "http://localhost"}
    for headers in ({}, own, own | {"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"}):
        answer = writable.post("/api/v1/items", content=query("level"), headers=bearer | PNG | headers)
        assert answer.status_code == 201
        assert writable.delete(f"/api/v1/items/{answer.json()['id']}", headers=bearer | headers).status_code == 204


# ---------------------------------------------------------------------- its names


@pytest.mark.parametrize(
    "host",
    [
        "stranger.example",
        "stranger.example:8000",
        "localhost.stranger.example",
        "127.0.0.1.stranger.example",
        "xlocalhost",
        "127.0.0.1x",
        "[::1",
        "",
        "pictures.example",
    ],
)
def test_a_foreign_name_is_refused(reader: TestClient, locked: TestClient, bearer: dict[str, str], host: str) -> None:
    for path in ("/", "/page/api.js", "/api/v1/health", "/api/v1/info", "/metrics"):
        assert reader.get(path, headers={"Host": host}).status_code == 400
        answer = locked.get(path, headers=bearer | {"Host": host})
        assert answer.status_code == 400
        assert "--allow-host" in sentence_of(answer)


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "LOCALHOST", "127.0.0.1:1", "192.0.2.7", "[::1]:8000", "[2001:db8::1]"]
)
def test_names_of_ones_own_are_fine(reader: TestClient, host: str) -> None:
    assert reader.get("/api/v1/info", headers={"Host": host}).status_code == 200


def test_a_name_can_be_allowed(built: Path) -> None:
    with client_of(built, Settings(hosts=("Pictures.example",))) as client:
        for host in ("pictures.example", "PICTURES.example:443", "localhost"):
            assert client.get("/api/v1/info", headers={"Host": host}).status_code == 200
        for host in ("other.pictures.example", "stranger.example"):
            assert client.get("/api/v1/info", headers={"Host": host}).status_code == 400


def test_names_and_sites_come_from_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found: list[Settings] = []
    monkeypatch.setattr(app_module, "serve", lambda gallery, settings, **others: found.append(settings))
    monkeypatch.delenv("KEDGE_KEY", raising=False)
    verb.serve(tmp_path)
    verb.serve(tmp_path, allow_host=["pictures.example"], allow_origin=[FRIEND], max_upload=3, images=[tmp_path])
    assert [(one.hosts, one.origins, one.max_bytes, one.images) for one in found] == [
        ((), (), 20 * 2**20, ()),
        (("pictures.example",), (FRIEND,), 3 * 2**20, (tmp_path,)),
    ]


# ---------------------------------------------------------------------- the log


def test_no_secret_is_logged(
    locked: TestClient, key: str, bearer: dict[str, str], query: Query, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="kedge.serving"):
        locked.get("/api/v1/info", headers=bearer)
        locked.get("/api/v1/info", params={"key": key})
        locked.get("/", params={"key": key})
        locked.get("/api/v1/info", auth=("kedge", key))
        locked.get("/api/v1/info", cookies={"key": key}, headers={"Referer": f"http://localhost/#key={key}"})
        locked.post("/api/v1/search", params={"label": key}, content=query("level"), headers=bearer | PNG)
        locked.get("/api/v1/items/0", headers={"Authorization": f"Bearer {key} "[:-2]})
    lines = [record.getMessage() for record in caplog.records if record.name == "kedge.serving"]
    assert len(lines) == 7
    assert [line.split()[:3] for line in lines[:3]] == [
        ["GET", "/api/v1/info", "200"],
        ["GET", "/api/v1/info", "401"],
        ["GET", "/", "200"],
    ]
    assert not [line for line in lines if key in line or "?" in line or "Bearer" in line]
    assert not [line for line in lines if key.partition(" ")[2] in line]


def test_no_path_can_forge_a_line_of_the_log(reader: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="kedge.serving"):
        for trick in ("%0A", "%0D%0A", "%1B%5B2J", "%C2%85", "%E2%80%A8", "%00", "%7F", "%FF", "%E2%80%AE"):
            reader.get(f"/nowhere{trick}2026 INFO forged")
    lines = [record.getMessage() for record in caplog.records if record.name == "kedge.serving"]
    assert len(lines) == 9
    for line in lines:
        assert len(line.splitlines()) == 1
        assert line.isascii()
        assert line.isprintable()
        assert line.startswith("GET /nowhere\\")


def test_no_request_can_forge_a_line_of_the_real_log(served: Server) -> None:
    key = {"Authorization": f"Bearer {made_up_key(served)}"}
    assert raw(served, "GET", "/nowhere%0d%0aforged%20line", key)[0] == 404
    assert raw(served, "FORGE", "/nowhere%1b[31mforged", key)[0] in (404, 405)
    with socket.create_connection(place_of(served), timeout=5) as connection:
        connection.sendall(b"forged line\r\n\r\n")
        connection.recv(4096)
    time.sleep(0.1)
    text = served.log.read_text()
    assert "/nowhere\\r\\nforged line 404" in text
    assert not [line for line in text.splitlines() if line.startswith("forged")]
    assert "\x1b" not in text
