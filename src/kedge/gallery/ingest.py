"""Images into the table: listed, decoded ahead of the encoder, embedded, and committed in whole steps."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kedge.datasets.base import Source
from kedge.datasets.external import sources_of
from kedge.errors import DataError, ImageError
from kedge.gallery.distances import unit_rows
from kedge.gallery.table import Table
from kedge.images import Preprocessing, list_images, prefetch, read_image
from kedge.images.io import make_thumbnail
from kedge.io import atomic_write
from kedge.model import Model, Vectors
from kedge.model.features import FeatureCache, vectors_of

if TYPE_CHECKING:
    from kedge.gallery.gallery import Gallery

__all__ = [
    "UNREADABLE",
    "Added",
    "Batch",
    "ExistingItem",
    "add_images",
    "collate",
    "dataset_images",
    "decode_file",
    "existing_folder",
    "existing_items",
    "index_folder",
    "list_with_labels",
    "vector_columns",
    "write_unreadable",
]

UNREADABLE = "unreadable.txt"
"""In the gallery's folder: path and reason of every image that the last run could not read."""
NOT_TEXT = "Its name is not valid UTF-8: rename it."
_BATCH = 64
_PREFETCH = 2
"""Batches that are decoded while the encoder works on one."""
_WRITE = 512
"""Images that become one file of the table."""
_COMMIT_EVERY = 512
_MIN_CACHED = 32
"""Fewer images are encoded sooner than the cache of features is opened."""


class Added(list[int]):
    """The ids of what was added; what was not, and why."""

    def __init__(self, total: int) -> None:
        super().__init__()
        self.total = total
        """The number of images to add."""
        self.skipped: list[tuple[str, str]] = []
        """Path and reason of every image that could not be read."""
        self.present = 0
        """How many were there already."""

    @property
    def done(self) -> int:
        """How many images have been processed."""
        return len(self) + self.present + len(self.skipped)

    def __str__(self) -> str:
        return f"{len(self):,} added, {self.present:,} already there, {len(self.skipped):,} unreadable"

    def __repr__(self) -> str:
        return f"<{self}>"


# ---------------------------------------------------------------------- listing


@dataclass(frozen=True)
class StoredImage:
    """An image of a dataset in the place of a file."""

    source: Source
    row: int
    name: str

    def __str__(self) -> str:
        return self.name

    def read_bytes(self) -> bytes:
        """What the file would hold."""
        return self.source.content(self.row)


def list_with_labels(
    source: str | Path | Sequence[str | Path], labels: Sequence[str | None] | None = None
) -> tuple[list[Path], list[str | None]]:
    """Image files and their labels; in a folder, the first-level folders are labels."""
    if isinstance(source, (str, Path)) and Path(source).is_dir():
        root = Path(source).absolute()
        files = list_images(root)
        parts = [file.relative_to(root).parts for file in files]
        folders = [part[0] if len(part) > 1 else None for part in parts]
    else:
        files = [Path(file).absolute() for file in ([source] if isinstance(source, (str, Path)) else source)]
        folders = [None] * len(files)
    return files, folders if labels is None else list(labels)


def dataset_images(
    dataset: Any, labels: Sequence[str | None] | None = None
) -> tuple[list[Path | StoredImage], list[str | None]]:
    """The images of a PyTorch or Hugging Face dataset, all splits of it, and the class of each.

    Those that come from files are these files. The others get names that change with their content: of two datasets
    with one name, neither must replace the other's images.
    """
    files: list[Path | StoredImage] = []
    names: list[str | None] = []
    for source in sources_of(dataset):
        names += map(source.name_of, source.labels())
        identity = source.identity
        version = None if identity is None else _digest(repr(identity).encode())
        for row in range(len(source)):
            if (path := source.path(row)) is not None:
                files.append(Path(path))
                continue
            name = f"{source.name}-{version}/{row}"
            if version is None:
                name = f"{source.name}/{row}"
                with contextlib.suppress(ImageError):  # adding it will say why
                    name = f"{source.name}/{_digest(source.content(row))}"
            files.append(StoredImage(source, row, name))
    return files, names if labels is None else list(labels)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


