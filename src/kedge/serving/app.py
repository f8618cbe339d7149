"""The ASGI application: API, page, metrics, and the security middleware in front of them."""

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
from kedge.serving.errors import answer_errors, refuse_unknown_parameters
from kedge.serving.metrics import Metrics
from kedge.serving.routes import items, meta, search
from kedge.serving.security import API, SecurityMiddleware
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
        summary="Find images in a gallery.",
        version=kedge.__version__,
        lifespan=lifespan,
        openapi_url=f"{API}/openapi.json",
        docs_url=None,  # they would be fetched from another host
        redoc_url=None,
    )
    app.state.service = service
    answer_errors(app)
    # The middleware asks for the key before anything is read; this only says so in the description.
    bearer = [Depends(HTTPBearer(auto_error=False))] if settings.key is not None else []
    checked = [Depends(refuse_unknown_parameters)]
    for routes in (search, items, meta):
        app.include_router(routes.router_of(service), prefix=API, dependencies=[*bearer, *checked])
    app.include_router(meta.probes_of(service), prefix=API, dependencies=checked)

    @app.get("/metrics", include_in_schema=False)
    async def prometheus() -> Response:
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
    app.add_middleware(SecurityMiddleware, settings=settings, metrics=metrics)
    return app
