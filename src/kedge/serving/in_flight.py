"""A cap on the bytes of uploads in flight: those that arrive and those that are worked on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

from kedge.serving.errors import Refused
from kedge.serving.metrics import Metrics

__all__ = ["Upload", "UploadBudget"]


class UploadBudget:
    """Counts the bytes of all uploads; where they are too many, the one that has stalled longest is cut off."""

    def __init__(self, limit: int, metrics: Metrics) -> None:
        self.limit, self.held = limit, 0
        self._metrics = metrics
        self._arriving: dict[Upload, None] = {}
        """The upload that has been silent longest first."""

    @contextmanager
    def upload(self) -> Iterator[Upload]:
        """An upload, which is counted until the block ends."""
        upload = Upload(self)
        self._arriving[upload] = None
        try:
            yield upload
        finally:
            self._arriving.pop(upload, None)
            self._count(upload, -upload.size)

    def arrived(self, upload: Upload) -> None:
        """An upload is complete: it is worked on, and not cut off any more."""
        self._arriving.pop(upload, None)

    def grow(self, upload: Upload, count: int) -> None:
        """Count more bytes of an upload, if need be in the place of another one's."""
        if upload.is_cut_off:
            raise TimeoutError
        self._arriving.pop(upload)
        self._arriving[upload] = None
        self._count(upload, count)
        while self.held > self.limit:
            stalled = next(iter(self._arriving))
            if stalled is upload:
                self._metrics.refused.inc()
                raise Refused(HTTPStatus.TOO_MANY_REQUESTS, "The server is busy: try again in a moment.")
            del self._arriving[stalled]
            self._count(stalled, -stalled.size)
            stalled.cut_off()

    def _count(self, upload: Upload, count: int) -> None:
        upload.size += count
        self.held += count
        self._metrics.upload_bytes.set(self.held)


class Upload:
    """One body on its way."""

    def __init__(self, budget: UploadBudget) -> None:
        self.size, self.is_cut_off = 0, False
        self._budget = budget
        self._deadline: asyncio.Timeout | None = None

    def deadline(self, seconds: float) -> asyncio.Timeout:
        """The time until which it must have arrived; sooner if it is cut off."""
        self._deadline = asyncio.timeout(seconds)
        return self._deadline

    def grow(self, count: int) -> None:
        """More has arrived."""
        self._budget.grow(self, count)

    def arrived(self) -> None:
        """All of it has."""
        self._budget.arrived(self)

    def cut_off(self) -> None:
        """Let its deadline pass now."""
        self.is_cut_off = True
        if self._deadline is not None:
            self._deadline.reschedule(asyncio.get_running_loop().time())
