"""One version of a gallery as rows and a manifest, for export."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import lance
import numpy as np
import pyarrow as pa

from kedge.errors import ConfigError
from kedge.gallery import Gallery
from kedge.gallery.schema import CHECKSUM
from kedge.gallery.snapshot import Items
from kedge.interop.manifest import LIST, Manifest, Rows

__all__ = ["export_state"]


def export_state(gallery: Gallery) -> tuple[Manifest, Rows]:
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
        calibration=None if gallery.calibration is None else asdict(gallery.calibration),
        next_id=max(int(next_id or 0), int(items.ids.max(initial=-1)) + 1),
        learned=snapshot.anchors.learned,
        names=snapshot.anchors.names,
        anchors=np.ascontiguousarray(snapshot.anchors.vectors, np.float32),
    )
    names = [name for name in table.schema.names if name not in ("hash", "thumbnail", CHECKSUM)]
    names += [name for name in ("hash", "thumbnail") if table.count_rows(f"{name} IS NOT NULL")]
    if LIST in names:
        raise ConfigError(f"{gallery.location} has metadata called {LIST}, the name that exports need for the lists.")
    schema = pa.schema([*(table.schema.field(name) for name in names), pa.field(LIST, pa.int32())])

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in table.scanner(columns=names, batch_size=8192, batch_readahead=4).to_batches():
            places = np.searchsorted(items.ids, np.asarray(batch.column("id")))
            lists = pa.array(items.lists[places], pa.int32())
            yield pa.RecordBatch.from_arrays([*(batch.column(name) for name in names), lists], schema=schema)

    return manifest, Rows(schema, table.count_rows(), batches)
