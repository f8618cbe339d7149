"""Limits on work in flight: concurrent requests (429 beyond), and bytes of uploads held in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus

from kedge.serving.errors import Refused
from kedge.serving.metrics import Metrics

__all__ = ["ConcurrencyLimiter", "Upload", "UploadBudget"]

_BUSY = "The server is busy: try again in a moment."


class ConcurrencyLimiter:
    """At most `limit` requests in flight, each for at most `seconds`; excess requests get 429."""

    def __init__(self, limit: int, seconds: float, metrics: Metrics) -> None:
        self._limit, self._seconds, self._metrics = limit, seconds, metrics
        self._in_flight = 0

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold one of the slots until the block ends."""
        if self._in_flight >= self._limit:
            self._metrics.refused.inc()
            raise Refused(HTTPStatus.TOO_MANY_REQUESTS, _BUSY)
        self._in_flight += 1
        self._metrics.in_flight.set(self._in_flight)
        try:
            async with asyncio.timeout(self._seconds):
                yield
        except TimeoutError:
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "That took too long: try again.") from None
        finally:
            self._in_flight -= 1
            self._metrics.in_flight.set(self._in_flight)


class Upload:
    """A request body that is arriving."""

    def __init__(self) -> None:
        self.size, self.is_cut_off = 0, False
        self._deadline: asyncio.Timeout | None = None

    def deadline(self, seconds: float) -> asyncio.Timeout:
        """A timeout for the whole body, which passes sooner if the upload is cut off."""
        self._deadline = asyncio.timeout(seconds)
        return self._deadline

    def cut_off(self) -> None:
        """Let the deadline pass now."""
        self.is_cut_off = True
        if self._deadline is not None:
            self._deadline.reschedule(asyncio.get_running_loop().time())


class UploadBudget:
    """Counts the bytes of all uploads; beyond the limit, the upload that has stalled longest is cut off."""

    def __init__(self, limit: int, metrics: Metrics) -> None:
        self.limit, self.held = limit, 0
        self._metrics = metrics
        self._arriving: dict[Upload, None] = {}
        """The upload that has been silent longest comes first."""

    @contextmanager
    def upload(self) -> Iterator[Upload]:
        """An upload that is counted until the block ends."""
        upload = Upload()
        self._arriving[upload] = None
        try:
            yield upload
        finally:
            self._arriving.pop(upload, None)
            self._count(upload, -upload.size)

    def complete(self, upload: Upload) -> None:
        """The whole body has arrived: it is not cut off any more."""
        self._arriving.pop(upload, None)

    def grow(self, upload: Upload, count: int) -> None:
        """Count bytes that arrived, if need be in the place of another upload's."""
        if upload.is_cut_off:
            raise TimeoutError
        self._arriving.pop(upload)
        self._arriving[upload] = None
        self._count(upload, count)
        while self.held > self.limit:
            stalled = next(iter(self._arriving))
            if stalled is upload:
                self._metrics.refused.inc()
                raise Refused(HTTPStatus.TOO_MANY_REQUESTS, _BUSY)
            del self._arriving[stalled]
            self._count(stalled, -stalled.size)
            stalled.cut_off()

    def _count(self, upload: Upload, count: int) -> None:
        upload.size += count
        self.held += count
        self._metrics.upload_bytes.set(self.held)
