"""A gallery behind a server: read by many requests at once, written by one."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import anyio.to_thread
import numpy as np
import torch
from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from kedge.errors import ConfigError, ImageError, KedgeError
from kedge.gallery import Gallery, Result
from kedge.gallery.anchors import Anchors
from kedge.gallery.inverted_lists import DamagedLists
from kedge.io import atomic_write
from kedge.serving.batching import Batches, Decoders
from kedge.serving.catalogue import UPLOADS, Catalogue, ImageFiles
from kedge.serving.metrics import Metrics
from kedge.serving.projection import MAX_ANCHORS, SAMPLE, Projection
from kedge.serving.settings import Settings
from kedge.serving.uploads import BUSY, Uploads

__all__ = ["QueryVectors", "Service", "ServiceDependency"]

T = TypeVar("T")
_log = logging.getLogger(__name__)
_THUMBNAIL_SIDE = 256
"""Of thumbnails that are made here, where the gallery keeps none."""
_THUMBNAIL_CACHE = 512
_TOUCH_SECONDS = 1.0
_WORKERS = min(4, os.cpu_count() or 1)
"""Searches at once, and decoders of each kind."""


class QueryVectors(NamedTuple):
    """One query in both spaces of a gallery."""

    embedding: np.ndarray
    features: np.ndarray | None
    """None: the gallery keeps none of them, or not of this item."""


class Service:
    """What the routes share; methods without `async` take their time and belong in a thread."""

    def __init__(self, path: str | Path, settings: Settings, metrics: Metrics) -> None:
        self.settings, self.metrics = settings, metrics
        self.gallery = Gallery.open(path, memory=settings.memory)
        # Writing moves a Gallery on to a newer version, so that readers have one of their own.
        self._writer = Gallery.open(path, self.gallery.model) if settings.writable else None
        self._writing, self.drawing, self._text = asyncio.Lock(), asyncio.Lock(), asyncio.Lock()
        self.uploads = Uploads(settings, metrics)
        self._slots = asyncio.Semaphore(settings.concurrency)
        model = self.gallery.model
        # One thread, since each has an OpenMP team of its own.
        self._encoding = Batches(settings.batch, 1, "encoder")
        # More threads than cores would wait for the interpreter's lock.
        self.searching = Batches(settings.batch, _WORKERS, "search")
        self.fingerprint = "" if model is None else model.fingerprint  # hashes all weights
        # Uploads and thumbnails apart: neither waits for the other's slow images.
        self._upload_decoders, self._thumbnail_decoders = (
            Decoders(_WORKERS, settings.decode_seconds, settings.max_pixels) for _ in range(2)
        )
        self._thumbnails: dict[tuple[int, Path], bytes] = {}
        """By id as well: a later item may have a new image in the same file."""
        self._files = ImageFiles(self.gallery.path, settings.images)
        self._mutex = threading.Lock()
        self._catalogue: Catalogue | None = None
        self._touched = -math.inf
        self._projection: tuple[Anchors, Projection] | None = None

    async def start(self) -> None:
        """Read what the first request would wait for."""
        # One each for the map, a write and a text, whose tower may have to be loaded: nobody else waits for these.
        anyio.to_thread.current_default_thread_limiter().total_tokens = _WORKERS + 3
        catalogue = await run_in_threadpool(self.catalogue)
        if self.gallery.model is not None:
            side = self.gallery.model.preprocessing.size or 32
            query = await self.embed(np.zeros((3, side, side), np.uint8))
            await run_in_threadpool(self.search, catalogue, [query], 1)

    async def close(self) -> None:
        """Finish what was begun."""
        await self._upload_decoders.close()
        await self._thumbnail_decoders.close()
        self._encoding.close()
        self.searching.close()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[asyncio.Timeout]:
        """Be one of the requests in flight until the block ends or its deadline passes; excess requests get 429."""
        if self._slots.locked():
            self.metrics.refused.inc()
            raise HTTPException(429, BUSY)
        try:
            with self.metrics.in_flight.track_inprogress():
                async with self._slots, asyncio.timeout(self.settings.seconds) as deadline:
                    yield deadline
        except TimeoutError:
            raise HTTPException(503, "The request took too long; try again.") from None

    # ------------------------------------------------------------------ reading

    def touch(self) -> None:
        """Raise unless the table can be read, as far as was known a second ago."""
        now = time.monotonic()
        if now - self._touched > _TOUCH_SECONDS:
            self.gallery.touch()
            self._touched = now

    def catalogue(self) -> Catalogue:
        """The newest version."""
        snapshot = self.gallery.snapshot()
        with self._mutex:
            newest = self._catalogue
            # Of the same version there may be another snapshot, once damaged lists were rebuilt.
            if newest is None or (newest.snapshot is not snapshot and newest.snapshot.version <= snapshot.version):
                self._catalogue = newest = Catalogue(snapshot)
                self.metrics.items.set(len(newest))
                self.metrics.version.set(snapshot.version)
            return newest

    async def pixels(self, content: bytes) -> np.ndarray:
        """An image as the encoder takes it."""
        model = self.gallery.model
        if model is None:
            raise HTTPException(422, "This gallery has no model; search with one of its items.")
        return await self._upload_decoders.pixels(content, model.preprocessing)

    async def embed(self, pixels: np.ndarray) -> QueryVectors:
        """Embedding and features of an image of the size that the encoder takes, in a batch with those of others."""
        return await self._encoding.run(self._embed, pixels.shape, pixels)

    def _embed(self, shape: tuple[int, ...], batch: list[np.ndarray]) -> list[QueryVectors]:
        del shape
        if (model := self.gallery.model) is None:
            raise RuntimeError("There is no encoder.")
        self.metrics.batch.observe(len(batch))
        features = model.features(torch.from_numpy(np.stack(batch)))
        embeddings = model.embed_features(features)
        return list(map(QueryVectors, *(vectors.float().cpu().numpy() for vectors in (embeddings, features))))

    async def embed_text(self, text: str) -> np.ndarray:
        """A text in the space of the features."""
        if not self.gallery.takes_text:
            raise HTTPException(409, "This gallery cannot be searched by text: its encoder has no text tower.")
        if not text.strip():
            raise HTTPException(422, "The text is empty: describe what to look for.")
        try:
            async with self._text:
                return await run_in_threadpool(self.gallery.embed_text, text)
        except KedgeError as error:
            _log.error("Texts cannot be embedded: %s", error)
            raise HTTPException(503, "The text tower cannot be loaded: the server's log says why.") from None

    def vectors(self, catalogue: Catalogue, id: int) -> QueryVectors:
        """Embedding and features of an item."""
        try:
            embedding = catalogue.vector(id)
            features = self.gallery.features_at(catalogue.snapshot, id) if self.gallery.features else None
            return QueryVectors(embedding, features)
        except DamagedLists:
            return QueryVectors(*self.gallery.item_vectors(id))  # the search that follows has the lists rebuilt

    def search(self, catalogue: Catalogue, queries: Sequence[QueryVectors], k: int, **options: Any) -> list[Result]:
        """`Gallery.search_embeddings` in one version, for queries that all have features or all have none."""
        embeddings, features = zip(*queries, strict=True)
        looks = None if features[0] is None else np.stack(features)
        return self.gallery.search_embeddings(
            np.stack(embeddings), k, features=looks, snapshot=catalogue.snapshot, **options
        )

    def projection(self, catalogue: Catalogue) -> Projection:
        """The map of this version, fitted when first asked for and where its anchors are others; hold `drawing`."""
        anchors = catalogue.snapshot.anchors
        if len(anchors) > MAX_ANCHORS:
            limits = f"up to {MAX_ANCHORS:,} anchors; this gallery has {len(anchors):,}"
            raise HTTPException(422, f"The map shows {limits}.")
        if self._projection is not None:
            previous, projection = self._projection
            # Named anchors may move a little, the others are nothing but their place.
            same_place = None not in anchors.names or np.array_equal(previous.vectors, anchors.vectors)
            if previous.names == anchors.names and same_place:
                return projection
        projection = Projection(anchors.vectors, catalogue.vectors(catalogue.spread(SAMPLE)))
        self._projection = anchors, projection
        return projection

    def place(self, vector: np.ndarray) -> tuple[float, float] | None:
        """Coordinates of a query on the map; None before that is fitted."""
        if self._projection is None:
            return None
        x, y = self._projection[1].place(vector[None])[0].tolist()
        return x, y

    async def thumbnail(self, id: int) -> bytes:
        """A small copy of an item's image, as JPEG: what the gallery keeps, or one made of its file."""

        def find() -> bytes | Path | None:
            stored = self.gallery.thumbnail(id) if self.gallery.thumbnails else None
            return stored or self._files.find(self.gallery.item(id).path)

        try:
            image = await run_in_threadpool(find)
            if isinstance(image, Path):
                key = id, image
                if key not in self._thumbnails:
                    made = await self._thumbnail_decoders.thumbnail(image, _THUMBNAIL_SIDE)
                    if len(self._thumbnails) >= _THUMBNAIL_CACHE:
                        del self._thumbnails[next(iter(self._thumbnails))]
                    self._thumbnails[key] = made
                image = self._thumbnails[key]
        except (ConfigError, ImageError):
            image = None
        if image is None:
            raise HTTPException(404, f"There is no image of an item {id}.")
        return image

    # ------------------------------------------------------------------ writing

    def check_writable(self) -> Gallery:
        """The gallery to write to; refused where the server only reads."""
        if self._writer is None:
            raise HTTPException(403, "This server is read-only; start it with --writable.")
        return self._writer

    async def add(self, content: bytes, label: str | None, name: str | None, deadline: asyncio.Timeout) -> int:
        """Add an image, with the safe name of its file, if there is one; its id."""
        await self.pixels(content)  # only images are kept
        return await self._write(lambda gallery: _add(gallery, content, label, name), deadline)

    async def remove(self, id: int, deadline: asyncio.Timeout) -> None:
        """Remove an item."""
        if await self._write(lambda gallery: gallery.remove([id]), deadline) == 0:
            raise HTTPException(404, f"There is no item {id}.")

    async def _write(self, act: Callable[[Gallery], T], deadline: asyncio.Timeout) -> T:
        """One after the other. What has begun is finished and answered, however long it takes; what has not is not."""
        async with self._writing:
            deadline.reschedule(None)
            return await run_in_threadpool(act, self.check_writable())


def _add(gallery: Gallery, content: bytes, label: str | None, name: str | None) -> int:
    digest = hashlib.sha256(content).hexdigest()
    if ids := gallery.ids(f"hash = '{digest}'"):
        raise HTTPException(409, f"The gallery has this image already, as item {ids[0]}.")
    # By its content, so that no upload replaces another; one with a name has a folder of its own.
    file = gallery.path / UPLOADS / digest if name is None else gallery.path / UPLOADS / digest[:32] / name
    file.parent.mkdir(parents=True, exist_ok=True)
    is_new = not file.exists()
    with atomic_write(file) as stream:
        stream.write(content)
    try:
        added = gallery.add([file], [label])
    except BaseException:
        if is_new:
            file.unlink(missing_ok=True)
        raise
    if not added:
        raise ImageError("The image cannot be read.")
    return added[0]


async def _service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


ServiceDependency = Annotated[Service, Depends(_service_of)]
