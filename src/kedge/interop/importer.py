"""A file of vectors as a gallery: one that was exported, or anyone's."""

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
import pyarrow.compute as pc

from kedge.deprecation import renamed_keywords
from kedge.errors import ConfigError, DataError, GalleryError, KedgeError, first_line
from kedge.gallery import Gallery
from kedge.gallery.anchor_index import MIN_ANCHORS, AnchorIndex, k_means
from kedge.gallery.anchors import Anchors
from kedge.gallery.calibration import Calibration, save_calibration
from kedge.gallery.inverted_lists import write_lists
from kedge.gallery.location import Location
from kedge.gallery.manifest import ListKind, is_taken
from kedge.gallery.schema import COLUMNS
from kedge.gallery.table import Table
from kedge.interop.arrays import read_arrays
from kedge.interop.faiss import read_faiss
from kedge.interop.parquet import read_parquet
from kedge.interop.rows import LIST, VECTOR, Manifest, Rows, choose_column, local_path, read_errors
from kedge.model import Model

__all__ = ["import_gallery"]

_SAMPLE, _ROUNDS = 50_000, 10
"""Vectors and iterations of k-means."""
_PANDAS_INDEX = "__index_level_"


@renamed_keywords(precision=None)
def import_gallery(
    path: str | Path,
    source: str | Path,
    *,
    model: Model | None = None,
    vectors: str | None = None,
    labels: str | None = None,
    paths: str | None = None,
    anchors: int | np.ndarray | None = None,
    classes: Sequence[str] | None = None,
    lists: ListKind | None = None,
) -> Gallery:
    """Make a gallery of a file of vectors: one that `export_gallery` wrote, or any other.

    An exported file becomes the same gallery again: same ids, same lists, same hits. Its model, which the file names
    but does not hold, is given as `model`; without, the gallery is searched with vectors and ids.

    Otherwise `source` is a Parquet file (or a folder of them) with a column of vectors, `.npz`, `.npy`, or a
    FAISS index. `vectors`, `labels` and `paths` name columns or arrays that are not called so already, and all other
    columns become metadata (`id` becomes `source_id`, for ids are the gallery's). Searches are routed by the anchors
    of the model, or by `anchors`: a matrix, its rows named by `classes`, or the number of k-means centroids.
    Without them, by the centroids of a FAISS IVF index, by the means of labels or, where there are none, by as many
    k-means centroids as the gallery chooses.

    If anything is wrong, nothing is left behind.
    """
    folder, file = local_path("path", path), local_path("source", source)
    if is_taken(Location(folder)):
        raise GalleryError(f"{folder} already exists; choose another path.")
    with read_errors(file):
        rows, manifest, centroids = _read(file, vectors)
    columns = {"vectors": vectors, "labels": labels, "paths": paths}
    if manifest is not None:
        for name, value in {**columns, "anchors": anchors, "classes": classes, "lists": lists}.items():
            if value is not None:
                raise ConfigError(f"{file} already describes its gallery; leave {name} out.")
        with _new_folder(folder) as part:
            _restore(part, rows, manifest, model)
        return Gallery.open(folder, model)
    rows = _gallery_columns(rows, **columns)
    options: dict[str, Any] = {"lists": lists or "label", "model": model}
    if model is None:
        options |= _routing(rows, anchors, classes, centroids)
    elif anchors is not None or classes is not None:
        raise ConfigError("A model has its own anchors and classes; pass one or the other.")
    with _new_folder(folder) as part:
        gallery = Gallery.create(part, **options)
        with gallery.writing() as table:
            _write(gallery, table, rows)
        gallery.optimize()
    return Gallery.open(folder, model)


def _read(source: Path, vectors: str | None) -> tuple[Rows, Manifest | None, np.ndarray | None]:
    if source.suffix in (".npz", ".npy"):
        return *read_arrays(source, vectors), None
    if source.suffix in (".faiss", ".index"):
        return read_faiss(source)
    if source.suffix in (".parquet", ".pq") or source.is_dir():
        return *read_parquet(source), None
    raise ConfigError(f"source must be a .parquet, .npz, .npy, .faiss or .index file, found {source.name}.")


def _gallery_columns(rows: Rows, *, vectors: str | None, labels: str | None, paths: str | None) -> Rows:
    """Rows of others with the columns of a gallery: vectors, labels and paths; the other columns are metadata."""
    source, names = rows.source, rows.schema.names
    if not rows.count:
        raise DataError(f"{source} holds no vectors.")
    chosen = {
        VECTOR: choose_column("vectors", vectors, [f.name for f in rows.schema if _is_vector(f.type)], source),
        "label": choose_column("labels", labels, names, source),
        "path": choose_column("paths", paths, names, source),
    }
    origins = {name: origin for name, origin in chosen.items() if origin is not None}
    for column in rows.schema:
        if column.name in chosen.values() or column.name.startswith(_PANDAS_INDEX) or pa.types.is_null(column.type):
            continue
        name = f"source_{column.name}" if column.name in COLUMNS else column.name
        if name in origins:
            raise ConfigError(f"{source} has both a column and its source_ twin: rename one of them.")
        origins[name] = column.name

    def convert(batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = []
        for name, origin in origins.items():
            column = batch.column(origin)
            column = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
            columns.append(_to_text(column, origin, source) if name in ("label", "path") else column)
        return pa.RecordBatch.from_arrays(columns, names=list(origins))

    empty = pa.RecordBatch.from_arrays([pa.array([], column.type) for column in rows.schema], schema=rows.schema)
    return Rows(source, convert(empty).schema, rows.count, lambda: map(convert, rows.read()))


def _is_vector(kind: pa.DataType) -> bool:
    listed = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(listed and (pa.types.is_floating(kind.value_type) or pa.types.is_integer(kind.value_type)))


def _to_text(column: pa.Array, name: str, source: Path) -> pa.Array:
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), None, column)  # as pandas writes what is missing
    try:
        return column.cast(pa.string())
    except pa.ArrowException as error:
        raise ConfigError(f"The column {name} of {source} cannot be read as text: {first_line(error)}.") from error


