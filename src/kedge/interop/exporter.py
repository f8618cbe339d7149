"""A gallery's vectors as a file for other tools."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa

from kedge.errors import ConfigError, DataError, first_line
from kedge.gallery import Gallery
from kedge.gallery.schema import CHECKSUM
from kedge.gallery.snapshot import Items
from kedge.interop.arrays import write_npz
from kedge.interop.faiss import sidecar_path, write_faiss
from kedge.interop.parquet import write_parquet
from kedge.interop.rows import BATCH, LIST, Manifest, Rows, local_path
from kedge.io import atomic_write

__all__ = ["export_gallery"]

_WRITERS = {".parquet": write_parquet, ".npz": write_npz}
_SUFFIXES = (*_WRITERS, ".faiss")


def export_gallery(gallery: Gallery | str | Path, path: str | Path, *, overwrite: bool = False) -> Path:
    """Write the vectors of a gallery, with all that belongs to them, for other tools or for `import_gallery`.

    The ending says how: `.parquet` (batch by batch, for galleries larger than memory), `.npz` (arrays, nothing
    pickled) or `.faiss` (an `IndexIVFFlat` whose centroids are the anchors and whose lists are the gallery's; labels,
    paths and metadata are in a `.faiss.parquet` beside it, and its distances are squared). What is written is one
    version of the gallery, whoever adds to it meanwhile, all of it or nothing.
    """
    opened = gallery if isinstance(gallery, Gallery) else Gallery.open(gallery)
    final = local_path("path", path)
    if final.suffix not in _SUFFIXES:
        raise ConfigError(f"path must end in one of {', '.join(_SUFFIXES)}, found {final.name}.")
    for file in (final, sidecar_path(final)) if final.suffix == ".faiss" else (final,):
        if file.exists() and not overwrite:
            raise ConfigError(f"{file} already exists; choose another path, or pass overwrite=True.")
    manifest, rows = _read(opened)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        if final.suffix == ".faiss":
            write_faiss(final, manifest, rows)
        else:
            with atomic_write(final) as stream:
                _WRITERS[final.suffix](stream, manifest, rows)
    except OSError as error:
        raise DataError(f"{final} could not be written ({error.strerror or first_line(error)}).") from error
    return final


def _read(gallery: Gallery) -> tuple[Manifest, Rows]:
    """The newest version of a gallery and its rows, which later writes do not change."""
    snapshot = gallery.verified_snapshot()
    table = lance.dataset(gallery.location.table_uri, version=snapshot.version)
    items = Items(snapshot)
    next_id = gallery.location.read("next_id") if gallery.location.url is None else None
    manifest = Manifest(
        dim=gallery.dim,
        lists=gallery.lists,
        classes=gallery.classes,
        model=None if gallery.model is None else gallery.model.fingerprint,
        precision=gallery.precision,
        thumbnails=gallery.thumbnails,
        calibration=None if gallery.calibration is None else gallery.calibration.to_json(),
        next_id=max(int(next_id or 0), int(items.ids.max(initial=-1)) + 1),
        learned=snapshot.anchors.learned,
        names=snapshot.anchors.names,
        anchors=np.ascontiguousarray(snapshot.anchors.vectors, np.float32),
    )
    of_images = [name for name in ("hash", "thumbnail") if name in table.schema.names]
    names = [name for name in table.schema.names if name not in (*of_images, CHECKSUM)]
    names += [name for name in of_images if table.count_rows(f"{name} IS NOT NULL")]
    if LIST in names:
        raise ConfigError(f"{gallery.location} has metadata called {LIST}, a name that exports need; rename it.")
    schema = pa.schema([*(table.schema.field(name) for name in names), pa.field(LIST, pa.int32())])

    def read() -> Iterator[pa.RecordBatch]:
        for batch in table.scanner(columns=names, batch_size=BATCH, batch_readahead=4).to_batches():
            places = np.searchsorted(items.ids, np.asarray(batch.column("id")))
            lists = pa.array(items.lists[places], pa.int32())
            yield pa.RecordBatch.from_arrays([*(batch.column(name) for name in names), lists], schema=schema)

    return manifest, Rows(gallery.path, schema, table.count_rows(), read)
