"""The part of the API that tells of the gallery and of the server itself."""

from __future__ import annotations

from datetime import UTC
from http import HTTPStatus

from fastapi import APIRouter

import kedge
from kedge.serving import schemas
from kedge.serving.errors import Refused
from kedge.serving.reading import errors
from kedge.serving.service import Service

__all__ = ["probes_of", "router_of"]


def router_of(service: Service) -> APIRouter:
    """What the gallery is."""
    router = APIRouter(tags=["gallery"])

    @router.get("/info", responses=errors())
    async def info() -> schemas.Info:
        """The facts of the gallery."""
        return await service.run(_info, service)

    return router


def probes_of(service: Service) -> APIRouter:
    """How the server is, for whoever watches over it."""
    router = APIRouter(tags=["server"])

    @router.get("/health", responses=errors())
    async def health() -> schemas.Status:
        """Whether the server is alive."""
        return schemas.Status(status="alive")

    @router.get("/ready", responses=errors())
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
        classes=len(catalogue.names),
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
