"""What requests share: threads that answer several at once, and decoder processes that may be killed."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from kedge.errors import ImageError
from kedge.images import Preprocessing

__all__ = ["Batches", "Decoders"]

K = TypeVar("K")
Q = TypeVar("Q")
A = TypeVar("A")

_PROGRAM = "from kedge.images.decoder import main; main()"


class Request(NamedTuple):
    """What is asked, and who waits for the answer; requests of the same `work` and `kind` may share a batch."""

    work: Callable[[Any, list[Any]], Sequence[Any]]
    kind: Any
    query: Any
    answer: asyncio.Future[Any]


class Batches:
    """Dynamic batching: requests that come while the threads are busy are the next batch; none waits for it to fill."""

    def __init__(self, size: int, threads: int, name: str) -> None:
        self._size, self._threads = size, threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._queue: deque[Request] = deque()
        self._workers: set[asyncio.Task[None] | None] = set()

    async def run(self, work: Callable[[K, list[Q]], Sequence[A]], kind: K, query: Q) -> A:
        """The answer of `work` to a query, in a thread, with others of the same kind."""
        answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._queue.append(Request(work, kind, query, answer))
        if len(self._workers) < self._threads:
            self._workers.add(asyncio.create_task(self._work()))
        return await answer

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while batch := self._next_batch():
                (work, kind, _, _), queries = batch[0], [request.query for request in batch]
                outcomes: Sequence[Any]
                try:
                    outcomes = await loop.run_in_executor(self._pool, work, kind, queries)
                except Exception as error:
                    outcomes = [error] * len(batch)
                for outcome, (_, _, _, answer) in zip(outcomes, batch, strict=True):
                    if not answer.done():
                        is_error = isinstance(outcome, Exception)
                        answer.set_exception(outcome) if is_error else answer.set_result(outcome)
        finally:
            self._workers.discard(asyncio.current_task())

    def _next_batch(self) -> list[Request]:
        """The next requests, as far as they may share a batch."""
        batch: list[Request] = []
        while self._queue and len(batch) < self._size:
            work, kind, _, answer = self._queue[0]
            if batch and (work, kind) != (batch[0].work, batch[0].kind):
                break
            request = self._queue.popleft()
            if not answer.done():  # its client may have given up
                batch.append(request)
        return batch

    def close(self) -> None:
        """Let the threads go."""
        self._pool.shutdown()


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
