"""Connections that never finish, over real sockets: they are closed, make room, and keep nobody waiting."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from kedge.serving import connections
from kedge.serving.connections import ConnectionLimiter
from kedge.serving.metrics import Metrics
from kedge.serving.settings import Settings
from kedge.serving.uploads import Uploads

Query = Callable[..., bytes]
HEADER = b"GET /api/v1/health HTTP/1.1\r\nHost: localhost\r\n\r\n"
LONG = 30
"""Seconds until a test fails that waits for an answer."""


class Server:
    """Connections to a server, and what it counts."""

    def __init__(self, server: Any) -> None:
        self.port, self.service, self._server = server.port, server.service, server.uvicorn

    def connect(self, content: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), LONG, (source, 0))
        connection.sendall(content)
        return connection

    def ask(self, content: bytes, source: str = "127.0.0.1") -> tuple[int, dict[str, Any]]:
        with self.connect(content, source) as connection:
            return answer_of(connection)

    def headers(self) -> list[int]:
        """How many bytes of a header have arrived on each connection that has sent a part of one."""
        found: list[Any] = list(self._server.server_state.connections)
        return sorted(len(one.conn.trailing_data[0]) for one in found if one.conn.trailing_data[0])

    def count(self, name: str) -> float:
        return float(self.service.metrics.registry.get_sample_value(name) or 0)


Serving = Callable[..., AbstractContextManager[Server]]


@pytest.fixture(scope="session")
def serving(serving_in_thread: Callable[..., AbstractContextManager[Any]]) -> Serving:
    @contextmanager
    def start(gallery: Path, **settings: Any) -> Iterator[Server]:
        with serving_in_thread(gallery, **settings) as server:
            yield Server(server)

    return start


def answer_of(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """Status and JSON of one answer."""
    found = b""
    while b"\r\n\r\n" not in found:
        part = connection.recv(65536)
        assert part, f"The connection was closed without an answer: {found!r}"
        found += part
    head, _, body = found.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
    while len(body) < length:
        body += connection.recv(65536)
    assert b"content-type: application/json" in head.lower()
    assert b"x-content-type-options: nosniff" in head.lower()
    return int(head[9:12]), json.loads(body)


def is_closed(connection: socket.socket) -> bool:
    """Whether nothing more comes; waits until it is known."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def upload(content: bytes, length: int | None = None) -> bytes:
    """A search with the beginning of a picture of this length."""
    head = "POST /api/v1/search?k=1 HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\n"
    return f"{head}Content-Length: {length or len(content)}\r\n\r\n".encode() + content


# ---------------------------------------------------------------------- deadlines


def test_a_header_must_be_complete_in_time(built: Path, serving: Serving) -> None:
    with serving(built, header_seconds=0.3) as server, server.connect(HEADER[:20]) as slow, server.connect() as silent:
        assert answer_of(slow) == (408, {"error": "The request came too slowly: try again."})
        assert is_closed(slow)
        assert is_closed(silent)  # without an answer: nothing was asked
        wait_until(lambda: server.count("kedge_connections") == 0)


def test_a_header_that_trickles_is_not_waited_for(built: Path, serving: Serving) -> None:
    with serving(built, header_seconds=0.5) as server, server.connect() as slow:
        stop = threading.Event()

        def trickle() -> None:
            for byte in HEADER[:-1] * 1000:
                if stop.wait(0.05):
                    return
                try:
                    slow.send(bytes([byte]))
                except OSError:
                    return

        thread = threading.Thread(target=trickle, daemon=True)
        thread.start()
        assert answer_of(slow)[0] == 408
        stop.set()
        thread.join(LONG)


def test_the_next_header_of_a_connection_must_be_complete_in_time_too(built: Path, serving: Serving) -> None:
    with serving(built, header_seconds=0.5) as server, server.connect(HEADER) as slow:
        assert answer_of(slow)[0] == 200
        slow.sendall(HEADER[:20])
        assert answer_of(slow)[0] == 408


