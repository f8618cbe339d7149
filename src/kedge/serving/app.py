"""The ASGI application (API, page, metrics, and the security middleware in front of them), and uvicorn to run it."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import cast

import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from fastapi.dependencies.utils import get_flat_params
from fastapi.exceptions import RequestValidationError
from fastapi.params import Query
from fastapi.responses import FileResponse, JSONResponse
from fastapi.security import HTTPBearer
from rich.console import Console
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.staticfiles import StaticFiles

import kedge
from kedge.errors import ConfigError, GalleryError, ImageError, KedgeError
from kedge.serving.connections import Connection, ConnectionLimiter
from kedge.serving.metrics import Metrics
from kedge.serving.routes import items, meta, search
from kedge.serving.schemas import Error
from kedge.serving.security import API, SecurityMiddleware, error_response
from kedge.serving.service import Service
from kedge.serving.settings import Settings

__all__ = ["create_app", "serve", "uvicorn_config"]

_PAGE = Path(__file__).parent / "page"
_GRACE_SECONDS = 30
"""How long requests in flight may take after the signal."""
_FAILED = "Internal server error; try again."
_log = logging.getLogger(__name__)


def create_app(gallery: str | Path, settings: Settings | None = None) -> FastAPI:
    """An ASGI application over the gallery in a folder or at an address."""
    settings = settings or Settings()
    metrics = Metrics()
    service = Service(gallery, settings, metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        del app
        await service.start()
        yield
        await service.close()

    app = FastAPI(
        title="Kedge",
        summary="Find images in a gallery.",
        version=kedge.__version__,
        lifespan=lifespan,
        openapi_url=f"{API}/openapi.json",
        docs_url=None,  # they would be fetched from another host
        redoc_url=None,
        responses={"default": {"model": Error, "description": "What is wrong, in one sentence."}},
    )
    app.state.service = service
    _answer_errors(app)
    # The middleware asks for the key before anything is read; this only says so in the description.
    bearer = [Depends(HTTPBearer(auto_error=False))] if settings.key is not None else []
    checked = [Depends(_refuse_unknown_parameters)]
    for router in (search.router, items.router, meta.router):
        app.include_router(router, prefix=API, dependencies=[*bearer, *checked])
    app.include_router(meta.probes, prefix=API, dependencies=checked)

    @app.get("/metrics", include_in_schema=False)
    async def prometheus() -> Response:
        await run_in_threadpool(service.catalogue)
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(_PAGE / "index.html", headers={"Cache-Control": "no-cache"})

    app.mount("/page", StaticFiles(directory=_PAGE), name="page")
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["Authorization", "Content-Type"],
        )
    app.add_middleware(SecurityMiddleware, settings=settings, metrics=metrics)
    return app


def serve(gallery: str | Path, settings: Settings, *, host: str, port: int, generated: bool, console: Console) -> None:
    """Serve a gallery; returns after SIGINT or SIGTERM, once the requests in flight are answered."""
    listening = _listen(host, port)
    app = create_app(gallery, settings)
    name = f"[{host}]" if ":" in host else "127.0.0.1" if host == "0.0.0.0" else host
    address = f"http://{name}:{listening.getsockname()[1]}/"
    console.print(f"The page: {address}{f'#key={settings.key}' if generated else ''}")
    console.print(f"The API:  {address}api/v1/openapi.json")
    if settings.key is not None and not generated:
        console.print("Both need the API key that you have set.")
    if not settings.images and not app.state.service.gallery.thumbnails:
        console.print("The gallery has no thumbnails; pass --images FOLDER to show the image files in a folder.")
    console.print("Press Ctrl-C to stop.")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("kedge.serving").setLevel(logging.INFO)
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
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )


async def _refuse_unknown_parameters(request: Request) -> None:
    """Refuse query parameters that the endpoint does not have: a misspelt one would silently change nothing."""
    fields = get_flat_params(request.scope["route"].dependant)
    known = [field.alias for field in fields if isinstance(field.field_info, Query)]
    unknown = next((name for name in request.query_params if name not in known), None)
    if unknown is not None:
        raise HTTPException(422, f"Unknown parameter {unknown[:50]!r}; known: {', '.join(known) or 'none'}.")


def _listen(host: str, port: int) -> socket.socket:
    is_ipv6 = ":" in host
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, dualstack_ipv6=is_ipv6 and socket.has_dualstack_ipv6())
    except (OSError, OverflowError) as error:
        reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        sentence = f"{host}:{port} is not available ({reason}); choose another --host or --port."
        raise ConfigError(sentence) from error


def _answer_errors(app: FastAPI) -> None:
    """Register handlers that turn every error into one sentence."""

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        status, sentence = HTTPStatus(error.status_code), error.detail
        if sentence == status.phrase:  # the framework's own
            own = {404: f"There is nothing at {request.url.path[:200]}.", 405: f"{request.method} is not allowed here."}
            sentence = own.get(status, f"{status.phrase}.")
        answer = error_response(status, sentence)
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        del request
        first = error.errors()[0]
        return error_response(422, f"{first['loc'][-1]}: {first['msg']}.")

    @app.exception_handler(KedgeError)
    async def expected(request: Request, error: KedgeError) -> JSONResponse:
        if isinstance(error, ImageError):
            return error_response(422, str(error))
        # Other errors name files, which are nobody's business.
        if isinstance(error, ConfigError):
            return error_response(422, "This gallery does not support the request.")
        _log.error("%s %s: %s", request.method, request.url.path[:200], error)
        busy = isinstance(error, GalleryError)
        return error_response(503, "The gallery is not available at the moment; try again." if busy else _FAILED)
