"""The part of the API that changes the gallery."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from kedge.serving import schemas
from kedge.serving.errors import Refused
from kedge.serving.reading import Id, described, errors
from kedge.serving.service import Service
from kedge.serving.uploads import REQUEST_BODY, received

__all__ = ["router_of"]

_TEXT = r"^[^\x00-\x1f\x7f-\x9f]+$"
"""Something, and nothing that steers a terminal."""


def router_of(service: Service) -> APIRouter:
    """The endpoints."""
    router = APIRouter(tags=["writing"])

    @router.post("/items", status_code=201, responses=errors(404, 408, 409, 413, 415, 429), openapi_extra=REQUEST_BODY)
    async def add(
        request: Request,
        label: Annotated[str | None, Query(max_length=200, pattern=_TEXT, description="Its class.")] = None,
    ) -> schemas.Item:
        """Add a picture."""
        _check_writable(service)
        async with received(request, service.settings, service.uploads) as content, service.gate.entered():
            id = await service.add(content, label)
            return await service.run(described, service, id)

    @router.delete("/items/{id}", status_code=204, response_class=Response, responses=errors(404, 429))
    async def remove(id: Id) -> Response:
        """Remove an item."""
        _check_writable(service)
        async with service.gate.entered():
            await service.remove(id)
        return Response(status_code=204)

    return router


def _check_writable(service: Service) -> None:
    if not service.settings.writable:
        raise Refused(HTTPStatus.FORBIDDEN, "This server only reads: start it with --writable.")