def _routing(
    rows: Rows, anchors: int | np.ndarray | None, classes: Sequence[str] | None, centroids: np.ndarray | None
) -> dict[str, Any]:
    """The arguments of `Gallery.create` that say what routes a search without a model."""
    if isinstance(anchors, int):
        if "label" in rows.schema.names:
            raise ConfigError(f"anchors={anchors} asks for k-means, but {rows.source} has labels; leave anchors out.")
        centroids = _k_means_centroids(rows, anchors)
    elif anchors is not None:
        return {"anchors": anchors, "classes": classes}
    if centroids is None:
        return {"dim": rows.dim(), "classes": classes}
    # Not bare numbers, which may be labels.
    return {"anchors": centroids, "classes": classes or [f"list {number}" for number in range(len(centroids))]}


def _k_means_centroids(rows: Rows, count: int) -> np.ndarray:
    """k-means centroids of a sample of the vectors."""
    rng, share = np.random.default_rng(0), _SAMPLE / rows.count
    parts = [vectors[rng.random(len(vectors)) < share] for _, vectors in rows.matrices(rows.dim())]
    sample = np.concatenate(parts)
    if not 1 <= count <= len(sample):
        raise ConfigError(f"anchors must be at least 1 and at most {len(sample):,}, found {count}.")
    return k_means(sample, count, rounds=_ROUNDS)


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside it, renamed to it when the block succeeds and removed otherwise."""
    part = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
    try:
        yield part
        part.rename(folder)
    except KedgeError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise GalleryError(f"{folder} could not be created: {first_line(error)}.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _restore(folder: Path, rows: Rows, manifest: Manifest, model: Model | None) -> None:
    """The gallery that was exported: the same ids and anchors, every item in the same list."""
    if model is not None and model.fingerprint != manifest.model:
        made_with = "without a model" if manifest.model is None else f"with the model {manifest.model}"
        raise ConfigError(f"The vectors of {rows.source} were made {made_with}; this model is {model.fingerprint}.")
    if not {"id", VECTOR, LIST} <= set(rows.schema.names):
        raise DataError(f"{rows.source} is damaged: it lacks columns of a gallery's vectors.")
    created: dict[str, Any] = {"model": model}
    if model is None:
        created = {"classes": manifest.classes, "dim": None if manifest.learned else manifest.dim}
        created["anchors"] = manifest.anchors[: manifest.learned] if manifest.learned else None
    gallery = Gallery.create(folder, lists=manifest.lists, thumbnails=manifest.thumbnails, **created)
    with gallery.writing() as table:
        table.reserve_ids(manifest.next_id)
        ids, lists = _write(gallery, table, rows)
        if len(ids) and (ids.min() < 0 or ids.max() >= manifest.next_id or len(np.unique(ids)) < len(ids)):
            raise DataError(f"{rows.source} is damaged: its ids are not those of a gallery.")
        if len(lists) and (lists.min() < 0 or lists.max() >= len(manifest.names)):
            raise DataError(f"{rows.source} is damaged: it names lists that it has no anchors for.")
        learned_first = gallery.features > 0
        indexed = manifest.anchors[: manifest.learned or None] if learned_first else manifest.anchors
        index = AnchorIndex.build(indexed) if len(indexed) >= MIN_ANCHORS else None
        anchors = _AssignedAnchors(
            manifest.anchors, manifest.names, manifest.learned, index, learned_first, iter(lists)
        )
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


def _write(gallery: Gallery, table: Table, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Commit rows, all at once; their ids and, where they have that column, their lists."""
    metadata = [column for column in rows.schema if column.name not in (*table.own_columns, LIST)]
    table.add_columns({column.name: pa.array([], column.type) for column in metadata})
    fragments, ids, lists = [], [np.empty(0, np.int64)], [np.empty(0, np.int32)]
    for batch, vectors in rows.matrices(gallery.dim):
        columns = {name: batch.column(name) for name in batch.schema.names}
        columns[VECTOR] = gallery.check_vectors(vectors)
        if LIST in columns:
            lists.append(np.asarray(columns.pop(LIST), np.int32))
        if "id" not in columns:
            first = table.reserve_ids(len(batch))
            columns["id"] = pa.array(np.arange(first, first + len(batch)))
        if "path" in columns and any("\0" in path for path in columns["path"].drop_null().to_pylist()):
            raise DataError(f"{rows.source} holds a path with a NUL character.")
        ids.append(np.asarray(columns["id"], np.int64))
        fragments += table.write(columns)
    if fragments:
        table.commit(fragments)
    return np.concatenate(ids), np.concatenate(lists)