# ---------------------------------------------------------------------- decoding


class ExistingItem(NamedTuple):
    """An item that the table has already."""

    id: int
    hash: str


class Decoded(NamedTuple):
    """An image; no image and the reason; or neither, if the table has it already."""

    image: Tensor | None = None
    """Its pixels; or its features, where they are cached."""
    hash: str = ""
    thumbnail: bytes | None = None
    reason: str = ""


class Batch(NamedTuple):
    """Images for the encoder, and what is known of the others."""

    columns: dict[str, list[Any]]
    """Of the rows that the images become, but for their vectors."""
    images: list[Tensor]
    skipped: list[tuple[str, str]]
    present: int


def decode_file(
    file: Path | StoredImage,
    existing: ExistingItem | None,
    preprocessing: Preprocessing,
    thumbnails: int,
    cache: FeatureCache | None = None,
) -> Decoded:
    """Read and decode one image for the encoder, unless its features are cached and no thumbnail needed."""
    if not _is_text(str(file)):
        return Decoded(reason="Its name is not valid UTF-8: rename it.")
    try:
        content = file.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        if existing is not None and existing.hash == digest:
            return Decoded()
        features = None if cache is None else cache.find(digest)
        if features is not None and not thumbnails:
            return Decoded(features, digest)
        image = read_image(content)
    except (OSError, ImageError) as error:
        return Decoded(reason=getattr(error, "strerror", None) or str(error))
    # Resized here, in the decoding threads: a full-size image is far larger than what the encoder sees.
    thumbnail = make_thumbnail(image, thumbnails) if thumbnails else None
    pixels = torch.from_numpy(preprocessing.to_pixels(image)) if features is None else features
    return Decoded(pixels, digest, thumbnail)


def _is_text(name: str) -> bool:
    """Whether a name can be stored: a file's may hold bytes that are no text."""
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def collate(
    first_id: int, files: Sequence[Any], decoded: Sequence[Decoded], columns: Mapping[str, Sequence[Any]]
) -> Batch:
    """What was decoded of `files`, whose ids count on from `first_id`; `columns` has the other values of each file."""
    new = [(row, item) for row, item in enumerate(decoded) if item.image is not None]
    skipped = [(str(file), item.reason) for file, item in zip(files, decoded, strict=True) if item.reason]
    of_images: dict[str, list[Any]] = {
        "id": [first_id + row for row, _ in new],
        "path": [str(files[row]) for row, _ in new],
        "hash": [item.hash for _, item in new],
        "thumbnail": [item.thumbnail for _, item in new],
    }
    others = {name: [values[row] for row, _ in new] for name, values in columns.items()}
    images = [item.image for _, item in new if item.image is not None]
    return Batch(others | of_images, images, skipped, len(decoded) - len(new) - len(skipped))


def vector_columns(vectors: Vectors, columns: Collection[str]) -> dict[str, np.ndarray]:
    """The columns of vectors of some images, for a table with these columns."""
    made = {"embedding": vectors.embeddings.numpy()}
    if "features" in columns:
        made["features"] = unit_rows(vectors.features.numpy())
    return made


# ---------------------------------------------------------------------- adding


def existing_items(table: Table, files: Sequence[Any]) -> tuple[dict[str, ExistingItem], list[int]]:
    """The items of these paths, and the ids of older content that a kill left beside the newer."""
    where = "path IS NOT NULL AND hash IS NOT NULL"
    if len(files) <= 1024:  # beyond, one pass over all paths costs less than so long a filter
        quoted = ["'" + str(file).replace("'", "''") + "'" for file in files if _is_text(str(file))]
        where += f" AND path IN ({', '.join(quoted)})" if quoted else " AND false"
    rows = table.columns(["id", "path", "hash"], where).sort_by("id")
    existing: dict[str, ExistingItem] = {}
    outdated = []
    for id, path, digest in zip(*(rows.column(name).to_pylist() for name in ("id", "path", "hash")), strict=True):
        if path in existing and existing[path].hash != digest:
            outdated.append(existing[path].id)
        existing[path] = ExistingItem(id, digest)
    return existing, outdated


