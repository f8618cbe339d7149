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
from kedge.interop.carried import Carried, Rows, first_line
from kedge.interop.columns import chosen, dim_of
from kedge.interop.faiss import beside, read_faiss, write_faiss
from kedge.interop.incoming import centres_of, fill, fill_again, made
from kedge.interop.outgoing import state_of
from kedge.interop.parquet import read_parquet, write_parquet
from kedge.io import atomic_write, is_url
from kedge.model import Model

__all__ = ["export_gallery", "import_gallery"]

_ENDINGS = (".parquet", ".npz", ".faiss")


def export_gallery(gallery: Gallery | str | Path, path: str | Path, *, overwrite: bool = False) -> Path:
    """Write the vectors of a gallery, with all that belongs to them, for other tools or for `import_gallery`.

    The ending says how: `.parquet` (a batch at a time, for galleries larger than memory), `.npz` (arrays, nothing
    pickled) or `.faiss` (an `IndexIVFFlat` whose centroids are the anchors and whose lists are the gallery's; labels,
    paths and metadata are in a `.faiss.parquet` beside it, and its distances are squared). What is written is one
    state of the gallery, whoever adds to it meanwhile; it is there as a whole or not at all.
    """
    opened = gallery if isinstance(gallery, Gallery) else Gallery.open(gallery)
    final = _local("path", path)
    if final.suffix not in _ENDINGS:
        raise ConfigError(f"path must end in one of {', '.join(_ENDINGS)}, found {final.name}.")
    for file in (final, beside(final)) if final.suffix == ".faiss" else (final,):
        if file.exists() and not overwrite:
            raise ConfigError(f"{file} is there already: choose another path, or say overwrite=True.")
    carried, rows = state_of(opened)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        if final.suffix == ".faiss":
            write_faiss(final, carried, rows, opened.path)
        else:
            with atomic_write(final) as stream:
                if final.suffix == ".npz":
                    write_npz(stream, carried, rows, opened.path)
                else:
                    write_parquet(stream, carried, rows)
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
    """Make a gallery of a file of vectors: one that `export_gallery` wrote, or one of somebody else's.

    One of ours becomes the same gallery again: same ids, same lists, same hits. Its model, which the file names but
    does not hold, comes back with `model`; without, the gallery is searched with vectors and ids.

    Of others', `source` may be a Parquet file (or a folder of them) with a column of vectors, `.npz`, `.npy`, or a
    FAISS index. `vectors`, `labels` and `paths` name columns or arrays that are not called so already, and all other
    columns become metadata (`id` becomes `source_id`, for ids are the gallery's). Searches are routed by the anchors
    of the model, or by `anchors`: a matrix, its rows named by `classes`, or how many k-means centres to look for.
    Without them, by the centroids of an inverted FAISS file, by the means of labels or, where there are none, by as
    many centres as the gallery thinks fit.

    If anything is wrong, nothing is left behind.
    """
    folder, file = _local("path", path), _local("source", source)
    if is_taken(Location(folder)):
        raise GalleryError(f"{folder} is there already: choose another path.")
    rows, carried, centroids = _read(file, vectors)
    columns = {"vectors": vectors, "labels": labels, "paths": paths}
    if carried is not None:
        given = {**columns, "anchors": anchors, "classes": classes, "lists": lists}
        for name in (name for name, value in given.items() if value is not None):
            raise ConfigError(f"{file} says for itself how its gallery was made: leave {name} out.")
        with made(folder) as making:
            fill_again(making, file, rows, carried, model)
        return Gallery.open(folder, model)
    incoming = chosen(rows, file, **columns)
    if model is None:
        about = _own(incoming, file, anchors, classes, centroids)
    elif anchors is not None or classes is not None:
        raise ConfigError("A model brings its own anchors and classes: give either.")
    else:
        about = {"model": model}
    with made(folder) as making:
        fill(Gallery.create(making, lists=lists or "label", **about), file, incoming)
    return Gallery.open(folder, model)


def _own(
    rows: Rows,
    source: Path,
    anchors: int | np.ndarray | None,
    classes: Sequence[str] | None,
    centroids: np.ndarray | None,
) -> dict[str, Any]:
    """What a gallery without a model is made with."""
    if isinstance(anchors, int):
        if "label" in rows.schema.names:
            raise ConfigError(f"anchors={anchors} asks for k-means, but {source} has labels, which are routed by.")
        centroids = centres_of(rows, source, anchors)
    elif anchors is not None:
        return {"anchors": anchors, "classes": classes}
    if centroids is None:
        return {"dim": dim_of(rows), "classes": classes}
    # Not bare numbers: somebody's labels may be called so.
    return {"anchors": centroids, "classes": classes or [f"list {number}" for number in range(len(centroids))]}


def _read(source: Path, vectors: str | None) -> tuple[Rows, Carried | None, np.ndarray | None]:
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
