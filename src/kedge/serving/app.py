"""The application: the API, the page, and what stands before them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import Depends, FastAPI, Response
from fastapi.responses import FileResponse
from fastapi.security import HTTPBearer
from starlette.middleware.cors import CORSMiddleware
from starlette.staticfiles import StaticFiles

import kedge
from kedge.serving import about, reading, writing
from kedge.serving.errors import answer_errors, only_known
from kedge.serving.metrics import Metrics
from kedge.serving.security import API, Guard
from kedge.serving.service import Service
from kedge.serving.settings import Settings

__all__ = ["create_app"]

_PAGE = Path(__file__).parent / "page"


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
        service.close()

    app = FastAPI(
        title="Kedge",
        summary="Find pictures in a gallery.",
        version=kedge.__version__,
        lifespan=lifespan,
        openapi_url=f"{API}/openapi.json",
        docs_url=None,  # they would be fetched from another host
        redoc_url=None,
    )
    app.state.service = service
    answer_errors(app)
    # The guard asks for the key, before anything is read; this only says so in the description.
    wants_key = [Depends(HTTPBearer(auto_error=False))] if settings.key is not None else []
    checked = [Depends(only_known)]
    for part in (reading, writing, about):
        app.include_router(part.router_of(service), prefix=API, dependencies=[*wants_key, *checked])
    app.include_router(about.probes_of(service), prefix=API, dependencies=checked)

    @app.get("/metrics", include_in_schema=False)
    async def counted() -> Response:
        await service.run(service.catalogue)
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
    app.add_middleware(Guard, settings=settings, metrics=metrics)
    return app
