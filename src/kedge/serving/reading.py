"""The part of the API that everybody may use who may use it at all: asking and looking."""

# Annotations are read while it runs, some of which are local: they must not be turned into strings.
import hashlib
import time
from http import HTTPStatus
from typing import Annotated, Any, NamedTuple

import numpy as np
from fastapi import APIRouter, Depends, Path, Query, Request, Response

from kedge.errors import ConfigError
from kedge.gallery import Result
from kedge.gallery.gallery import Method
from kedge.gallery.search import Columns
from kedge.serving import schemas
from kedge.serving.catalogue import Catalogue, shown_name
from kedge.serving.errors import Refused
from kedge.serving.service import Service
from kedge.serving.uploads import REQUEST_BODY, received

__all__ = ["Id", "described", "errors", "router_of"]

_LARGEST = 2**63 - 1
_NEAREST = 5
Id = Annotated[int, Path(ge=0, le=_LARGEST, description="An item.")]
_MEANINGS = {
    400: "The request cannot be understood.",
    401: "The key is missing or wrong.",
    403: "That is not allowed.",
    404: "There is no such thing.",
    408: "The picture came too slowly.",
    409: "That is there already.",
    413: "The picture is too large.",
    415: "That is no picture.",
    422: "A value cannot be used.",
    429: "The server is busy; Retry-After says when to come back.",
    503: "The server cannot answer now.",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What an endpoint may answer with instead."""
    always = (400, 401, 403, 422, 503)
    return {
        status: {"model": schemas.Error, "description": _MEANINGS[status]} for status in sorted({*always, *statuses})
    }


def described(service: Service, id: int) -> schemas.Item:
    """An item with all that is known of it."""
    try:
        found = service.gallery.item(id)
    except ConfigError:
        raise Refused(HTTPStatus.NOT_FOUND, f"There is no item {id}.") from None
    metadata = {name: value for name, value in found.metadata.items() if _plain(value)}
    return schemas.Item(id=id, name=shown_name(found.path), label=found.label, metadata=metadata)


class _Wanted(NamedTuple):
    """How many hits of what kind, and how they are looked for."""

    k: int
    method: schemas.Method
    probes: int
    labels: list[str]


def router_of(service: Service) -> APIRouter:
    """The endpoints."""
    router = APIRouter()
    settings = service.settings
    K = Annotated[int, Query(ge=1, le=settings.max_k, description="How many hits.")]
    Probes = Annotated[int, Query(ge=1, le=settings.max_probes, description="How many lists a two-stage search reads.")]
    How = Annotated[schemas.Method, Query(description="How to search; both: one after the other.")]
    Labels = Annotated[list[str], Query(max_length=64, description="Only items with one of these labels.")]

    def wanted(
        k: K = 20,
        method: How = schemas.Method.two_stage,
        probes: Probes = 1,
        label: Labels = [],  # noqa: B006
    ) -> _Wanted:
        return _Wanted(k, method, probes, label)

    Wanted = Annotated[_Wanted, Depends(wanted)]

    @router.post("/search", responses=errors(408, 413, 415, 429), openapi_extra=REQUEST_BODY, tags=["search"])
    async def search(request: Request, wanted: Wanted) -> schemas.Answer:
        """The items most like a picture."""
        # A slot is taken once the body has arrived: who sends slowly keeps nobody else waiting.
        async with received(request, settings, service.uploads) as content, service.gate.entered():
            started = time.perf_counter()
            pixels = await service.pixels(content)
            before = time.perf_counter()
            vector = await service.embed(pixels)
            encoder = time.perf_counter() - before
            return await service.run(_answer, service, vector, wanted, started, encoder)

    @router.get("/items/{id}/similar", responses=errors(404, 429), tags=["search"])
    async def similar(id: Id, wanted: Wanted) -> schemas.Answer:
        """The items most like another one."""
        async with service.gate.entered():
            return await service.run(_answer, service, id, wanted, time.perf_counter(), None)

    @router.get("/items", responses=errors(), tags=["gallery"])
    async def items(
        label: Annotated[str | None, Query(description="Only items with this label.")] = None,
        after: Annotated[int, Query(ge=-1, le=_LARGEST, description="Only items with a larger id.")] = -1,
        limit: Annotated[int, Query(ge=1, le=500)] = 50,
    ) -> schemas.Items:
        """All items, page by page, in order of their ids."""

        def look() -> schemas.Items:
            catalogue = service.catalogue()
            wanted = catalogue.ids > after
            if label is not None:
                row = catalogue.names.index(label) if label in catalogue.names else -2
                wanted &= catalogue.labels == row
            places = np.flatnonzero(wanted)
            some = catalogue.listed(places[:limit])
            found = [schemas.Item(id=one.id, name=shown_name(one.path), label=one.label, metadata={}) for one in some]
            return schemas.Items(items=found, next=found[-1].id if len(places) > limit else None)

        return await service.run(look)

    @router.get("/items/{id}", responses=errors(404), tags=["gallery"])
    async def item(id: Id) -> schemas.Item:
        """One item."""
        return await service.run(described, service, id)

    @router.get(
        "/items/{id}/thumbnail",
        response_class=Response,
        responses={
            200: {"content": {"image/jpeg": {}}, "description": "A small copy."},
            304: {"description": "The one that is known."},
            **errors(404),
        },
        tags=["gallery"],
    )
    async def thumbnail(request: Request, id: Id) -> Response:
        """A small copy of an item's picture."""
        content = await service.thumbnail(id)
        # Asked for every time, sent once: another gallery at the same address has other pictures.
        headers = {"Cache-Control": "private, no-cache", "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type="image/jpeg", headers=headers)

    @router.get("/classes", responses=errors(), tags=["gallery"])
    async def classes() -> schemas.Classes:
        """The labels and how many items have them."""

        def count() -> schemas.Classes:
            catalogue = service.catalogue()
            pairs = zip(catalogue.names, catalogue.counts.tolist(), strict=True)
            found = [schemas.Counted(name=name, items=items) for name, items in pairs]
            return schemas.Classes(classes=found, unlabelled=int((catalogue.labels < 0).sum()))

        return await service.run(count)

    @router.get("/anchors", responses=errors(), tags=["gallery"])
    async def anchors() -> schemas.Anchors:
        """The anchors and how many items their lists hold."""

        def count() -> schemas.Anchors:
            catalogue = service.catalogue()
            return schemas.Anchors(anchors=[_list_of(catalogue, place) for place in range(len(catalogue.held))])

        return await service.run(count)

    @router.get("/anchors/{anchor}", responses=errors(404), tags=["gallery"])
    async def anchor(
        anchor: Annotated[int, Path(ge=0, le=_LARGEST, description="An anchor.")],
        k: Annotated[int, Query(ge=1, le=settings.max_k)] = 12,
    ) -> schemas.Typical:
        """An anchor with the items of its list that are nearest to it."""

        def look() -> schemas.Typical:
            catalogue = service.catalogue()
            if anchor >= len(catalogue.held):
                raise Refused(HTTPStatus.NOT_FOUND, f"There is no anchor {anchor}.")
            hits = _hits(catalogue.typical(anchor, k))
            return schemas.Typical(**_list_of(catalogue, anchor).model_dump(), typical=hits)

        return await service.run(look)

    @router.get("/map", responses=errors(429), tags=["gallery"])
    async def gallery_map(limit: Annotated[int, Query(ge=1, le=10_000)] = 4000) -> schemas.GalleryMap:
        """The gallery in two dimensions."""
        async with service.gate.entered():
            return await service.draw(_map, service, limit)

    return router


def _answer(
    service: Service, query: np.ndarray | int, wanted: _Wanted, started: float, encoder: float | None
) -> schemas.Answer:
    """What one version of the gallery holds that is like an embedding, or like an item (its id)."""
    k, method, probes, labels = wanted
    methods: tuple[Method, ...] = ("two_stage", "brute_force")
    if method is not schemas.Method.both:
        methods = ("two_stage",) if method is schemas.Method.two_stage else ("brute_force",)
    catalogue = service.catalogue()
    exclude_id = query if isinstance(query, int) else None
    vector = service.vector(catalogue, query) if isinstance(query, int) else query
    anchors = catalogue.snapshot.anchors
    nearest = anchors.nearest(vector[None], min(max(probes, _NEAREST), len(anchors)))[0]
    read = {"two_stage": catalogue.held[nearest[:probes]].sum(), "brute_force": len(catalogue)}
    # One method after the other, so that neither is in the other's way.
    results = [service.search(catalogue, vector, k, how, probes, labels, exclude_id) for how in methods]
    searches = [
        schemas.Search(
            method=schemas.Method(how),
            hits=_hits(result),
            looked_at=result.anchors if how == "two_stage" else [],
            compared=int(read[how]),
            seconds=result.seconds,
        )
        for how, result in zip(methods, results, strict=True)
    ]
    shown = nearest[:_NEAREST]
    distances = np.linalg.norm(anchors.vectors[shown] - vector, axis=1)
    return schemas.Answer(
        searches=searches,
        nearest=[
            schemas.NearAnchor(anchor=anchor, name=anchors.names[anchor], distance=distance)
            for anchor, distance in zip(shown.tolist(), distances.tolist(), strict=True)
        ],
        unknown=results[0].unknown,
        place=service.maps.place(vector),
        seconds=schemas.Seconds(encoder=encoder, total=time.perf_counter() - started),
        record=catalogue.snapshot.version,
    )


def _hits(found: Result | Columns) -> list[schemas.Hit]:
    rows = found.hits if isinstance(found, Result) else zip(*found, strict=True)
    return [
        schemas.Hit(id=id, name=shown_name(path), label=label, distance=distance, anchor=anchor)
        for id, path, label, distance, anchor in rows
    ]


def _list_of(catalogue: Catalogue, place: int) -> schemas.AnchorList:
    name = catalogue.snapshot.anchors.names[place]
    return schemas.AnchorList(anchor=place, name=name, items=int(catalogue.held[place]))


def _map(service: Service, limit: int) -> schemas.GalleryMap:
    catalogue = service.catalogue()
    layout = service.maps.layout(catalogue)
    some = catalogue.spread(limit)
    x, y = layout.place(catalogue.vectors(some)).round(4).T.tolist()
    names = catalogue.snapshot.anchors.names
    places = enumerate(zip(names, layout.anchors.tolist(), strict=True))
    return schemas.GalleryMap(
        classes=catalogue.names,
        anchors=[schemas.MapAnchor(anchor=row, name=name, x=at[0], y=at[1]) for row, (name, at) in places],
        items=schemas.MapItems(id=catalogue.ids[some].tolist(), x=x, y=y, label=catalogue.labels[some].tolist()),
        total=len(catalogue),
        record=catalogue.snapshot.version,
    )


def _plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
