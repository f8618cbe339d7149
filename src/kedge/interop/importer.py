"""Rows into a new gallery, all of it or nothing."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from kedge.errors import ConfigError, DataError, GalleryError, KedgeError
from kedge.gallery import Gallery
from kedge.gallery.anchor_index import MIN_ANCHORS, AnchorIndex, k_means
from kedge.gallery.anchors import Anchors
from kedge.gallery.calibration import Calibration, save_calibration
from kedge.gallery.inverted_lists import write_lists
from kedge.gallery.schema import COLUMNS
from kedge.gallery.table import Table
from kedge.interop.columns import embedding_dim
from kedge.interop.manifest import LIST, VECTOR, Manifest, Rows, coalesce, first_line, to_matrix
from kedge.model import Model

__all__ = ["fill_gallery", "k_means_centroids", "new_folder", "restore_gallery"]

_SAMPLE, _ROUNDS = 50_000, 10
"""Vectors and iterations of k-means."""


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside it, renamed to it when the block succeeds and removed otherwise."""
    part = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
    try:
        yield part
        part.rename(folder)
    except KedgeError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise GalleryError(f"{folder} could not be made: {first_line(error)}.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def fill_gallery(gallery: Gallery, source: Path, rows: Rows) -> None:
    """Add rows to an empty gallery, with new ids, and build its lists."""
    with gallery.writing() as table:
        _write(gallery, table, source, rows)
    gallery.optimize()


def restore_gallery(folder: Path, source: Path, rows: Rows, manifest: Manifest, model: Model | None) -> None:
    """The gallery that was exported: the same ids and anchors, every item in the same list."""
    if model is not None and model.fingerprint != manifest.model:
        made_with = "without a model" if manifest.model is None else f"with the model {manifest.model}"
        raise ConfigError(f"The vectors of {source} were made {made_with}, found {model.fingerprint}.")
    if not {"id", VECTOR, LIST} <= set(rows.schema.names) or embedding_dim(rows) != manifest.dim:
        raise DataError(f"{source} is damaged: it lacks columns of a gallery's vectors.")
    created: dict[str, Any] = {"model": model}
    if model is None:
        created = {"classes": manifest.classes, "dim": None if manifest.learned else manifest.dim}
        created["anchors"] = manifest.anchors[: manifest.learned] if manifest.learned else None
    gallery = Gallery.create(folder, lists=manifest.lists, thumbnails=manifest.thumbnails, **created)
    with gallery.writing() as table:
        table.reserve_ids(manifest.next_id)
        ids, lists = _write(gallery, table, source, rows)
        if len(ids) and (ids.min() < 0 or ids.max() >= manifest.next_id or len(np.unique(ids)) < len(ids)):
            raise DataError(f"{source} is damaged: its ids are not those of a gallery.")
        if len(lists) and (lists.min() < 0 or lists.max() >= len(manifest.names)):
            raise DataError(f"{source} is damaged: it names lists that it has no anchors for.")
        index = AnchorIndex.build(manifest.anchors) if len(manifest.anchors) >= MIN_ANCHORS else None
        anchors = _AssignedAnchors(manifest.anchors, manifest.names, manifest.learned, index, iter(lists))
        write_lists(folder / "lists", table, anchors, by_label=manifest.lists == "label")
    if manifest.calibration is not None:
        save_calibration(folder, Calibration(**manifest.calibration))


@dataclass(frozen=True)
class _AssignedAnchors(Anchors):
    """Anchors with a list for each row of a table, in its order, instead of the nearest."""

    lists: Iterator[np.int32] = field(default_factory=lambda: iter(()))

    def assign(self, embeddings: np.ndarray, labels: Sequence[str | None], *, by_label: bool) -> np.ndarray:
        """The lists of the next rows."""
        del labels, by_label
        return np.fromiter(islice(self.lists, len(embeddings)), np.int32, len(embeddings))


def _write(gallery: Gallery, table: Table, source: Path, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Commit rows, all at once; their ids and, where they have that column, their lists."""
    metadata = [column for column in rows.schema if column.name not in (*COLUMNS, LIST)]
    table.add_columns({column.name: pa.array([], column.type) for column in metadata})
    fragments, ids, lists = [], [np.empty(0, np.int64)], [np.empty(0, np.int32)]
    count = 0
    for batch in coalesce(rows.batches()):
        if not len(batch):
            continue
        columns = {name: batch.column(name) for name in batch.schema.names}
        columns[VECTOR] = gallery.check_vectors(to_matrix(columns[VECTOR], embedding_dim(rows), source, count))
        if LIST in columns:
            lists.append(np.asarray(columns.pop(LIST), np.int32))
        if "id" not in columns:
            first = table.reserve_ids(len(batch))
            columns["id"] = pa.array(np.arange(first, first + len(batch)))
        if "path" in columns and any("\0" in path for path in columns["path"].drop_null().to_pylist()):
            raise DataError(f"{source} holds a path with a NUL character.")
        ids.append(np.asarray(columns["id"], np.int64))
        fragments += table.write(columns)
        count += len(batch)
    if fragments:
        table.commit(fragments)
    return np.concatenate(ids), np.concatenate(lists)


def k_means_centroids(rows: Rows, source: Path, count: int) -> np.ndarray:
    """k-means centroids of a sample of the vectors."""
    size = min(rows.count, _SAMPLE)
    if not 1 <= count <= size:
        raise ConfigError(f"anchors must be at least 1 and at most {size:,}, found {count}.")
    sample = np.sort(np.random.default_rng(0).choice(rows.count, size, replace=False))
    parts, first = [], 0
    for batch in rows.batches():
        here = sample[(sample >= first) & (sample < first + len(batch))] - first
        parts.append(to_matrix(batch.column(VECTOR), embedding_dim(rows), source, first)[here])
        first += len(batch)
    return k_means(np.concatenate(parts), count, rounds=_ROUNDS)
