"""A server in this process, until it is told to stop."""

from __future__ import annotations

import asyncio
import ctypes
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import cast

import uvicorn
from fastapi import FastAPI
from rich.console import Console

from kedge.errors import ConfigError
from kedge.serving.app import create_app
from kedge.serving.connections import Connection, ConnectionLimiter
from kedge.serving.service import Service
from kedge.serving.settings import Settings

__all__ = ["config_of", "serve"]

_GRACE_SECONDS = 30
_LAST_SECONDS = 1.0
"""So long whoever is connected may still send a request, once the server is told to stop."""
_ATTACH_FILTER = 26
_NO_NEW_CONNECTIONS = (
    (0x30, 0, 0, 13),
    (0x54, 0, 0, 0x12),
    (0x15, 0, 1, 0x02),
    (0x06, 0, 0, 0),
    (0x06, 0, 0, 2**32 - 1),
)
"""A filter for Linux: of a packet's flags take SYN and ACK; drop it where they are SYN alone, let the others pass."""


def serve(gallery: str | Path, settings: Settings, *, host: str, port: int, generated: bool, console: Console) -> None:
    """Serve a gallery; returns when a signal has ended it and what was accepted is answered."""
    listening = _listen(host, port)
    app = create_app(gallery, settings)
    config = config_of(app)
    name = f"[{host}]" if ":" in host else "127.0.0.1" if host == "0.0.0.0" else host
    address = f"http://{name}:{listening.getsockname()[1]}/"
    console.print(f"The page: {address}{f'#key={settings.key}' if generated else ''}")
    console.print(f"The API:  {address}api/v1/openapi.json")
    if settings.key is not None and not generated:
        console.print("Both want the key that you have set.")
    if not settings.images and not app.state.service.gallery.thumbnails:
        console.print("The gallery keeps no thumbnails: --images FOLDER shows the image files below a folder.")
    console.print("Ctrl-C stops it.")
    # The server raises the signal that ended it once more, when all is done: then there is nothing left to end.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _done)
    _Server(config, app.state.service).run(sockets=[listening])


def config_of(app: FastAPI) -> uvicorn.Config:
    """Uvicorn with our limits on connections."""
    service: Service = app.state.service
    return uvicorn.Config(
        app,
        # Always h11, whose states the deadlines follow; nobody here speaks WebSocket.
        http=cast("type[asyncio.Protocol]", partial(Connection, ConnectionLimiter(service.settings, service.metrics))),
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_GRACE_SECONDS,
        log_config=_LOGS,
    )


class _Server(uvicorn.Server):
    """Stops without losing a request that somebody has sent already."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let nobody else in, answer those who are, then close."""
        self._service.ready = False
        for listening in sockets or []:
            _let_nobody_in(listening)
        # Closed at once, connections whose request is still on its way, or that wait to be accepted, would be reset.
        self.server_state.default_headers = [*self.server_state.default_headers, (b"connection", b"close")]
        end = time.monotonic() + _LAST_SECONDS
        await asyncio.sleep(_LAST_SECONDS / 4)
        while self.server_state.connections and time.monotonic() < end:
            await asyncio.sleep(0.02)
        await super().shutdown(sockets)


def _let_nobody_in(listening: socket.socket) -> None:
    """Those who knock from now on are refused as soon as the socket is closed, those in its queue are not lost.

    Where the system has no such filter, whoever comes in the very moment of closing is reset.
    """
    if not sys.platform.startswith("linux"):
        return
    steps = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in _NO_NEW_CONNECTIONS))
    with suppress(OSError):
        program = struct.pack("HP", len(_NO_NEW_CONNECTIONS), ctypes.addressof(steps))
        listening.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)


def _done(number: int, frame: FrameType | None) -> None:
    del number, frame


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{host}:{port} cannot be listened on ({reason}): choose another --host or --port."
        ) from error
    listening.set_inheritable(True)
    return listening


_LOGS = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"plain": {"format": "%(asctime)s %(levelname)s %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "plain"}},
    "loggers": {
        "uvicorn": {"handlers": ["stderr"], "level": "WARNING", "propagate": False},
        "kedge.serving": {"handlers": ["stderr"], "level": "INFO", "propagate": False},
    },
}
