"""One state of a gallery, ready to be written elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import lance
import numpy as np
import pyarrow as pa

from kedge.errors import ConfigError
from kedge.gallery import Gallery
from kedge.gallery.checksums import CHECKSUM
from kedge.gallery.items import Items
from kedge.interop.carried import HOME, Carried, Rows

__all__ = ["state_of"]


def state_of(gallery: Gallery) -> tuple[Carried, Rows]:
    """The newest state of a gallery and its rows, which stay what they are, whoever writes meanwhile."""
    snapshot = gallery.verified_snapshot()
    record = lance.dataset(gallery.location.table_uri, version=snapshot.version)
    items = Items(snapshot)
    ids, homes = items.ids, items.lists
    counted = gallery.location.read("next_id") if gallery.location.url is None else None
    carried = Carried(
        dim=gallery.dim,
        lists=gallery.lists,
        classes=gallery.classes,
        model=None if gallery.model is None else gallery.model.fingerprint,
        precision=gallery.precision,
        thumbnails=gallery.thumbnails,
        calibration=None if gallery.calibration is None else asdict(gallery.calibration),
        next_id=max(int(counted or 0), int(ids.max(initial=-1)) + 1),
        learned=snapshot.anchors.learned,
        names=snapshot.anchors.names,
        anchors=np.ascontiguousarray(snapshot.anchors.vectors, np.float32),
    )
    names = [name for name in record.schema.names if name not in ("hash", "thumbnail", CHECKSUM)]
    names += [name for name in ("hash", "thumbnail") if record.count_rows(f"{name} IS NOT NULL")]
    if HOME in names:
        raise ConfigError(f"{gallery.location} has metadata called {HOME}, the name that exports need for the lists.")
    schema = pa.schema([*(record.schema.field(name) for name in names), pa.field(HOME, pa.int32())])

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in record.scanner(columns=names, batch_size=8192, batch_readahead=4).to_batches():
            home = pa.array(homes[np.searchsorted(ids, np.asarray(batch.column("id")))], pa.int32())
            yield pa.RecordBatch.from_arrays([*(batch.column(name) for name in names), home], schema=schema)

    return carried, Rows(schema, record.count_rows(), batches)
