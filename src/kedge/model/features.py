"""Features cache: what an encoder made of an image's content, on disk, so that each image is encoded once.

One folder per encoder (backbone, weights and preprocessing; not the head), below `$KEDGE_DATA`. It holds segments that
are written whole and never changed: SHA-256 of the images' content, their features, and a checksum for each row. Any
number of processes read and write. What is damaged, or of another encoder, is not used but computed anew.
`KEDGE_FEATURES=off` turns the cache off.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, islice
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
from kedge.io import atomic_write
from kedge.model.inputs import embed_split
from kedge.model.model import Model, Vectors

if TYPE_CHECKING:
    from kedge.datasets import ImageSplit

__all__ = ["FeatureCache", "file_features", "split_embeddings", "split_features", "vectors_of"]

_log = logging.getLogger(__name__)
_SUFFIX = ".features"
_HEADER = struct.Struct("<8s32sQQ8x")
"""Magic, encoder, rows and width. Behind it: digests (rows x 32 bytes), features (float32), CRC-32 of each row."""
_MAGIC = b"kedgeF1\n"
_ROWS = 4096
"""Rows of a full segment."""
_MAX_SMALL = 8
"""When a process closes the cache and finds more segments that are not half full, it joins them."""
_BATCH = 64


class FeatureCache:
    """Features of one encoder by the SHA-256 of an image's content. Close it, or use it as a context manager."""

    def __init__(self, folder: Path | None, encoder: str, width: int) -> None:
        self.folder, self.encoder, self.width = folder, bytes.fromhex(encoder), width
        self._new: dict[bytes, np.ndarray] = {}
        self._places: dict[bytes, tuple[_Segment, int]] = {}
        for file in sorted(folder.glob(f"*{_SUFFIX}")) if folder is not None and folder.is_dir() else ():
            self._open(file)

    @classmethod
    def of(cls, model: Model, *, enabled: bool = True) -> Self:
        """The cache of a model's encoder; not `enabled`, it holds nothing."""
        if not enabled or os.environ.get("KEDGE_FEATURES", "").lower() == "off":
            return cls(None, "", model.width)
        encoder = model.encoder_fingerprint
        return cls(data_root() / "features" / encoder[:16], encoder, model.width)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._places.keys() | self._new.keys())

    def find(self, digest: str) -> Tensor | None:
        """The features of an image; None where they are not known."""
        key = bytes.fromhex(digest)
        if (row := self._new.get(key)) is not None:
            return torch.from_numpy(row)
        if (place := self._places.get(key)) is None:
            return None
        segment, number = place
        if (features := segment.read(number)) is None:
            self._discard(segment)
            return None
        return torch.from_numpy(features)

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
        """Keep the features of images; they are on disk after `flush` or `close`."""
        if self.folder is None:
            return
        rows = np.ascontiguousarray(features.detach().cpu().float().numpy())
        self._new |= {bytes.fromhex(digest): row for digest, row in zip(digests, rows, strict=True)}
        if len(self._new) >= _ROWS:
            self.flush()

    def flush(self) -> None:
        """Write what is new; where that fails, as on a full disk, go on without."""
        new, self._new = self._new, {}
        if new and self.folder is not None:
            self._write(new)

    def close(self) -> None:
        """Write what is new, and join small segments."""
        self.flush()
        segments = {id(segment): segment for segment, _ in self._places.values()}.values()
        small = [segment for segment in segments if len(segment.digests) < _ROWS // 2]
        if len(small) <= _MAX_SMALL:
            return
        rows = ((s.digests[n].tobytes(), s.read(n)) for s in small for n in range(len(s.digests)))
        joined = iter({key: features for key, features in rows if features is not None}.items())
        if all(self._write(part) for part in iter(lambda: dict(islice(joined, _ROWS)), {})):
            for segment in small:
                with suppress(OSError):
                    segment.file.unlink(missing_ok=True)

    def _write(self, rows: Mapping[bytes, np.ndarray]) -> bool:
        assert self.folder is not None
        digests = np.frombuffer(b"".join(rows), np.uint8).reshape(-1, 32)
        features = np.stack(list(rows.values())).astype("<f4", copy=False)
        checks = np.array([_crc(*row) for row in zip(digests, features, strict=True)], "<u4")
        file = self.folder / f"{secrets.token_hex(8)}{_SUFFIX}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(file) as stream:
                stream.write(_HEADER.pack(_MAGIC, self.encoder, len(digests), self.width))
                for part in (digests, features, checks):
                    stream.write(part.data)
        except OSError as error:
            _log.warning("Features are not cached in %s (%s).", self.folder, error.strerror or error)
            self.folder = None
            return False
        self._open(file)
        return True

    def _open(self, file: Path) -> None:
        try:
            segment = _Segment(file, self.encoder, self.width)
        except (OSError, ValueError) as error:
            _log.warning("%s is not used: %s.", file, error)
            return
        self._places |= {key.tobytes(): (segment, row) for row, key in enumerate(segment.digests)}

    def _discard(self, segment: _Segment) -> None:
        """Forget a damaged segment, and remove it: its features are computed anew."""
        _log.warning("%s is damaged: its features are computed anew.", segment.file)
        self._places = {key: place for key, place in self._places.items() if place[0] is not segment}
        with suppress(OSError):
            segment.file.unlink(missing_ok=True)


class _Segment:
    """A memory-mapped file of features."""

    def __init__(self, file: Path, encoder: bytes, width: int) -> None:
        self.file = file
        data = np.memmap(file, np.uint8, "r")
        if len(data) < _HEADER.size:
            raise ValueError("it is cut off")
        magic, owner, rows, columns = _HEADER.unpack(data[: _HEADER.size].tobytes())
        if (magic, owner, columns) != (_MAGIC, encoder, width):
            raise ValueError("it holds no features of this encoder")
        first, second, third, end = accumulate((_HEADER.size, 32 * rows, 4 * width * rows, 4 * rows))
        if len(data) != end:
            raise ValueError("it is cut off")
        self.digests = data[first:second].reshape(rows, 32)
        self._features = data[second:third].view("<f4").reshape(rows, width)
        self._checks = data[third:].view("<u4")

    def read(self, row: int) -> np.ndarray | None:
        """A copy of a row's features; None where they are damaged."""
        features = np.array(self._features[row], np.float32)
        return features if _crc(self.digests[row], features) == self._checks[row] else None


def _crc(digest: np.ndarray, features: np.ndarray) -> int:
    return zlib.crc32(features.data, zlib.crc32(digest.tobytes()))


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
            for start in range(0, len(missing), _BATCH):
                yield from list(prefetch(read, missing[start : start + _BATCH]))

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
        raise DataError(f"{split.files[row]} {reason} It could be read before: put it back, or train anew.")
    return features


def split_embeddings(model: Model, split: ImageSplit, *, batch_size: int = 256, title: str = "images") -> Tensor:
    """Embeddings of all images of a split, N x dim on the model's device; of files through the cache of features."""
    if split.files is None:
        return embed_split(model.embed_pixels, split, batch_size=batch_size, title=title)
    features = split_features(model, split, title=title)
    return torch.cat([model.embed_features(part).float() for part in torch.split(features, 4096)])