def test_a_body_that_nobody_reads_must_be_complete_in_time(built: Path, serving: Serving) -> None:
    with (
        serving(built, upload_seconds=0.2, seconds=0.3) as server,
        server.connect(HEADER[:-2] + b"Content-Length: 100\r\n\r\nhalf") as slow,
    ):
        assert answer_of(slow)[0] == 200
        slow.sendall(b"a little more")  # ends what uvicorn has for idle connections
        assert is_closed(slow)


def test_who_does_not_read_the_answer_is_not_waited_for(built: Path, serving: Serving) -> None:
    with serving(built, seconds=0.5) as server:
        unread = socket.socket()
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        unread.settimeout(LONG)
        with unread:
            unread.connect(("127.0.0.1", server.port))
            asked = HEADER.replace(b"/api/v1/health", b"/api/v1/items?limit=500")
            unread.setblocking(False)
            end = time.monotonic() + LONG
            while time.monotonic() < end:
                try:
                    unread.send(asked)
                except BlockingIOError:
                    time.sleep(0.01)  # answers fill all buffers on the way
                except OSError:
                    break
            assert server.count("kedge_connections") == 0


# ---------------------------------------------------------------------- how many


def test_idle_connections_lock_nobody_out(built: Path, serving: Serving) -> None:
    with serving(built, connections_per_address=20) as server, ExitStack() as stack:
        idle = [stack.enter_context(server.connect()) for _ in range(40)]
        for _ in range(5):
            assert server.ask(HEADER) == (200, {"status": "alive"})
        assert server.count("kedge_connections") <= 20
        assert all(is_closed(connection) for connection in idle[:20])
        idle[-1].sendall(HEADER)  # those that came first went first
        assert answer_of(idle[-1])[0] == 200


def test_connections_that_are_kept_for_a_next_request_make_room(built: Path, serving: Serving) -> None:
    with serving(built, connections_per_address=2) as server, ExitStack() as stack:
        kept = [stack.enter_context(server.connect(HEADER)) for _ in range(2)]
        assert [answer_of(connection)[0] for connection in kept] == [200, 200]
        assert server.ask(HEADER)[0] == 200
        assert is_closed(kept[0])


def test_whoever_makes_room_is_told_so(built: Path, serving: Serving) -> None:
    with serving(built, connections_per_address=2) as server, ExitStack() as stack:
        first = stack.enter_context(server.connect(HEADER[:10]))
        wait_until(lambda: server.headers() == [10])
        second = stack.enter_context(server.connect(HEADER[:30]))
        wait_until(lambda: server.headers() == [10, 30])
        first.sendall(HEADER[10:20])  # a byte more does not help
        wait_until(lambda: server.headers() == [20, 30])
        assert server.ask(HEADER)[0] == 200
        assert answer_of(first) == (503, {"error": connections._BUSY})
        second.sendall(HEADER[30:])
        assert answer_of(second)[0] == 200


def test_the_cap_is_per_address(built: Path, serving: Serving) -> None:
    with serving(built, connections_per_address=3, connections=100) as server, ExitStack() as stack:
        other = stack.enter_context(server.connect(HEADER[:20], "127.0.0.2"))
        for _ in range(10):
            stack.enter_context(server.connect(HEADER[:20], "127.0.0.3"))
        wait_until(lambda: server.count("kedge_connections_dropped_total") == 7)
        assert server.count("kedge_connections") == 4
        other.sendall(HEADER[20:])
        assert answer_of(other)[0] == 200


def test_the_cap_of_all_addresses(built: Path, serving: Serving) -> None:
    with serving(built, connections=5) as server, ExitStack() as stack:
        for number in range(10):
            stack.enter_context(server.connect(b"", f"127.0.0.{number + 2}"))
        wait_until(lambda: server.count("kedge_connections_dropped_total") == 5)
        assert server.count("kedge_connections") == 5
        assert server.ask(HEADER)[0] == 200


