"""From the bytes of an image to its vectors: decoder processes that may be killed, and one encoder for all."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from kedge.errors import ImageError
from kedge.images import Preprocessing
from kedge.model import Model
from kedge.serving.metrics import Metrics

__all__ = ["BatchedEncoder", "Decoders", "QueryVectors"]

_PROGRAM = "from kedge.images.decoder import main; main()"


class QueryVectors(NamedTuple):
    """One query in both spaces of a gallery."""

    embedding: np.ndarray
    features: np.ndarray | None
    """None: the gallery keeps none of them, or not of this item."""


_Request = tuple[np.ndarray, "asyncio.Future[QueryVectors]"]


class BatchedEncoder:
    """Dynamic batching: images that arrive while a batch is encoded are the next one; nobody waits for one to fill."""

    def __init__(self, model: Model, batch_size: int, metrics: Metrics) -> None:
        self._model, self._batch_size, self._metrics = model, batch_size, metrics
        self._queue: deque[_Request] = deque()
        # One thread, since each has an OpenMP team of its own.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        self._worker: asyncio.Task[None] | None = None

    async def embed(self, pixels: np.ndarray) -> QueryVectors:
        """Embedding and features of one image of the size that the encoder takes."""
        future: asyncio.Future[QueryVectors] = asyncio.get_running_loop().create_future()
        self._queue.append((pixels, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while batch := self._next_batch():
            self._metrics.batch.observe(len(batch))
            outcomes: Sequence[QueryVectors | Exception]
            try:
                outcomes = await loop.run_in_executor(self._thread, self._embed, [pixels for pixels, _ in batch])
            except Exception as error:
                outcomes = [error] * len(batch)
            for outcome, (_, future) in zip(outcomes, batch, strict=True):
                if not future.done():
                    future.set_exception(outcome) if isinstance(outcome, Exception) else future.set_result(outcome)

    def _next_batch(self) -> list[_Request]:
        """The next requests, as far as their images are of one size."""
        batch: list[_Request] = []
        while self._queue and len(batch) < self._batch_size:
            if batch and self._queue[0][0].shape != batch[0][0].shape:
                break
            request = self._queue.popleft()
            if not request[1].done():  # its client may have given up
                batch.append(request)
        return batch

    def _embed(self, batch: list[np.ndarray]) -> list[QueryVectors]:
        features = self._model.features(torch.from_numpy(np.stack(batch)))
        embeddings = self._model.embed_features(features)
        return list(map(QueryVectors, *(vectors.float().cpu().numpy() for vectors in (embeddings, features))))

    def close(self) -> None:
        """Let the thread go."""
        self._thread.shutdown()


class Decoders:
    """A pool of processes that decode untrusted images, each killed when an image takes longer than `seconds`.

    Threads that decode could not be killed: a few images that take minutes would end the service for all.
    """

    def __init__(self, count: int, seconds: float, max_pixels: int) -> None:
        self._seconds, self._max_pixels = seconds, max_pixels
        self._slots = asyncio.Semaphore(count)
        self._idle: list[Process] = []

    async def pixels(self, content: bytes, preprocessing: Preprocessing) -> np.ndarray:
        """What `preprocessing.to_pixels` makes of an image."""
        square = preprocessing.size, preprocessing.crop_pct, preprocessing.interpolation
        answer, pixels = await self._ask({"square": square}, content)
        return np.frombuffer(bytearray(pixels), np.uint8).reshape(answer["shape"])

    async def thumbnail(self, path: Path, side: int) -> bytes:
        """A small copy of the image in a file, as JPEG."""
        return (await self._ask({"path": str(path), "thumbnail": side}))[1]

    async def close(self) -> None:
        """End the processes."""
        while self._idle:
            await _kill(self._idle.pop())

    async def _ask(self, order: dict[str, Any], content: bytes = b"") -> tuple[dict[str, Any], bytes]:
        """What a process answers; where it does not in time, or dies, another one takes its place."""
        async with self._slots:
            process = self._idle.pop() if self._idle else await _start()
            try:
                async with asyncio.timeout(self._seconds):
                    answer, payload = await _exchange(process, {**order, "max_pixels": self._max_pixels}, content)
            except TimeoutError:
                reason = f"decoding it takes longer than {self._seconds:g} seconds"
                raise ImageError(f"The image cannot be read: {reason}.") from None
            except (OSError, EOFError):
                raise ImageError("The image cannot be read: its decoder failed.") from None
            else:
                self._idle.append(process)
            finally:
                if process not in self._idle:  # also where the request was given up: nobody reads its answer
                    await _kill(process)
        if "error" in answer:
            raise ImageError(answer["error"])
        return answer, payload


async def _start() -> Process:
    modules = os.pathsep.join(part for part in sys.path if part)
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", _PROGRAM),
        env={**os.environ, "PYTHONPATH": modules, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        stdin=PIPE,
        stdout=PIPE,
        stderr=DEVNULL,  # what libtiff says of each damaged file
        start_new_session=True,  # Ctrl-C is for the server, which still answers what it has accepted
    )


async def _kill(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


async def _exchange(process: Process, order: dict[str, Any], content: bytes) -> tuple[dict[str, Any], bytes]:
    orders, answers = process.stdin, process.stdout
    if orders is None or answers is None:
        raise EOFError
    orders.write(json.dumps({**order, "bytes": len(content)}).encode() + b"\n" + content)
    await orders.drain()
    answer = json.loads(await answers.readuntil(b"\n"))
    return answer, await answers.readexactly(answer["bytes"])
