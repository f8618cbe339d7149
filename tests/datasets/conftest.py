"""A local web server that can also misbehave, and a data root of the test's own."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kedge.datasets import download
from kedge.datasets.download import Source


@dataclass
class Server:
    url: str
    files: dict[str, bytes] = field(default_factory=dict)
    requests: list[str | None] = field(default_factory=list)  # the Range header of every request
    cut_after: list[int] = field(default_factory=list)  # the next answers break off after so many bytes
    statuses: list[int] = field(default_factory=list)  # the next answers are these errors; 0 is none
    ranges: bool = True

    def source(self, name: str, content: bytes) -> Source:
        self.files[name] = content
        return Source(f"{self.url}/{name}", f"md5:{hashlib.md5(content).hexdigest()}")


def pack(members: dict[str, bytes], kind: str = "tar", extra: tuple[tarfile.TarInfo, ...] = ()) -> bytes:
    """An archive of these members."""
    stream = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(stream, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        return stream.getvalue()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for member in extra:
            tar.addfile(member)
    return stream.getvalue()


@pytest.fixture(name="pack")
def pack_fixture() -> Callable[..., bytes]:
    return pack


def handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            server.requests.append(wanted)
            content = server.files.get(self.path.removeprefix("/"))
            status = server.statuses.pop(0) if server.statuses else 0
            if status or content is None:
                self.send_error(status or 404)
                return
            start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and server.ranges else 0
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            stop = start + server.cut_after.pop(0) if server.cut_after else len(content)
            self.wfile.write(content[start:stop])

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(download, "PAUSE", 0.0)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    running = Server("")
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), handler(running))
    running.url = f"http://127.0.0.1:{httpd.server_port}"
    threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True).start()
    yield running
    httpd.shutdown()
    httpd.server_close()


@pytest.fixture(autouse=True)
def root(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("data root")
    monkeypatch.setenv("KEDGE_DATA", str(folder))
    return folder


@pytest.fixture
def leftovers(root: Path) -> Callable[[], list[str]]:
    """Names under the data root that look half-made."""
    return lambda: [path.name for path in root.rglob("*") if path.name.startswith(".")]
