"""A gallery as a server uses it: read by many at once, written by one."""

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
from kedge.gallery.calibration import load_calibration
from kedge.gallery.checksums import DamagedLists
from kedge.gallery.gallery import Method
from kedge.io import atomic_write
from kedge.serving.batching import Gate, SharedEncoder
from kedge.serving.catalogue import UPLOADS, Catalogue
from kedge.serving.decoding import Decoders
from kedge.serving.errors import Refused
from kedge.serving.image_files import ImageFiles
from kedge.serving.in_flight import UploadBudget
from kedge.serving.maps import Maps
from kedge.serving.metrics import Metrics
from kedge.serving.settings import Settings

__all__ = ["Service"]

T = TypeVar("T")
_THUMBNAIL = 256
"""The longer side of those that are made here, where the gallery keeps none."""
_KEPT = 512
_TOUCHED_SECONDS = 1.0


class Service:
    """All that the API can do; methods with `async` may wait, the others are quick."""

    def __init__(self, path: str | Path, settings: Settings, metrics: Metrics) -> None:
        self.settings, self.metrics = settings, metrics
        self.gallery = Gallery.open(path, memory=settings.memory)
        # Whoever writes moves the record on, so that readers have one of their own.
        self._writer = Gallery.open(path, self.gallery.model) if settings.writable else None
        self.uploads = UploadBudget(max(settings.upload_memory, settings.max_bytes), metrics)
        self.gate = Gate(settings.waiting, settings.seconds, metrics)
        model = self.gallery.model
        self._encoder = None if model is None else SharedEncoder(model, settings.batch, metrics)
        count = min(4, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="search")
        # Uploads and thumbnails apart: neither waits for the other's slow pictures.
        self._uploads = Decoders(count, settings.decode_seconds, settings.max_pixels)
        self._thumbnails = Decoders(count, settings.decode_seconds, settings.max_pixels)
        self._drawing = ThreadPoolExecutor(1, thread_name_prefix="draw")
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="write")
        self._mutex = threading.Lock()
        self._catalogue: Catalogue | None = None
        self._touched = -math.inf
        self._calibration_file = self.gallery.path / "calibration.json"
        self._calibration_written: int | None = None
        self.maps = Maps()
        self.ready = False
        """Whether queries can be answered."""
        self.fingerprint = None if model is None else model.fingerprint
        self._thumbnail = lru_cache(_KEPT)(self._made_thumbnail)
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
        for pool in (self._threads, self._drawing, self._writing):
            pool.shutdown()
        self._uploads.close()
        self._thumbnails.close()
        if self._encoder is not None:
            self._encoder.close()

    async def run(self, act: Callable[..., T], *arguments: object) -> T:
        """In a thread, so that other requests go on."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, act, *arguments)

    def touch(self) -> None:
        """Raise unless the table can be read, as far as was known a second ago."""
        now = time.monotonic()
        if now - self._touched > _TOUCHED_SECONDS:
            self.gallery.touch()
            self._touched = now

    def catalogue(self) -> Catalogue:
        """The newest version."""
        snapshot = self.gallery.snapshot()
        with self._mutex:
            known = self._catalogue
            # Of the same version there may be another snapshot, once damaged lists were rebuilt.
            if known is None or (known.snapshot is not snapshot and known.snapshot.version <= snapshot.version):
                self._catalogue = known = Catalogue(snapshot)
                self.metrics.items.set(len(known))
                self.metrics.version.set(snapshot.version)
            return known

    # ------------------------------------------------------------------ asking

    async def pixels(self, content: bytes) -> Tensor:
        """A picture as the encoder wants it."""
        model = self.gallery.model
        if model is None:
            raise Refused(
                HTTPStatus.UNPROCESSABLE_ENTITY, "This gallery holds vectors and no model: search with an item."
            )
        return torch.from_numpy(await self._uploads.run(self._uploads.pixels, content, model.preprocessing.size))

    async def embed(self, pixels: Tensor) -> np.ndarray:
        """The embedding of a picture, together with those of others."""
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
        """What one version holds that is like a vector."""
        quoted = ", ".join("'" + label.replace("'", "''") + "'" for label in labels)
        where = f"label IN ({quoted})" if labels else None
        self._refresh_calibration()
        [found] = self.gallery.search_embeddings(
            vector[None], k, method, probes, where=where, without=exclude_id, snapshot=catalogue.snapshot
        )
        self.metrics.searched.labels(method).observe(found.seconds)
        return found

    def _refresh_calibration(self) -> None:
        """Read the calibration anew where another process has written it."""
        try:
            written = self._calibration_file.stat().st_mtime_ns
        except OSError:
            written = None
        if written != self._calibration_written:
            self.gallery.calibration = load_calibration(self.gallery.path)
            self._calibration_written = written

    # ------------------------------------------------------------------ looking

    async def thumbnail(self, id: int) -> bytes:
        """A small copy of an item's picture, as JPEG."""
        return await self._thumbnails.run(self._small, id)

    async def draw(self, act: Callable[..., T], *arguments: object) -> T:
        """In the one thread that draws: nobody who searches waits for a map."""
        return await asyncio.get_running_loop().run_in_executor(self._drawing, act, *arguments)

    def _small(self, id: int) -> bytes:
        try:
            kept = self.gallery.thumbnail(id) if self.gallery.thumbnails else None
            # Looked up each time: a picture goes with its item, even if its copy is remembered.
            found = kept or self._thumbnail(id, self.gallery.item(id).path)
        except (ConfigError, PictureError):
            found = None
        if found is None:
            raise Refused(HTTPStatus.NOT_FOUND, f"There is no picture of an item {id}.")
        return found

    def _made_thumbnail(self, id: int, path: str | None) -> bytes | None:
        del id  # a later item may have a new picture in the same file
        file = self._files.find(path)
        if file is None:
            return None
        return self._thumbnails.thumbnail(file, _THUMBNAIL)

    # ------------------------------------------------------------------ writing

    async def add(self, content: bytes, label: str | None) -> int:
        """Add a picture; its id."""
        await self.pixels(content)  # so that only pictures are kept
        return await self._write(self._add, content, label)

    def _add(self, content: bytes, label: str | None) -> int:
        gallery = self._own_writer()
        digest = hashlib.sha256(content).hexdigest()
        if known := gallery.ids(f"hash = '{digest}'"):
            raise Refused(HTTPStatus.CONFLICT, f"That picture is there already, as item {known[0]}.")
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
            raise PictureError("The picture cannot be read.")
        return added[0]

    async def remove(self, id: int) -> None:
        """Remove an item."""
        if await self._write(lambda: self._own_writer().remove(id)) == 0:
            raise Refused(HTTPStatus.NOT_FOUND, f"There is no item {id}.")

    async def _write(self, act: Callable[..., T], *arguments: object) -> T:
        """One after the other. What has begun is finished and answered, however long it takes; what has not is not."""
        writing = self._writing.submit(act, *arguments)
        try:
            return await asyncio.shield(asyncio.wrap_future(writing))
        except asyncio.CancelledError:
            if writing.cancel():
                raise
            return await asyncio.shield(asyncio.wrap_future(writing))

    def _own_writer(self) -> Gallery:
        if self._writer is None:
            raise Refused(HTTPStatus.FORBIDDEN, "This server only reads: start it with --writable.")
        return self._writer
