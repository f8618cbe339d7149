"""Run the application under uvicorn until a signal stops it."""

from __future__ import annotations

import asyncio
import signal
import socket
from functools import partial
from pathlib import Path
from typing import cast

import uvicorn
from fastapi import FastAPI
from rich.console import Console

from kedge.errors import ConfigError
from kedge.serving.app import create_app
from kedge.serving.connections import Connection, ConnectionLimiter
from kedge.serving.service import Service
from kedge.serving.settings import Settings

__all__ = ["serve", "uvicorn_config"]

_GRACE_SECONDS = 30
"""How long requests in flight may take after the signal."""
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


def serve(gallery: str | Path, settings: Settings, *, host: str, port: int, generated: bool, console: Console) -> None:
    """Serve a gallery; returns after SIGINT or SIGTERM, once the requests in flight are answered."""
    listening = _listen(host, port)
    app = create_app(gallery, settings)
    name = f"[{host}]" if ":" in host else "127.0.0.1" if host == "0.0.0.0" else host
    address = f"http://{name}:{listening.getsockname()[1]}/"
    console.print(f"The page: {address}{f'#key={settings.key}' if generated else ''}")
    console.print(f"The API:  {address}api/v1/openapi.json")
    if settings.key is not None and not generated:
        console.print("Both want the key that you have set.")
    if not settings.images and not app.state.service.gallery.thumbnails:
        console.print("The gallery keeps no thumbnails: --images FOLDER shows the image files below a folder.")
    console.print("Ctrl-C stops it.")
    # Uvicorn raises the signal that stopped it once more when it is done, which would end this process with an error.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    uvicorn.Server(uvicorn_config(app)).run(sockets=[listening])


def uvicorn_config(app: FastAPI) -> uvicorn.Config:
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
    return listening