def add_images(
    table: Table,
    model: Model,
    files: Sequence[Any],
    columns: Mapping[str, Sequence[Any]],
    thumbnails: int,
    commit_every: int,
    progress: Callable[[Added], None] | None,
) -> Added:
    """Add the images that the table lacks, a commit after every so many. The caller must hold the gallery's lock."""
    existing, outdated = existing_items(table, files)
    added = Added(len(files))
    first = table.reserve_ids(len(files))
    table.add_columns(columns)
    report = progress or (lambda _: None)
    report(added)
    fragments: list[Any] = []
    unwritten: list[dict[str, Any]] = []
    committed = 0

    def write() -> None:
        if unwritten:
            new = table.write({name: _joined([part[name] for part in unwritten]) for name in unwritten[0]})
            unwritten.clear()  # before they are fragments: an interrupt must not commit them twice
            fragments.extend(new)

    def commit() -> None:
        nonlocal committed
        write()
        # Cleared first: what is interrupted here must not be committed a second time.
        new, old = fragments[:], outdated[:]
        fragments.clear()
        outdated.clear()
        committed = len(added)
        if new:
            table.commit(new)
        table.delete(old)

    def decode_item(file: Any) -> Decoded:
        return decode_file(file, existing.get(str(file)), model.preprocessing, thumbnails, cache)

    try:
        with (
            FeatureCache.of(model, enabled=len(files) >= _MIN_CACHED) as cache,
            contextlib.closing(prefetch(decode_item, files, ahead=_PREFETCH * _BATCH)) as decoded,
        ):
            for start in range(0, len(files), _BATCH):
                chunk = slice(start, start + _BATCH)
                others = {name: values[chunk] for name, values in columns.items()}
                batch = collate(first + start, files[chunk], list(islice(decoded, _BATCH)), others)
                added.skipped += batch.skipped
                added.present += batch.present
                if batch.images:
                    rows = batch.columns
                    vectors = vectors_of(model, rows["hash"], batch.images, cache)
                    unwritten.append(rows | vector_columns(vectors, table.own_columns))
                    outdated += [existing[path].id for path in rows["path"] if path in existing]
                    added += rows["id"]
                if len(unwritten) * _BATCH >= _WRITE:
                    write()
                if len(added) - committed >= commit_every:
                    commit()
                report(added)
    except KeyboardInterrupt:
        # Who commits in steps keeps what is whole.
        if commit_every < len(files):
            commit()
        raise
    commit()
    return added


def _joined(parts: Sequence[Any]) -> Any:
    """A column of several batches."""
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else list(chain.from_iterable(parts))


def index_folder(gallery: Gallery, folder: str | Path, *, progress: Callable[[Added], None] | None = None) -> Added:
    """Add the images of a folder, whose first-level folders are labels, and optimize the gallery.

    Commits every few hundred images: started again, a run that was interrupted goes on behind them.
    """
    files, labels = list_with_labels(existing_folder(folder))
    if not files:
        raise DataError(f"Folder {folder} has no images; pass the folder that holds them.")
    added = Added(0)

    def keep(current: Added) -> None:
        nonlocal added
        added = current
        if progress is not None:
            progress(added)

    try:
        gallery.add(files, labels, commit_every=_COMMIT_EVERY, progress=keep)
    finally:
        if added.done:
            write_unreadable(gallery.path / UNREADABLE, added.skipped)
    gallery.optimize()
    return added


def existing_folder(folder: str | Path) -> Path:
    """The folder, which must exist."""
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise DataError(f"{folder} {what}; pass the folder that holds the images.")
    return folder


def write_unreadable(file: Path, skipped: list[tuple[str, str]]) -> None:
    """Write path and reason of every image that could not be read; no file where there is none."""
    if not skipped:
        file.unlink(missing_ok=True)
        return
    with atomic_write(file) as stream:
        for path, reason in skipped:
            stream.write(f"{path}\t{reason}".replace("\n", "\\n").encode("utf-8", "surrogateescape") + b"\n")
