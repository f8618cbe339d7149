"""Clients that never finish, for `slow_clients.py`: a process that imports little, so that it takes little of a core.

    python benchmarks/never_finish.py PORT SLOW_HEADERS HALF_BODIES BODY

Against 127.0.0.1 alone, until it is killed. Says `connected` once all of them are.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress

HEADER = b"GET /api/v1/info HTTP/1.1\r\nHost: localhost\r\nX-Nothing: " + b"x" * 10_000
POST = "POST /api/v1/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: {}\r\n\r\n"


class Clients:
    """All of them, and how many have been connected."""

    def __init__(self, port: int, slow_headers: int, half_bodies: int, body: int) -> None:
        self.port, self.body = port, body
        self.slow_headers, self.half_bodies = slow_headers, half_bodies
        self.connected = 0

    async def run(self) -> None:
        """For ever."""
        acts = [self.slow_header] * self.slow_headers + [self.half_body] * self.half_bodies
        await asyncio.gather(*(self.again(act) for act in acts))

    async def again(self, act: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> None:
        """Connect and act; when it is over, wait a second and come back."""
        is_first = True
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                if is_first:
                    self.connected += 1
                    is_first = False
                    if self.connected == self.slow_headers + self.half_bodies:
                        print("connected", flush=True)
                with suppress(OSError):
                    await act(reader, writer)
                writer.close()
            await asyncio.sleep(1)

    async def slow_header(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A byte per second, until it is answered or closed."""
        for byte in HEADER:
            writer.write(bytes([byte]))
            try:
                await asyncio.wait_for(reader.read(1), 1)
            except TimeoutError:
                continue
            return

    async def half_body(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Half of what was promised, then nothing."""
        writer.write(POST.format(self.body).encode() + bytes(self.body // 2))
        await reader.read(1)


if __name__ == "__main__":
    asyncio.run(Clients(*map(int, sys.argv[1:])).run())