def test_a_request_that_is_worked_on_is_not_put_out(built: Path, serving: Serving, query: Query) -> None:
    go_on = threading.Event()
    with serving(built, connections_per_address=2) as server, ExitStack() as stack:
        embed = server.service.embed

        async def slowly(pixels: Any) -> Any:
            await asyncio.to_thread(go_on.wait, LONG)
            return await embed(pixels)

        server.service.embed = slowly
        busy = [stack.enter_context(server.connect(upload(query("level", row)))) for row in range(2)]
        wait_until(lambda: server.count("kedge_requests_inside") == 2)
        assert server.ask(b"") == (503, {"error": connections._BUSY})
        go_on.set()
        assert [answer_of(connection)[0] for connection in busy] == [200, 200]


def test_connections_of_an_ipv6_network_are_one_address() -> None:
    found = [connections._network_of((host, 1)) for host in ("2001:db8::1", "2001:db8::2", "2001:db8:0:1::1", "::1%1")]
    assert found[0] == found[1] != found[2]
    assert connections._network_of(("127.0.0.1", 1)) != connections._network_of(("127.0.0.2", 1))
    assert connections._network_of(None) == ""


def test_no_more_connections_than_files_can_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1000))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    assert ConnectionLimiter(Settings(connections=1024), Metrics()).limit == 500
    assert raised == [(1000, 1000)]


def test_what_is_no_http_is_told_so_in_json(built: Path, serving: Serving) -> None:
    with serving(built) as server:
        for content in (b"what is this\r\n\r\n", HEADER.replace(b"GET", b"G\x00T"), b"GET /" + b"x" * 70_000):
            status, said = server.ask(content)
            assert status == 400
            assert said["error"].endswith(".")
        # After an answer has begun there is nothing to say any more.
        with server.connect(HEADER[:-2] + b"Transfer-Encoding: chunked\r\n\r\n") as chunked:
            assert answer_of(chunked)[0] == 200
            chunked.sendall(b"no chunk\r\n")
            assert is_closed(chunked)


# ---------------------------------------------------------------------- slots and bytes


def test_half_bodies_hold_no_slot(built: Path, serving: Serving, query: Query) -> None:
    picture = query("level")
    with serving(built, concurrency=2) as server, ExitStack() as stack:
        half = [stack.enter_context(server.connect(upload(picture[:-10], len(picture)))) for _ in range(8)]
        wait_until(lambda: server.count("kedge_upload_bytes") == 8 * (len(picture) - 10))
        assert server.count("kedge_requests_inside") == 0
        assert server.ask(upload(picture))[0] == 200
        half[3].sendall(picture[-10:])
        assert answer_of(half[3])[0] == 200
        wait_until(lambda: server.count("kedge_upload_bytes") == 7 * (len(picture) - 10))


def test_the_upload_that_stalled_longest_makes_room(built: Path, serving: Serving, query: Query) -> None:
    picture = query("level")
    limits = {"upload_memory": 10_000, "max_bytes": 10_000}
    with serving(built, **limits) as server, ExitStack() as stack:
        half = []
        for count in range(3):
            half.append(stack.enter_context(server.connect(upload(bytes(3000), 4000))))
            wait_until(lambda: server.count("kedge_upload_bytes") == 3000 * (count + 1))  # noqa: B023
        half[0].sendall(bytes(500))
        wait_until(lambda: server.count("kedge_upload_bytes") == 9500)
        whole = upload(picture + bytes(2000))
        assert server.ask(whole)[0] == 200
        assert answer_of(half[1]) == (408, {"error": "The upload took too long; try again."})
        wait_until(lambda: server.count("kedge_upload_bytes") == 6500)


def test_uploads_that_are_worked_on_are_not_cut_off() -> None:
    def arriving(size: int) -> Request:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": bytes(size), "more_body": False}

        return Request({"type": "http", "headers": [(b"content-type", b"image/png")]}, receive)

    async def try_it() -> None:
        uploads = Uploads(Settings(upload_memory=100, max_bytes=100), Metrics())
        async with uploads.image(arriving(80)) as worked_on:
            with pytest.raises(HTTPException) as refused:
                async with uploads.image(arriving(30)):
                    pytest.fail("There is no room for it.")
            assert refused.value.status_code == HTTPStatus.TOO_MANY_REQUESTS
            assert (len(worked_on.content), uploads.held) == (80, 80)
        assert uploads.held == 0

    asyncio.run(try_it())
