"""Decode untrusted images in child processes that are killed when they take too long."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kedge.errors import ImageError

__all__ = ["Decoders"]

T = TypeVar("T")
_PROGRAM = "from kedge.images.decoder import main; main()"


class Decoders:
    """A pool of decoder processes, each with a thread that waits for it and kills it at its time limit.

    Threads that decode could not be killed: a few images that take minutes would end the service for all.
    """

    def __init__(self, count: int, seconds: float, max_pixels: int) -> None:
        self._seconds, self._max_pixels = seconds, max_pixels
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="decode")
        self._idle: queue.LifoQueue[_Child] = queue.LifoQueue()
        for _ in range(count):
            self._idle.put(_Child())

    async def run(self, act: Callable[..., T], *arguments: object) -> T:
        """Wait for one of the methods below, or for what calls them, in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, act, *arguments)

    def pixels(self, content: bytes, size: int | None) -> np.ndarray:
        """The centre of an image as uint8, 3 x size x size; without a size, all of it."""
        answer, pixels = self._ask({"size": size}, content)
        return np.frombuffer(bytearray(pixels), np.uint8).reshape(answer["shape"])

    def thumbnail(self, path: Path, side: int) -> bytes:
        """A small copy of the image in a file, as JPEG."""
        return self._ask({"path": str(path), "thumbnail": side})[1]

    def close(self) -> None:
        """Finish what was begun, and end the processes."""
        self._threads.shutdown()
        while not self._idle.empty():
            self._idle.get().end()

    def _ask(self, order: dict[str, Any], content: bytes = b"") -> tuple[dict[str, Any], bytes]:
        child = self._idle.get()
        try:
            answer, payload = child.ask({**order, "max_pixels": self._max_pixels}, content, self._seconds)
        finally:
            self._idle.put(child)
        if "error" in answer:
            raise ImageError(answer["error"])
        return answer, payload


class _Child:
    """A process that decodes one image after the other, started when there is something to do."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, order: dict[str, Any], content: bytes, seconds: float) -> tuple[dict[str, Any], bytes]:
        """What the process answers; where it does not in time, or dies, it is replaced."""
        process = self._process = self._process or _start()
        late = threading.Event()

        def kill() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, kill)
        timer.start()
        try:
            answer, payload = _exchange(process, order, content)
        except (OSError, EOFError):
            reason = f"decoding it takes longer than {seconds:g} seconds" if late.is_set() else "its decoder failed"
            self.end()
            raise ImageError(f"The image cannot be read: {reason}.") from None
        finally:
            timer.cancel()
            timer.join()
        if late.is_set():  # in the very moment of the answer
            self.end()
        return answer, payload

    def end(self) -> None:
        """Kill the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _start() -> subprocess.Popen[bytes]:
    search = os.pathsep.join(part for part in sys.path if part)
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _PROGRAM],
        env={**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # what libtiff says of each damaged file
        start_new_session=True,  # Ctrl-C is for the server, which still answers what it has accepted
    )


def _exchange(process: subprocess.Popen[bytes], order: dict[str, Any], content: bytes) -> tuple[dict[str, Any], bytes]:
    orders, answers = process.stdin, process.stdout
    if orders is None or answers is None:
        raise EOFError
    orders.write(json.dumps({**order, "bytes": len(content)}).encode() + b"\n")
    orders.write(content)
    orders.flush()
    line = answers.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    answer = json.loads(line)
    payload = answers.read(answer["bytes"])
    if len(payload) < answer["bytes"]:
        raise EOFError
    return answer, payload
