"""The gallery as a whole (facts, classes, anchors, map), and the state of the server."""

# No `from __future__ import annotations`: FastAPI evaluates annotations, and some of them are local.
from datetime import UTC
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Query

import kedge
from kedge.serving import schemas
from kedge.serving.catalogue import Catalogue
from kedge.serving.errors import Refused
from kedge.serving.routes.search import hit_schemas
from kedge.serving.schemas import MAX_ID, error_responses
from kedge.serving.service import Service

__all__ = ["probes_of", "router_of"]


def router_of(service: Service) -> APIRouter:
    """The endpoints for the gallery as a whole."""
    router = APIRouter(tags=["gallery"])
    K = Annotated[int, Query(ge=1, le=service.settings.max_k)]

    @router.get("/info", responses=error_responses())
    async def info() -> schemas.Info:
        """The facts of the gallery."""
        return await service.run(_info, service)

    @router.get("/classes", responses=error_responses())
    async def classes() -> schemas.Classes:
        """The labels and how many items have them."""
        return await service.run(_classes, service)

    @router.get("/anchors", responses=error_responses())
    async def anchors() -> schemas.Anchors:
        """The anchors and how many items their lists hold."""
        return await service.run(_anchors, service)

    @router.get("/anchors/{anchor}", responses=error_responses(404))
    async def anchor(
        anchor: Annotated[int, Path(ge=0, le=MAX_ID, description="An anchor.")], k: K = 12
    ) -> schemas.Typical:
        """An anchor with the items of its list that are nearest to it."""
        return await service.run(_typical, service, anchor, k)

    @router.get("/map", responses=error_responses(429))
    async def gallery_map(limit: Annotated[int, Query(ge=1, le=10_000)] = 4000) -> schemas.GalleryMap:
        """The gallery in two dimensions."""
        async with service.limiter.slot():
            return await service.run_projection(_map, service, limit)

    return router


def probes_of(service: Service) -> APIRouter:
    """Liveness and readiness, which need no key."""
    router = APIRouter(tags=["server"])

    @router.get("/health", responses=error_responses())
    async def health() -> schemas.Status:
        """Whether the server is alive."""
        return schemas.Status(status="alive")

    @router.get("/ready", responses=error_responses())
    async def ready() -> schemas.Status:
        """Whether it can answer queries."""
        if not service.ready:
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "The server is starting or stopping.")
        await service.run(service.touch)
        return schemas.Status(status="ready")

    return router


def _info(service: Service) -> schemas.Info:
    gallery, settings = service.gallery, service.settings
    catalogue, versions = service.catalogue(), gallery.versions()
    model = None
    if gallery.model is not None and service.fingerprint is not None:
        model = schemas.ModelInfo(
            encoder=gallery.model.encoder.name,
            loss=gallery.model.loss,
            size=gallery.model.preprocessing.size,
            fingerprint=service.fingerprint,
        )
    changed = versions[-1].time.astimezone(UTC).isoformat(timespec="seconds") if versions else None
    return schemas.Info(
        name=gallery.location.name,
        version=kedge.__version__,
        items=len(catalogue),
        classes=len(catalogue.label_names),
        dim=gallery.dim,
        lists=gallery.lists,
        precision=gallery.precision,
        thumbnails=gallery.thumbnails,
        record=schemas.RecordInfo(version=catalogue.snapshot.version, versions=len(versions), changed=changed),
        model=model,
        calibrated=gallery.calibration is not None,
        writable=settings.writable,
        limits=schemas.Limits(bytes=settings.max_bytes, k=settings.max_k, probes=settings.max_probes),
    )


def _classes(service: Service) -> schemas.Classes:
    catalogue = service.catalogue()
    counts = zip(catalogue.label_names, catalogue.label_counts.tolist(), strict=True)
    return schemas.Classes(
        classes=[schemas.Counted(name=name, items=items) for name, items in counts],
        unlabelled=int((catalogue.labels < 0).sum()),
    )


def _anchors(service: Service) -> schemas.Anchors:
    catalogue = service.catalogue()
    return schemas.Anchors(anchors=[_anchor_list(catalogue, anchor) for anchor in range(len(catalogue.list_sizes))])


def _typical(service: Service, anchor: int, k: int) -> schemas.Typical:
    catalogue = service.catalogue()
    if anchor >= len(catalogue.list_sizes):
        raise Refused(HTTPStatus.NOT_FOUND, f"There is no anchor {anchor}.")
    hits = hit_schemas(catalogue.typical(anchor, k))
    return schemas.Typical(**_anchor_list(catalogue, anchor).model_dump(), typical=hits)


def _anchor_list(catalogue: Catalogue, anchor: int) -> schemas.AnchorList:
    name = catalogue.snapshot.anchors.names[anchor]
    return schemas.AnchorList(anchor=anchor, name=name, items=int(catalogue.list_sizes[anchor]))


def _map(service: Service, limit: int) -> schemas.GalleryMap:
    catalogue = service.catalogue()
    projection = service.projection.fitted(catalogue)
    rows = catalogue.spread(limit)
    x, y = projection.place(catalogue.vectors(rows)).round(4).T.tolist()
    anchors = zip(catalogue.snapshot.anchors.names, projection.anchors.tolist(), strict=True)
    return schemas.GalleryMap(
        classes=catalogue.label_names,
        anchors=[schemas.MapAnchor(anchor=row, name=name, x=x, y=y) for row, (name, (x, y)) in enumerate(anchors)],
        items=schemas.MapItems(id=catalogue.ids[rows].tolist(), x=x, y=y, label=catalogue.labels[rows].tolist()),
        total=len(catalogue),
        record=catalogue.snapshot.version,
    )
