"""A gallery behind a server: read by many requests at once, written by one thread."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from kedge.errors import ConfigError, PictureError
from kedge.gallery import Gallery, Result
from kedge.gallery.gallery import Method
from kedge.gallery.inverted_lists import DamagedLists
from kedge.io import atomic_write
from kedge.serving.batching import BatchedEncoder
from kedge.serving.catalogue import UPLOADS, Catalogue
from kedge.serving.decoding import Decoders
from kedge.serving.errors import Refused
from kedge.serving.image_files import ImageFiles
from kedge.serving.limits import ConcurrencyLimiter, UploadBudget
from kedge.serving.metrics import Metrics
from kedge.serving.projection import ProjectionCache
from kedge.serving.settings import Settings

__all__ = ["Service"]

T = TypeVar("T")
_THUMBNAIL_SIDE = 256
"""Of thumbnails that are made here, where the gallery keeps none."""
_THUMBNAIL_CACHE = 512
_TOUCH_SECONDS = 1.0


class Service:
    """All that the API can do; methods with `async` may wait, the others are quick."""

    def __init__(self, path: str | Path, settings: Settings, metrics: Metrics) -> None:
        self.settings, self.metrics = settings, metrics
        self.gallery = Gallery.open(path, memory=settings.memory)
        # Writing moves a Gallery on to a newer version, so that readers have one of their own.
        self._writer = Gallery.open(path, self.gallery.model) if settings.writable else None
        self.upload_budget = UploadBudget(max(settings.upload_memory, settings.max_bytes), metrics)
        self.limiter = ConcurrencyLimiter(settings.concurrency, settings.seconds, metrics)
        model = self.gallery.model
        self._encoder = None if model is None else BatchedEncoder(model, settings.batch, metrics)
        count = min(4, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="search")
        # Uploads and thumbnails apart: neither waits for the other's slow images.
        self._upload_decoders = Decoders(count, settings.decode_seconds, settings.max_pixels)
        self._thumbnail_decoders = Decoders(count, settings.decode_seconds, settings.max_pixels)
        self._projection_thread = ThreadPoolExecutor(1, thread_name_prefix="projection")
        self._writer_thread = ThreadPoolExecutor(1, thread_name_prefix="write")
        self._mutex = threading.Lock()
        self._catalogue: Catalogue | None = None
        self._touched = -math.inf
        self.projection = ProjectionCache()
        self.ready = False
        """Whether queries can be answered."""
        self.fingerprint = None if model is None else model.fingerprint
        self._cached_thumbnail = lru_cache(_THUMBNAIL_CACHE)(self._make_thumbnail)
        self._files = ImageFiles(self.gallery.path, settings.images)

    async def start(self) -> None:
        """Read what the first request would wait for."""
        await self.run(self.catalogue)
        if self.gallery.model is not None:
            side = self.gallery.model.preprocessing.size or 32
            await self.embed(torch.zeros(3, side, side, dtype=torch.uint8))
        self.ready = True

    def close(self) -> None:
        """Finish what was begun."""
        self.ready = False
        for pool in (self._threads, self._projection_thread, self._writer_thread):
            pool.shutdown()
        self._upload_decoders.close()
        self._thumbnail_decoders.close()
        if self._encoder is not None:
            self._encoder.close()

    async def run(self, act: Callable[..., T], *arguments: object) -> T:
        """In a thread, so that other requests go on."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, act, *arguments)

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

    # ------------------------------------------------------------------ asking

    async def pixels(self, content: bytes) -> Tensor:
        """An image as the encoder takes it."""
        model = self.gallery.model
        if model is None:
            raise Refused(
                HTTPStatus.UNPROCESSABLE_ENTITY, "This gallery holds vectors and no model: search with an item."
            )
        return torch.from_numpy(
            await self._upload_decoders.run(self._upload_decoders.pixels, content, model.preprocessing.size)
        )

    async def embed(self, pixels: Tensor) -> np.ndarray:
        """The embedding of an image, in a batch with those of other requests."""
        if self._encoder is None:
            raise RuntimeError("There is no encoder.")
        return await self._encoder.embed(pixels)

    def vector(self, catalogue: Catalogue, id: int) -> np.ndarray:
        """The embedding of an item."""
        try:
            return catalogue.vector(id)
        except KeyError:
            raise Refused(HTTPStatus.NOT_FOUND, f"There is no item {id}.") from None
        except DamagedLists:
            return self.gallery.vector(id)  # the search that follows has the lists rebuilt

    def search(
        self,
        catalogue: Catalogue,
        vector: np.ndarray,
        k: int,
        method: Method,
        probes: int,
        labels: Sequence[str],
        exclude_id: int | None,
    ) -> Result:
        """Search one version of the gallery."""
        quoted = ", ".join("'" + label.replace("'", "''") + "'" for label in labels)
        where = f"label IN ({quoted})" if labels else None
        [result] = self.gallery.search_embeddings(
            vector[None], k, method, probes, where=where, exclude_id=exclude_id, snapshot=catalogue.snapshot
        )
        self.metrics.searched.labels(method).observe(result.seconds)
        return result

    # ------------------------------------------------------------------ looking

    async def thumbnail(self, id: int) -> bytes:
        """A small copy of an item's image, as JPEG."""
        return await self._thumbnail_decoders.run(self._find_thumbnail, id)

    async def run_projection(self, act: Callable[..., T], *arguments: object) -> T:
        """In a thread of its own: no search waits for the map."""
        return await asyncio.get_running_loop().run_in_executor(self._projection_thread, act, *arguments)

    def _find_thumbnail(self, id: int) -> bytes:
        thumbnail = None
        try:
            if self.gallery.thumbnails:
                thumbnail = self.gallery.thumbnail(id)
            # The item is looked up each time: an image goes with its item, even if its copy is cached.
            thumbnail = thumbnail or self._cached_thumbnail(id, self.gallery.item(id).path)
        except (ConfigError, PictureError):
            pass
        if thumbnail is None:
            raise Refused(HTTPStatus.NOT_FOUND, f"There is no image of an item {id}.")
        return thumbnail

    def _make_thumbnail(self, id: int, path: str | None) -> bytes | None:
        del id  # a key of the cache: a later item may have a new image in the same file
        file = self._files.find(path)
        return None if file is None else self._thumbnail_decoders.thumbnail(file, _THUMBNAIL_SIDE)

    # ------------------------------------------------------------------ writing

    async def add(self, content: bytes, label: str | None) -> int:
        """Add an image; its id."""
        await self.pixels(content)  # only images are kept
        return await self._write(self._add, content, label)

    def _add(self, content: bytes, label: str | None) -> int:
        gallery = self.check_writable()
        digest = hashlib.sha256(content).hexdigest()
        if ids := gallery.ids(f"hash = '{digest}'"):
            raise Refused(HTTPStatus.CONFLICT, f"That image is there already, as item {ids[0]}.")
        # A name of ours: none that comes with a request ever names a file.
        file = gallery.path / UPLOADS / digest
        file.parent.mkdir(exist_ok=True)
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
            raise PictureError("The image cannot be read.")
        return added[0]

    async def remove(self, id: int) -> None:
        """Remove an item."""
        if await self._write(lambda: self.check_writable().remove(id)) == 0:
            raise Refused(HTTPStatus.NOT_FOUND, f"There is no item {id}.")

    async def _write(self, act: Callable[..., T], *arguments: object) -> T:
        """One after the other. What has begun is finished and answered, however long it takes; what has not is not."""
        write = self._writer_thread.submit(act, *arguments)
        try:
            return await asyncio.shield(asyncio.wrap_future(write))
        except asyncio.CancelledError:
            if write.cancel():
                raise
            return await asyncio.shield(asyncio.wrap_future(write))

    def check_writable(self) -> Gallery:
        """The gallery to write to; refused where the server only reads."""
        if self._writer is None:
            raise Refused(HTTPStatus.FORBIDDEN, "This server only reads: start it with --writable.")
        return self._writer
