"""Search with an image or with an item."""

# No `from __future__ import annotations`: FastAPI evaluates those of SearchOptions without this module's names.
import time
from collections.abc import Iterable
from typing import Annotated, NamedTuple

import numpy as np
from fastapi import APIRouter, Depends, Query, Request
from starlette.concurrency import run_in_threadpool

from kedge.gallery import Hit
from kedge.gallery.gallery import Method
from kedge.serving import schemas
from kedge.serving.catalogue import shown_name
from kedge.serving.schemas import MAX_K, MAX_PROBES, Id
from kedge.serving.service import Service, ServiceDependency
from kedge.serving.uploads import REQUEST_BODY

__all__ = ["hit_schemas", "router"]

_NEAREST_ANCHORS = 5
_METHODS: dict[schemas.Method, list[Method]] = {
    schemas.Method.two_stage: ["two_stage"],
    schemas.Method.brute_force: ["brute_force"],
    # One after the other, so that neither is in the other's way.
    schemas.Method.both: ["two_stage", "brute_force"],
}
router = APIRouter(tags=["search"])


class SearchOptions(NamedTuple):
    """The parameters of a search."""

    k: Annotated[int, Query(ge=1, le=MAX_K, description="How many hits.")] = 20
    method: Annotated[schemas.Method, Query(description="How to search; both: one after the other.")] = (
        schemas.Method.two_stage
    )
    probes: Annotated[int, Query(ge=1, le=MAX_PROBES, description="How many lists a two-stage search reads.")] = 1
    label: Annotated[list[str], Query(max_length=64, description="Only items with one of these labels.")] = []  # noqa: RUF012


Options = Annotated[SearchOptions, Depends(SearchOptions)]


@router.post("/search", openapi_extra=REQUEST_BODY)
async def search(request: Request, options: Options, service: ServiceDependency) -> schemas.Answer:
    """The items most like an image."""
    # A slot is taken once the body has arrived: who sends slowly keeps nobody else waiting.
    async with service.uploads.image(request) as content, service.slot():
        started = time.perf_counter()
        pixels = await service.pixels(content)
        decoded = time.perf_counter()
        vector = await service.embed(pixels)
        encoder = time.perf_counter() - decoded
        return await run_in_threadpool(_answer, service, vector, options, started, encoder)


@router.get("/items/{id}/similar")
async def similar(id: Id, options: Options, service: ServiceDependency) -> schemas.Answer:
    """The items most like another one."""
    async with service.slot():
        return await run_in_threadpool(_answer, service, id, options, time.perf_counter(), None)


def hit_schemas(hits: Iterable[Hit]) -> list[schemas.Hit]:
    """Hits as the API gives them."""
    return [
        schemas.Hit(id=id, name=shown_name(path), label=label, distance=distance, anchor=anchor)
        for id, path, label, distance, anchor in hits
    ]


def _answer(
    service: Service, query: np.ndarray | int, options: SearchOptions, started: float, encoder: float | None
) -> schemas.Answer:
    """What one version of the gallery holds that is like an embedding, or like an item (its id)."""
    catalogue = service.catalogue()
    exclude_id = query if isinstance(query, int) else None
    vector = service.vector(catalogue, query) if isinstance(query, int) else query
    quoted = ", ".join("'" + label.replace("'", "''") + "'" for label in options.label)
    anchors = catalogue.snapshot.anchors
    nearest = anchors.nearest(vector[None], min(max(options.probes, _NEAREST_ANCHORS), len(anchors)))[0]
    compared = {"two_stage": catalogue.list_sizes[nearest[: options.probes]].sum(), "brute_force": len(catalogue)}
    searches = []
    for method in _METHODS[options.method]:
        [result] = service.gallery.search_embeddings(
            vector[None],
            options.k,
            method,
            options.probes,
            where=f"label IN ({quoted})" if quoted else None,
            exclude_id=exclude_id,
            snapshot=catalogue.snapshot,
        )
        service.metrics.searched.labels(method).observe(result.seconds)
        search = schemas.Search(
            method=schemas.Method(method),
            hits=hit_schemas(result),
            looked_at=result.anchors if method == "two_stage" else [],
            compared=int(compared[method]),
            seconds=result.seconds,
        )
        searches.append(search)
    shown = nearest[:_NEAREST_ANCHORS]
    distances = np.linalg.norm(anchors.vectors[shown] - vector, axis=1)
    return schemas.Answer(
        searches=searches,
        nearest=[
            schemas.NearAnchor(anchor=anchor, name=anchors.names[anchor], distance=distance)
            for anchor, distance in zip(shown.tolist(), distances.tolist(), strict=True)
        ],
        unknown=result.unknown,
        place=service.place(vector),
        seconds=schemas.Seconds(encoder=encoder, total=time.perf_counter() - started),
        record=catalogue.snapshot.version,
    )
