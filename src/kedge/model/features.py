"""Features cache: what an encoder made of an image's content, on disk, so that each image is encoded once.

One SQLite file per encoder (backbone, weights and preprocessing; not the head), below `$KEDGE_DATA`: features and their
checksum by the SHA-256 of an image's content. Any number of processes read and write. What is damaged is computed anew.
`KEDGE_FEATURES=off` turns the cache off.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sqlite3
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from rich.progress import track
from torch import Tensor

from kedge.console import stderr
from kedge.datasets.digests import known_digests, remember_digests
from kedge.datasets.download import data_root
from kedge.errors import DataError, ImageError
from kedge.images import prefetch, read_image
from kedge.model.inputs import embed_split
from kedge.model.model import Model, Vectors

if TYPE_CHECKING:
    from kedge.datasets import ImageSplit

__all__ = ["FeatureCache", "file_features", "split_embeddings", "split_features", "vectors_of"]

_log = logging.getLogger(__name__)
_TABLE = "CREATE TABLE IF NOT EXISTS features (digest BLOB PRIMARY KEY, features BLOB, crc INTEGER)"
_WAIT_SECONDS = 60
"""For another process that writes."""
_BATCH = 64


class FeatureCache:
    """Features of one encoder by the SHA-256 of an image's content, for any number of threads. Close it after use.

    Without a `file`, or where it cannot be used (a full disk), it holds nothing.
    """

    def __init__(self, file: Path | None, width: int) -> None:
        self.file, self.width = file, width
        self._lock = threading.RLock()
        self._database: sqlite3.Connection | None = None
        if file is not None:
            with self._guarded():
                file.parent.mkdir(parents=True, exist_ok=True)
                self._database = sqlite3.connect(file, timeout=_WAIT_SECONDS, check_same_thread=False)
                # A kill loses nothing. After a power cut, checksums tell what was not written.
                self._database.execute("PRAGMA synchronous = OFF")
                self._database.execute(_TABLE)

    @classmethod
    def of(cls, model: Model, *, enabled: bool = True) -> Self:
        """The cache of a model's encoder; not `enabled`, it holds nothing."""
        if not enabled or os.environ.get("KEDGE_FEATURES", "").lower() == "off":
            return cls(None, model.width)
        return cls(data_root() / "features" / f"{model.encoder_fingerprint}.sqlite", model.width)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def find(self, digest: str) -> Tensor | None:
        """The features of an image; None where they are not known."""
        key, row = bytes.fromhex(digest), None
        with self._guarded():
            if self._database is not None:
                row = self._database.execute("SELECT features, crc FROM features WHERE digest = ?", (key,)).fetchone()
        if row is None:
            return None
        if len(row[0]) != 4 * self.width or _crc(key, row[0]) != row[1]:
            _log.warning("%s is damaged; some features are computed again.", self.file)
            return None
        return torch.from_numpy(np.frombuffer(row[0], "<f4").astype(np.float32))

    def get(self, digests: Sequence[str | None]) -> tuple[Tensor, list[int]]:
        """Features of N images, N x width, and the rows whose features are not known."""
        features, missing = torch.zeros(len(digests), self.width), []
        for row, digest in enumerate(digests):
            if digest is None or (found := self.find(digest)) is None:
                missing.append(row)
            else:
                features[row] = found
        return features, missing

    def put(self, digests: Sequence[str], features: Tensor) -> None:
        """Keep the features of images."""
        keys = [bytes.fromhex(digest) for digest in digests]
        values = [row.tobytes() for row in features.detach().cpu().numpy().astype("<f4")]
        rows = [(key, value, _crc(key, value)) for key, value in zip(keys, values, strict=True)]
        with self._guarded():
            if self._database is not None:
                with self._database:
                    self._database.executemany("INSERT OR REPLACE INTO features VALUES (?, ?, ?)", rows)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._database is not None:
                self._database.close()
            self._database = None

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """One thread at a time; what fails is the end of the cache, and a damaged file makes room for a new one."""
        with self._lock:
            try:
                yield
            except (OSError, sqlite3.Error) as error:
                _log.warning("Features are not cached in %s (%s).", self.file, error)
                self.close()
                if type(error) is sqlite3.DatabaseError and self.file is not None:  # malformed: others are subclasses
                    for file in (self.file, self.file.with_name(f"{self.file.name}-journal")):
                        file.unlink(missing_ok=True)


