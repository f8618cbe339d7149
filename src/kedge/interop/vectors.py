"""A gallery's vectors as files for other tools, and files of vectors as a gallery."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kedge.deprecation import renamed_keywords
from kedge.errors import ConfigError, DataError, GalleryError
from kedge.gallery import Gallery
from kedge.gallery.location import Location
from kedge.gallery.manifest import ListKind, is_taken
from kedge.interop.arrays import read_arrays, write_npz
from kedge.interop.columns import embedding_dim, gallery_columns
from kedge.interop.exporter import export_state
from kedge.interop.faiss import read_faiss, sidecar_path, write_faiss
from kedge.interop.importer import fill_gallery, k_means_centroids, new_folder, restore_gallery
from kedge.interop.manifest import Manifest, Rows, first_line
from kedge.interop.parquet import read_parquet, write_parquet
from kedge.io import atomic_write, is_url
from kedge.model import Model

__all__ = ["export_gallery", "import_gallery"]

_SUFFIXES = (".parquet", ".npz", ".faiss")


def export_gallery(gallery: Gallery | str | Path, path: str | Path, *, overwrite: bool = False) -> Path:
    """Write the vectors of a gallery, with all that belongs to them, for other tools or for `import_gallery`.

    The ending says how: `.parquet` (batch by batch, for galleries larger than memory), `.npz` (arrays, nothing
    pickled) or `.faiss` (an `IndexIVFFlat` whose centroids are the anchors and whose lists are the gallery's; labels,
    paths and metadata are in a `.faiss.parquet` beside it, and its distances are squared). What is written is one
    version of the gallery, whoever adds to it meanwhile, all of it or nothing.
    """
    opened = gallery if isinstance(gallery, Gallery) else Gallery.open(gallery)
    final = _local("path", path)
    if final.suffix not in _SUFFIXES:
        raise ConfigError(f"path must end in one of {', '.join(_SUFFIXES)}, found {final.name}.")
    for file in (final, sidecar_path(final)) if final.suffix == ".faiss" else (final,):
        if file.exists() and not overwrite:
            raise ConfigError(f"{file} is there already: choose another path, or say overwrite=True.")
    manifest, rows = export_state(opened)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        if final.suffix == ".faiss":
            write_faiss(final, manifest, rows, opened.path)
        else:
            with atomic_write(final) as stream:
                if final.suffix == ".npz":
                    write_npz(stream, manifest, rows, opened.path)
                else:
                    write_parquet(stream, manifest, rows)
    except OSError as error:
        raise DataError(f"{final} could not be written ({error.strerror or first_line(error)}).") from error
    return final


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
    folder, file = _local("path", path), _local("source", source)
    if is_taken(Location(folder)):
        raise GalleryError(f"{folder} is there already: choose another path.")
    rows, manifest, centroids = _read(file, vectors)
    columns = {"vectors": vectors, "labels": labels, "paths": paths}
    if manifest is not None:
        for name, value in {**columns, "anchors": anchors, "classes": classes, "lists": lists}.items():
            if value is not None:
                raise ConfigError(f"{file} says for itself how its gallery was made: leave {name} out.")
        with new_folder(folder) as part:
            restore_gallery(part, file, rows, manifest, model)
        return Gallery.open(folder, model)
    rows = gallery_columns(rows, file, **columns)
    if model is None:
        created = _without_model(rows, file, anchors, classes, centroids)
    elif anchors is not None or classes is not None:
        raise ConfigError("A model brings its own anchors and classes: give either.")
    else:
        created = {"model": model}
    with new_folder(folder) as part:
        fill_gallery(Gallery.create(part, lists=lists or "label", **created), file, rows)
    return Gallery.open(folder, model)


def _without_model(
    rows: Rows,
    source: Path,
    anchors: int | np.ndarray | None,
    classes: Sequence[str] | None,
    centroids: np.ndarray | None,
) -> dict[str, Any]:
    """The arguments of `Gallery.create` for a gallery without a model."""
    if isinstance(anchors, int):
        if "label" in rows.schema.names:
            raise ConfigError(f"anchors={anchors} asks for k-means, but {source} has labels, which are routed by.")
        centroids = k_means_centroids(rows, source, anchors)
    elif anchors is not None:
        return {"anchors": anchors, "classes": classes}
    if centroids is None:
        return {"dim": embedding_dim(rows), "classes": classes}
    # Not bare numbers, which may be labels.
    return {"anchors": centroids, "classes": classes or [f"list {number}" for number in range(len(centroids))]}


def _read(source: Path, vectors: str | None) -> tuple[Rows, Manifest | None, np.ndarray | None]:
    if source.suffix in (".npz", ".npy"):
        return *read_arrays(source, vectors), None
    if source.suffix in (".faiss", ".index"):
        return read_faiss(source)
    if source.suffix in (".parquet", ".pq") or source.is_dir():
        return *read_parquet(source), None
    raise ConfigError(f"source must be a .parquet, .npz, .npy, .faiss or .index file, found {source.name}.")


def _local(name: str, path: str | Path) -> Path:
    if is_url(str(path)):
        raise ConfigError(f"{name} must be a path on this machine, found {path}: copy it from or to there.")
    return Path(path).expanduser().absolute()
