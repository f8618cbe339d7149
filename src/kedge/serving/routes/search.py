"""Search with an image or with an item."""

# No `from __future__ import annotations`: FastAPI evaluates annotations, and some of them are local.
import time
from typing import Annotated, NamedTuple

import numpy as np
from fastapi import APIRouter, Depends, Query, Request

from kedge.gallery import Result
from kedge.gallery.gallery import Method
from kedge.gallery.search import Columns
from kedge.serving import schemas
from kedge.serving.catalogue import shown_name
from kedge.serving.schemas import Id, error_responses
from kedge.serving.service import Service
from kedge.serving.uploads import REQUEST_BODY, uploaded_image

__all__ = ["hit_schemas", "router_of"]

_NEAREST_ANCHORS = 5


class _Options(NamedTuple):
    k: int
    method: schemas.Method
    probes: int
    labels: list[str]


def router_of(service: Service) -> APIRouter:
    """The endpoints that search."""
    router = APIRouter(tags=["search"])
    settings = service.settings
    K = Annotated[int, Query(ge=1, le=settings.max_k, description="How many hits.")]
    Probes = Annotated[int, Query(ge=1, le=settings.max_probes, description="How many lists a two-stage search reads.")]
    How = Annotated[schemas.Method, Query(description="How to search; both: one after the other.")]
    Labels = Annotated[list[str], Query(max_length=64, description="Only items with one of these labels.")]

    def parse(
        k: K = 20,
        method: How = schemas.Method.two_stage,
        probes: Probes = 1,
        label: Labels = [],  # noqa: B006
    ) -> _Options:
        return _Options(k, method, probes, label)

    Options = Annotated[_Options, Depends(parse)]

    @router.post("/search", responses=error_responses(408, 413, 415, 429), openapi_extra=REQUEST_BODY)
    async def search(request: Request, options: Options) -> schemas.Answer:
        """The items most like an image."""
        # A slot is taken once the body has arrived: who sends slowly keeps nobody else waiting.
        async with uploaded_image(request, settings, service.upload_budget) as content, service.limiter.slot():
            started = time.perf_counter()
            pixels = await service.pixels(content)
            decoded = time.perf_counter()
            vector = await service.embed(pixels)
            encoder = time.perf_counter() - decoded
            return await service.run(_answer, service, vector, options, started, encoder)

    @router.get("/items/{id}/similar", responses=error_responses(404, 429))
    async def similar(id: Id, options: Options) -> schemas.Answer:
        """The items most like another one."""
        async with service.limiter.slot():
            return await service.run(_answer, service, id, options, time.perf_counter(), None)

    return router


def hit_schemas(hits: Result | Columns) -> list[schemas.Hit]:
    """Hits as the API gives them."""
    rows = hits.hits if isinstance(hits, Result) else zip(*hits, strict=True)
    return [
        schemas.Hit(id=id, name=shown_name(path), label=label, distance=distance, anchor=anchor)
        for id, path, label, distance, anchor in rows
    ]


def _answer(
    service: Service, query: np.ndarray | int, options: _Options, started: float, encoder: float | None
) -> schemas.Answer:
    """What one version of the gallery holds that is like an embedding, or like an item (its id)."""
    k, method, probes, labels = options
    methods: tuple[Method, ...] = ("two_stage", "brute_force")
    if method is not schemas.Method.both:
        methods = ("two_stage",) if method is schemas.Method.two_stage else ("brute_force",)
    catalogue = service.catalogue()
    exclude_id = query if isinstance(query, int) else None
    vector = service.vector(catalogue, query) if isinstance(query, int) else query
    anchors = catalogue.snapshot.anchors
    nearest = anchors.nearest(vector[None], min(max(probes, _NEAREST_ANCHORS), len(anchors)))[0]
    compared = {"two_stage": catalogue.list_sizes[nearest[:probes]].sum(), "brute_force": len(catalogue)}
    # One method after the other, so that neither is in the other's way.
    results = [service.search(catalogue, vector, k, how, probes, labels, exclude_id) for how in methods]
    searches = [
        schemas.Search(
            method=schemas.Method(how),
            hits=hit_schemas(result),
            looked_at=result.anchors if how == "two_stage" else [],
            compared=int(compared[how]),
            seconds=result.seconds,
        )
        for how, result in zip(methods, results, strict=True)
    ]
    shown = nearest[:_NEAREST_ANCHORS]
    distances = np.linalg.norm(anchors.vectors[shown] - vector, axis=1)
    return schemas.Answer(
        searches=searches,
        nearest=[
            schemas.NearAnchor(anchor=anchor, name=anchors.names[anchor], distance=distance)
            for anchor, distance in zip(shown.tolist(), distances.tolist(), strict=True)
        ],
        unknown=results[0].unknown,
        place=service.projection.place(vector),
        seconds=schemas.Seconds(encoder=encoder, total=time.perf_counter() - started),
        record=catalogue.snapshot.version,
    )
