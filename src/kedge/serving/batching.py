"""Pictures that arrive together go through the encoder together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from http import HTTPStatus

import numpy as np
import torch
from torch import Tensor

from kedge.model import Model
from kedge.serving.errors import Refused
from kedge.serving.metrics import Metrics

__all__ = ["Gate", "SharedEncoder"]

_CPU_PIXELS = 8 * 224 * 224
"""What a processor's caches have room for: in larger batches each picture takes longer."""


class Gate:
    """Lets so many requests in, each for so many seconds; the others are told to come back."""

    def __init__(self, most: int, seconds: float, metrics: Metrics) -> None:
        self._most, self._seconds, self._metrics = most, seconds, metrics
        self._inside = 0

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """Be one of those inside."""
        if self._inside >= self._most:
            self._metrics.refused.inc()
            raise Refused(HTTPStatus.TOO_MANY_REQUESTS, "The server is busy: try again in a moment.")
        self._inside += 1
        self._metrics.inside.set(self._inside)
        try:
            async with asyncio.timeout(self._seconds):
                yield
        except TimeoutError:
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "That took too long: try again.") from None
        finally:
            self._inside -= 1
            self._metrics.inside.set(self._inside)


class SharedEncoder:
    """One encoder for all requests.

    Nobody waits for others to come: whatever has arrived while a batch was worked on is the next one.
    """

    def __init__(self, model: Model, most: int, metrics: Metrics) -> None:
        self._model, self._metrics = model, metrics
        if model.device.type == "cpu":
            most = max(1, min(most, _CPU_PIXELS // (model.preprocessing.size or 1) ** 2))
        self._most = most
        self._waiting: deque[tuple[Tensor, asyncio.Future[np.ndarray]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        self._worker: asyncio.Task[None] | None = None

    async def embed(self, pixels: Tensor) -> np.ndarray:
        """The embedding of one picture of the size that the encoder wants."""
        promised = asyncio.get_running_loop().create_future()
        self._waiting.append((pixels, promised))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        found: np.ndarray = await promised
        return found

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            some = self._next()
            if not some:
                continue
            self._metrics.batch.observe(len(some))
            try:
                found = await loop.run_in_executor(self._thread, self._embed, [pixels for pixels, _ in some])
            except Exception as error:
                for _, promised in some:
                    if not promised.done():
                        promised.set_exception(error)
                continue
            for vector, (_, promised) in zip(found, some, strict=True):
                if not promised.done():
                    promised.set_result(vector)

    def _next(self) -> list[tuple[Tensor, asyncio.Future[np.ndarray]]]:
        """Those that come next, as far as they are of one size."""
        some: list[tuple[Tensor, asyncio.Future[np.ndarray]]] = []
        while self._waiting and len(some) < self._most:
            if some and self._waiting[0][0].shape != some[0][0].shape:
                break
            one = self._waiting.popleft()
            if not one[1].done():  # whoever gave up meanwhile needs no answer
                some.append(one)
        return some

    def _embed(self, several: list[Tensor]) -> np.ndarray:
        found: np.ndarray = self._model.embed_pixels(torch.stack(several)).float().cpu().numpy()
        return found

    def close(self) -> None:
        """Let the thread go."""
        self._thread.shutdown()
