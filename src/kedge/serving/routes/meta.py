"""The gallery as a whole (facts, classes, anchors, map), and the state of the server."""

from __future__ import annotations

from datetime import UTC
from typing import Annotated

from fastapi import APIRouter, Path, Query
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

import kedge
from kedge.serving import schemas
from kedge.serving.routes.search import hit_schemas
from kedge.serving.schemas import MAX_ID, MAX_K, MAX_PROBES
from kedge.serving.service import ServiceDependency

__all__ = ["probes", "router"]

router = APIRouter(tags=["gallery"])
probes = APIRouter(tags=["server"])
"""Liveness and readiness, which need no key."""


@router.get("/info")
def info(service: ServiceDependency) -> schemas.Info:
    """The facts of the gallery."""
    gallery, model = service.gallery, service.gallery.model
    catalogue, versions = service.catalogue(), gallery.versions()
    calibrated = gallery.calibration is not None or (gallery.features > 0 and gallery.min_familiarity is not None)
    changed = versions[-1].time.astimezone(UTC).isoformat(timespec="seconds") if versions else None
    return schemas.Info(
        name=gallery.location.name,
        version=kedge.__version__,
        items=len(catalogue),
        classes=len(catalogue.label_names),
        dim=gallery.dim,
        features=gallery.features,
        text=gallery.takes_text,
        lists=gallery.lists,
        precision=gallery.precision,
        thumbnails=gallery.thumbnails,
        record=schemas.RecordInfo(version=catalogue.snapshot.version, versions=len(versions), changed=changed),
        model=None
        if model is None
        else schemas.ModelInfo(
            encoder=model.encoder_name,
            loss=model.loss,
            size=model.preprocessing.size,
            fingerprint=service.fingerprint,
        ),
        calibrated=calibrated,
        writable=service.settings.writable,
        limits=schemas.Limits(bytes=service.settings.max_bytes, k=MAX_K, probes=MAX_PROBES),
    )


@router.get("/classes")
def classes(service: ServiceDependency) -> schemas.Classes:
    """The labels and how many items have them."""
    catalogue = service.catalogue()
    counts = zip(catalogue.label_names, catalogue.label_counts.tolist(), strict=True)
    return schemas.Classes(
        classes=[schemas.Counted(name=name, items=items) for name, items in counts],
        unlabelled=int((catalogue.labels < 0).sum()),
    )


@router.get("/anchors")
def anchors(service: ServiceDependency) -> schemas.Anchors:
    """The anchors and how many items their lists hold."""
    catalogue = service.catalogue()
    rows = enumerate(zip(catalogue.snapshot.anchors.names, catalogue.snapshot.sizes.tolist(), strict=True))
    return schemas.Anchors(anchors=[schemas.AnchorList(anchor=row, name=name, items=n) for row, (name, n) in rows])


@router.get("/anchors/{anchor}")
def typical(
    anchor: Annotated[int, Path(ge=0, le=MAX_ID, description="An anchor.")],
    service: ServiceDependency,
    k: Annotated[int, Query(ge=1, le=MAX_K)] = 12,
) -> schemas.Typical:
    """An anchor with the items of its list that are nearest to it."""
    catalogue = service.catalogue()
    if anchor >= len(catalogue.snapshot.sizes):
        raise HTTPException(404, f"There is no anchor {anchor}.")
    return schemas.Typical(
        anchor=anchor,
        name=catalogue.snapshot.anchors.names[anchor],
        items=int(catalogue.snapshot.sizes[anchor]),
        typical=hit_schemas(catalogue.typical(anchor, k)),
    )


@router.get("/map")
async def gallery_map(
    service: ServiceDependency, limit: Annotated[int, Query(ge=1, le=10_000)] = 4000
) -> schemas.GalleryMap:
    """The gallery in two dimensions."""

    def draw() -> schemas.GalleryMap:
        catalogue = service.catalogue()
        projection = service.projection(catalogue)
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

    async with service.slot(), service.drawing:
        return await run_in_threadpool(draw)


@probes.get("/health")
async def health() -> schemas.Status:
    """Whether the server is alive."""
    return schemas.Status(status="alive")


@probes.get("/ready")
def ready(service: ServiceDependency) -> schemas.Status:
    """Whether it can answer queries."""
    service.touch()
    return schemas.Status(status="ready")