def _crc(digest: bytes, features: bytes) -> int:
    return zlib.crc32(features, zlib.crc32(digest))


# ---------------------------------------------------------------------- with a model


def vectors_of(model: Model, digests: Sequence[str], inputs: Sequence[Tensor], cache: FeatureCache) -> Vectors:
    """Embeddings and features of a batch, on the CPU.

    An input is an image's uint8 pixels, as `Preprocessing.to_pixels` made them, or its features, where the cache had
    them; new features are put there under the digests of the images' content.
    """
    features = _features_of(model, digests, inputs, cache)
    return Vectors(model.embed_features(features).float().cpu(), features)


def _features_of(model: Model, digests: Sequence[str], inputs: Sequence[Tensor], cache: FeatureCache) -> Tensor:
    features = torch.zeros(len(inputs), model.width)
    by_shape: dict[torch.Size, list[int]] = {}
    for row, values in enumerate(inputs):
        if values.dtype == torch.uint8:
            by_shape.setdefault(values.shape, []).append(row)
        else:
            features[row] = values
    for rows in by_shape.values():
        features[rows] = model.features(torch.stack([inputs[row] for row in rows])).float().cpu()
        cache.put([digests[row] for row in rows], features[rows])
    return features


def file_features(model: Model, files: Sequence[str | Path], *, title: str = "images") -> tuple[Tensor, dict[int, str]]:
    """Features of image files, N x width on the CPU; and the rows of those that cannot be read, with the reason.

    A file whose features are cached is not decoded, and not even read where it did not change since it was last hashed.
    """
    digests, states = known_digests(files)
    unreadable: dict[int, str] = {}
    with FeatureCache.of(model) as cache:
        features, missing = cache.get(digests)

        def read(row: int) -> Tensor | str:
            try:
                content = Path(files[row]).read_bytes()
                digests[row] = digest = hashlib.sha256(content).hexdigest()
                if (known := cache.find(digest)) is not None:
                    return known
                return torch.from_numpy(model.preprocessing.to_pixels(read_image(content)))
            except OSError as error:
                return f"cannot be read: {error.strerror or error}."
            except ImageError as error:
                return str(error).removeprefix("The image ")

        def decoded() -> Iterator[Tensor | str]:
            if model.device.type != "cpu":
                yield from prefetch(read, missing, ahead=2 * _BATCH)
                return
            # One after the other: decoding threads would take the cores from under the encoder's.
            for start in range(0, len(missing), 4 * _BATCH):
                yield from list(prefetch(read, missing[start : start + 4 * _BATCH]))

        console = stderr()
        bar: dict[str, Any] = {"console": console, "transient": True, "disable": not console.is_terminal}
        inputs = track(decoded(), f"encoding {title}", len(missing), **bar)
        numbered = zip(missing, inputs, strict=True)
        while batch := dict(islice(numbered, _BATCH)):
            unreadable |= {row: reason for row, reason in batch.items() if isinstance(reason, str)}
            readable = {row: values for row, values in batch.items() if not isinstance(values, str)}
            names = [digest for row in readable if (digest := digests[row]) is not None]
            features[list(readable)] = _features_of(model, names, list(readable.values()), cache)
    remember_digests((files[row], states[row], digests[row]) for row in missing)
    return features, unreadable


def split_features(model: Model, split: ImageSplit, *, batch_size: int = _BATCH, title: str = "images") -> Tensor:
    """Features of all images of a split, N x width; those of files through the cache, on the CPU."""
    if split.files is None:
        return embed_split(model.features, split, batch_size=batch_size, title=title)
    features, unreadable = file_features(model, split.files, title=title)
    for row, reason in unreadable.items():
        raise DataError(f"{split.files[row]} {reason} It could be read before; restore it, or train again.")
    return features


def split_embeddings(model: Model, split: ImageSplit, *, batch_size: int = 256, title: str = "images") -> Tensor:
    """Embeddings of all images of a split, N x dim on the model's device; of files through the cache of features."""
    if split.files is None:
        return embed_split(model.embed_pixels, split, batch_size=batch_size, title=title)
    features = split_features(model, split, title=title)
    return torch.cat([model.embed_features(part).float() for part in torch.split(features, 4096)])
