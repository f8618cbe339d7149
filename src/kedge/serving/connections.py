"""Connections: how many there may be, in all and per address, and how long a request may take to arrive.

An incomplete request (nothing yet, part of a header, part of a body) holds a connection and nothing else. Where there
are too many, the one that has taken longest over its request makes room, so that idle connections lock nobody out.
"""

from __future__ import annotations

import asyncio
import ipaddress
import sys
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from kedge.serving.metrics import Metrics
from kedge.serving.security import SAFE_HEADERS, error_response
from kedge.serving.settings import Settings

__all__ = ["Connection", "ConnectionLimiter"]

_BUSY = "The server has too many connections: try again in a moment."
_SLOW = "The request came too slowly: try again."


class ConnectionLimiter:
    """The open connections of a server: a limit on all of them, and one per address."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.settings, self.metrics = settings, metrics
        self.limit = min(settings.connections, _raise_file_limit(2 * settings.connections) // 2)
        self._open: dict[Connection, str] = {}
        """With their addresses."""
        metrics.connections.set_function(lambda: len(self._open))

    def admit(self, connection: Connection) -> bool:
        """Whether a new connection may stay, if need be in the place of one without a complete request."""
        address = _network_of(connection.client)
        neighbours = [other for other, its_address in self._open.items() if its_address == address]
        is_crowded = len(neighbours) >= self.settings.connections_per_address
        if is_crowded or len(self._open) >= self.limit:
            self.metrics.dropped.inc()
            candidates = neighbours if is_crowded else self._open
            incomplete = [other for other in candidates if other.waiting_since is not None]
            if not incomplete:
                return False
            slowest = min(incomplete, key=lambda other: other.waiting_since or 0)
            self.release(slowest)
            slowest.refuse(HTTPStatus.SERVICE_UNAVAILABLE, _BUSY)
        self._open[connection] = address
        return True

    def release(self, connection: Connection) -> None:
        """Forget a connection that is closed or about to be."""
        self._open.pop(connection, None)


class Connection(H11Protocol):
    """Uvicorn's HTTP/1.1 protocol with deadlines for header, body and the reading of answers, and errors in JSON."""

    def __init__(self, limiter: ConnectionLimiter, **others: Any) -> None:
        super().__init__(**others)
        self._limiter = limiter
        self._phase: object = None
        self.waiting_since: float | None = None
        """When the header or body began that is to come; None while a complete request is answered."""
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Let it in or send it away."""
        super().connection_made(transport)
        if self._limiter.admit(self):
            self._watch()
        else:
            self._close(_error(HTTPStatus.SERVICE_UNAVAILABLE, _BUSY))

    def connection_lost(self, exc: Exception | None) -> None:
        """Make room."""
        self._limiter.release(self)
        for timer in (self._deadline, self._write_deadline):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse it, then see what is still to come."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """An answer is not being read: not for ever."""
        super().pause_writing()
        self._write_deadline = self.loop.call_later(self._limiter.settings.seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """It is being read again."""
        super().resume_writing()
        if self._write_deadline is not None:
            self._write_deadline.cancel()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is told so in JSON too."""
        del msg
        self.refuse(HTTPStatus.BAD_REQUEST, "The request cannot be understood: it is not valid HTTP/1.1.")

    def refuse(self, status: HTTPStatus, sentence: str) -> None:
        """Close the connection, with a sentence if a request has begun that is not being answered yet."""
        has_begun = self.conn.their_state is not h11.IDLE or bool(self.conn.trailing_data[0])
        is_answered = self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE)
        # Browsers open connections ahead of need, which must not find an answer there.
        self._close(_error(status, sentence) if has_begun and not is_answered else b"")

    def _close(self, answer: bytes) -> None:
        """Close it, without waiting for somebody who does not read."""
        self.transport.write(answer)
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def _watch(self) -> None:
        """Set the deadline of what is to come next: a whole header, or the rest of a body."""
        phase = self.conn.their_state
        if phase is self._phase:
            return  # a byte more is no reason to wait longer
        self._phase, self.waiting_since = phase, None
        if self._deadline is not None:
            self._deadline.cancel()
        settings = self._limiter.settings
        # Uploads have a limit of their own, whose answer says what was slow; this holds for every other body.
        seconds = {h11.IDLE: settings.header_seconds, h11.SEND_BODY: settings.upload_seconds + settings.seconds}
        if phase in seconds:
            self.waiting_since = self.loop.time()
            self._deadline = self.loop.call_later(seconds[phase], self._too_slow)

    def _too_slow(self) -> None:
        self._limiter.metrics.dropped.inc()
        self._limiter.release(self)
        self.refuse(HTTPStatus.REQUEST_TIMEOUT, _SLOW)


def _error(status: HTTPStatus, sentence: str) -> bytes:
    """A whole answer, for a connection that the application knows nothing of."""
    response = error_response(status, sentence)
    response.headers.update(SAFE_HEADERS | {"Cache-Control": "no-store", "Connection": "close"})
    lines = [b"HTTP/1.1 %d %s" % (status.value, status.phrase.encode())]
    lines += [b"%s: %s" % header for header in response.raw_headers]
    return b"\r\n".join([*lines, b"", bytes(response.body)])


def _raise_file_limit(count: int) -> int:
    """How many of `count` files and sockets this process may have open; its limit is raised as far as allowed."""
    if sys.platform == "win32":
        return count
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return count
    soft = count if hard == resource.RLIM_INFINITY else min(count, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def _network_of(client: tuple[str, int] | None) -> str:
    """The address; of IPv6 the network of 64 bits, since whoever has one address has all of these."""
    host = client[0] if client else ""
    if ":" not in host:
        return host
    return str(ipaddress.ip_network((host.partition("%")[0], 64), strict=False))
