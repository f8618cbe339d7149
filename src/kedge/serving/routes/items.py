"""List, show, add and remove items."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from kedge.errors import ConfigError
from kedge.serving import schemas
from kedge.serving.catalogue import shown_name
from kedge.serving.schemas import MAX_ID, Id
from kedge.serving.service import ServiceDependency
from kedge.serving.uploads import REQUEST_BODY, file_name

__all__ = ["router"]

_LABEL = r"^[^\x00-\x1f\x7f-\x9f]+$"
"""Not empty, and nothing that steers a terminal."""
_JPEG: dict[int | str, dict[str, Any]] = {
    200: {"content": {"image/jpeg": {}}, "description": "A small copy."},
    304: {"description": "The one that is known."},
}
router = APIRouter()


@router.get("/items", tags=["gallery"])
def items(
    service: ServiceDependency,
    label: Annotated[str | None, Query(description="Only items with this label.")] = None,
    after: Annotated[int, Query(ge=-1, le=MAX_ID, description="Only items with a larger id.")] = -1,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
) -> schemas.Items:
    """All items, page by page, in order of their ids."""
    catalogue = service.catalogue()
    selected = catalogue.ids > after
    if label is not None:
        names = catalogue.label_names
        selected &= catalogue.labels == (names.index(label) if label in names else -2)
    positions = np.flatnonzero(selected)
    listed = []
    for position in positions[:limit].tolist():
        path, own_label = catalogue.describe(position)
        id = int(catalogue.ids[position])
        listed.append(schemas.Item(id=id, name=shown_name(path), label=own_label, metadata={}))
    return schemas.Items(items=listed, next=listed[-1].id if len(positions) > limit else None)


@router.get("/items/{id}", tags=["gallery"])
def item(id: Id, service: ServiceDependency) -> schemas.Item:
    """One item."""
    try:
        described = service.gallery.item(id)
    except ConfigError:
        raise HTTPException(404, f"There is no item {id}.") from None
    plain = (bool, int, float, str, type(None))
    metadata = {name: value for name, value in described.metadata.items() if isinstance(value, plain)}
    return schemas.Item(id=id, name=shown_name(described.path), label=described.label, metadata=metadata)


@router.get("/items/{id}/thumbnail", response_class=Response, responses=_JPEG, tags=["gallery"])
async def thumbnail(request: Request, id: Id, service: ServiceDependency) -> Response:
    """A small copy of an item's image."""
    content = await service.thumbnail(id)
    # Revalidated every time: another gallery at the same address has other images.
    headers = {"Cache-Control": "private, no-cache", "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type="image/jpeg", headers=headers)


@router.post("/items", status_code=201, openapi_extra=REQUEST_BODY, tags=["writing"])
async def add(
    request: Request,
    service: ServiceDependency,
    label: Annotated[str | None, Query(max_length=200, pattern=_LABEL, description="Its class.")] = None,
    name: Annotated[
        str | None, Query(max_length=1000, description="The name of its file; by default what a form says.")
    ] = None,
) -> schemas.Item:
    """Add an image."""
    service.check_writable()
    async with service.uploads.image(request) as upload, service.slot() as deadline:
        id = await service.add(upload.content, label, file_name(name or upload.name), deadline)
        return await run_in_threadpool(item, id, service)


@router.delete("/items/{id}", status_code=204, tags=["writing"])
async def remove(id: Id, service: ServiceDependency) -> None:
    """Remove an item."""
    service.check_writable()
    async with service.slot() as deadline:
        await service.remove(id, deadline)
