"""Dynamic batching: images that arrive together go through the encoder together."""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from kedge.model import Model
from kedge.serving.metrics import Metrics

__all__ = ["BatchedEncoder"]

_CPU_PIXELS = 8 * 224 * 224
"""What a CPU's caches have room for: in larger batches each image takes longer."""
_Request = tuple[Tensor, "asyncio.Future[np.ndarray]"]


class BatchedEncoder:
    """One encoder for all requests.

    Nobody waits for a batch to fill: whatever arrived while one was encoded is the next one.
    """

    def __init__(self, model: Model, batch_size: int, metrics: Metrics) -> None:
        self._model, self._metrics = model, metrics
        if model.device.type == "cpu":
            batch_size = max(1, min(batch_size, _CPU_PIXELS // (model.preprocessing.size or 1) ** 2))
        self._batch_size = batch_size
        self._queue: deque[_Request] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        self._worker: asyncio.Task[None] | None = None

    async def embed(self, pixels: Tensor) -> np.ndarray:
        """The embedding of one image of the size that the encoder takes."""
        future: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
        self._queue.append((pixels, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while self._queue:
            batch = self._next_batch()
            if not batch:
                continue
            self._metrics.batch.observe(len(batch))
            try:
                embeddings = await loop.run_in_executor(self._thread, self._embed, [pixels for pixels, _ in batch])
            except Exception as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for embedding, (_, future) in zip(embeddings, batch, strict=True):
                if not future.done():
                    future.set_result(embedding)

    def _next_batch(self) -> list[_Request]:
        """The next requests, as far as their images are of one size."""
        batch: list[_Request] = []
        while self._queue and len(batch) < self._batch_size:
            if batch and self._queue[0][0].shape != batch[0][0].shape:
                break
            request = self._queue.popleft()
            if not request[1].done():  # its client may have given up
                batch.append(request)
        return batch

    def _embed(self, batch: list[Tensor]) -> np.ndarray:
        embeddings: np.ndarray = self._model.embed_pixels(torch.stack(batch)).float().cpu().numpy()
        return embeddings

    def close(self) -> None:
        """Let the thread go."""
        self._thread.shutdown()
