"""List, show, add and remove items."""

from __future__ import annotations

import hashlib
from http import HTTPStatus
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Request, Response

from kedge.errors import ConfigError
from kedge.serving import schemas
from kedge.serving.catalogue import shown_name
from kedge.serving.errors import Refused
from kedge.serving.schemas import MAX_ID, Id, error_responses
from kedge.serving.service import Service
from kedge.serving.uploads import REQUEST_BODY, uploaded_image

__all__ = ["router_of"]

_LABEL = r"^[^\x00-\x1f\x7f-\x9f]+$"
"""Not empty, and nothing that steers a terminal."""
_JPEG: dict[int | str, dict[str, Any]] = {
    200: {"content": {"image/jpeg": {}}, "description": "A small copy."},
    304: {"description": "The one that is known."},
}


def router_of(service: Service) -> APIRouter:
    """The endpoints for items."""
    router = APIRouter()

    @router.get("/items", responses=error_responses(), tags=["gallery"])
    async def items(
        label: Annotated[str | None, Query(description="Only items with this label.")] = None,
        after: Annotated[int, Query(ge=-1, le=MAX_ID, description="Only items with a larger id.")] = -1,
        limit: Annotated[int, Query(ge=1, le=500)] = 50,
    ) -> schemas.Items:
        """All items, page by page, in order of their ids."""
        return await service.run(_listed, service, label, after, limit)

    @router.get("/items/{id}", responses=error_responses(404), tags=["gallery"])
    async def item(id: Id) -> schemas.Item:
        """One item."""
        return await service.run(_described, service, id)

    @router.get(
        "/items/{id}/thumbnail",
        response_class=Response,
        responses={**_JPEG, **error_responses(404)},
        tags=["gallery"],
    )
    async def thumbnail(request: Request, id: Id) -> Response:
        """A small copy of an item's image."""
        content = await service.thumbnail(id)
        # Revalidated every time: another gallery at the same address has other images.
        headers = {"Cache-Control": "private, no-cache", "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type="image/jpeg", headers=headers)

    @router.post(
        "/items",
        status_code=201,
        responses=error_responses(404, 408, 409, 413, 415, 429),
        openapi_extra=REQUEST_BODY,
        tags=["writing"],
    )
    async def add(
        request: Request,
        label: Annotated[str | None, Query(max_length=200, pattern=_LABEL, description="Its class.")] = None,
    ) -> schemas.Item:
        """Add an image."""
        service.check_writable()
        async with (
            uploaded_image(request, service.settings, service.upload_budget) as content,
            service.limiter.slot(),
        ):
            id = await service.add(content, label)
            return await service.run(_described, service, id)

    @router.delete(
        "/items/{id}", status_code=204, response_class=Response, responses=error_responses(404, 429), tags=["writing"]
    )
    async def remove(id: Id) -> Response:
        """Remove an item."""
        service.check_writable()
        async with service.limiter.slot():
            await service.remove(id)
        return Response(status_code=204)

    return router


def _listed(service: Service, label: str | None, after: int, limit: int) -> schemas.Items:
    catalogue = service.catalogue()
    selected = catalogue.ids > after
    if label is not None:
        names = catalogue.label_names
        selected &= catalogue.labels == (names.index(label) if label in names else -2)
    positions = np.flatnonzero(selected)
    items = []
    for position in positions[:limit].tolist():
        path, own_label = catalogue.describe(position)
        id = int(catalogue.ids[position])
        items.append(schemas.Item(id=id, name=shown_name(path), label=own_label, metadata={}))
    return schemas.Items(items=items, next=items[-1].id if len(positions) > limit else None)


def _described(service: Service, id: int) -> schemas.Item:
    try:
        item = service.gallery.item(id)
    except ConfigError:
        raise Refused(HTTPStatus.NOT_FOUND, f"There is no item {id}.") from None
    plain = (bool, int, float, str, type(None))
    metadata = {name: value for name, value in item.metadata.items() if isinstance(value, plain)}
    return schemas.Item(id=id, name=shown_name(item.path), label=item.label, metadata=metadata)
