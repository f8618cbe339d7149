"""Rows from elsewhere into a new gallery, the whole of it or nothing."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

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
from kedge.interop.carried import HOME, VECTOR, Carried, Rows, first_line, gathered, matrix
from kedge.interop.columns import dim_of
from kedge.model import Model

__all__ = ["centres_of", "fill", "fill_again", "made"]

_SAMPLE, _ROUNDS = 50_000, 10
"""k-means looks at so many vectors, so many times."""


@contextmanager
def made(folder: Path) -> Iterator[Path]:
    """A folder beside it to make a gallery in; it gets its name when the block ends well, and vanishes otherwise."""
    making = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
    try:
        yield making
        making.rename(folder)
    except KedgeError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise GalleryError(f"{folder} could not be made: {first_line(error)}.") from error
    finally:
        shutil.rmtree(making, ignore_errors=True)


def fill(gallery: Gallery, source: Path, rows: Rows) -> None:
    """Put rows into an empty gallery, which gives them ids, and settle its anchors."""
    with gallery.writing() as record:
        _write(gallery, record, source, rows)
    gallery.optimize()


def fill_again(folder: Path, source: Path, rows: Rows, carried: Carried, model: Model | None) -> None:
    """Make the gallery that was exported: the same ids and anchors, every item in the list it was in."""
    if model is not None and model.fingerprint != carried.model:
        made_with = "without a model" if carried.model is None else f"with the model {carried.model}"
        raise ConfigError(f"The vectors of {source} were made {made_with}, found {model.fingerprint}.")
    if not {"id", VECTOR, HOME} <= set(rows.schema.names) or dim_of(rows) != carried.dim:
        raise DataError(f"{source} is damaged: it lacks columns of a gallery's vectors.")
    own = carried.anchors[: carried.learned] if carried.learned else None
    gallery = Gallery.create(
        folder,
        model,
        anchors=None if model is not None else own,
        classes=None if model is not None else carried.classes,
        dim=None if model is not None or own is not None else carried.dim,
        lists=carried.lists,
        thumbnails=carried.thumbnails,
    )
    with gallery.writing() as record:
        record.reserve_ids(carried.next_id)
        ids, homes = _write(gallery, record, source, rows)
        if len(ids) and (ids.min() < 0 or ids.max() >= carried.next_id or len(np.unique(ids)) < len(ids)):
            raise DataError(f"{source} is damaged: its ids are not those of a gallery.")
        if len(homes) and (homes.min() < 0 or homes.max() >= len(carried.names)):
            raise DataError(f"{source} is damaged: it names lists that it has no anchors for.")
        index = AnchorIndex.build(carried.anchors) if len(carried.anchors) >= MIN_ANCHORS else None
        anchors = _Told(carried.anchors, carried.names, carried.learned, index, iter(homes))
        by_label = carried.lists == "label"
        write_lists(folder / "lists", record, anchors, by_label=by_label)
    if carried.calibration is not None:
        save_calibration(folder, Calibration(**carried.calibration))


@dataclass(frozen=True)
class _Told(Anchors):
    """Anchors that are told the list of each row of a record, instead of finding it."""

    homes: Iterator[np.int32] = field(default_factory=lambda: iter(()))

    def assign(self, embeddings: np.ndarray, labels: Sequence[str | None], *, by_label: bool) -> np.ndarray:
        """The lists of the next rows."""
        del labels, by_label
        return np.fromiter(islice(self.homes, len(embeddings)), np.int32, len(embeddings))


def _write(gallery: Gallery, record: Table, source: Path, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Commit rows, all at once; their ids and, where they say so, their lists."""
    others = [one for one in rows.schema if one.name not in (*COLUMNS, HOME)]
    record.add_columns({one.name: pa.array([], one.type) for one in others})
    fragments, ids, homes = [], [np.empty(0, np.int64)], [np.empty(0, np.int32)]
    seen = 0
    for batch in gathered(rows.batches()):
        if not len(batch):
            continue
        columns = {name: batch.column(name) for name in batch.schema.names}
        columns[VECTOR] = gallery.check_vectors(matrix(columns[VECTOR], dim_of(rows), source, seen))
        if HOME in columns:
            homes.append(np.asarray(columns.pop(HOME), np.int32))
        if "id" not in columns:
            first = record.reserve_ids(len(batch))
            columns["id"] = pa.array(np.arange(first, first + len(batch)))
        if "path" in columns and any("\0" in path for path in columns["path"].drop_null().to_pylist()):
            raise DataError(f"{source} holds a path with a NUL character.")
        ids.append(np.asarray(columns["id"], np.int64))
        fragments += record.write(columns)
        seen += len(batch)
    if fragments:
        record.commit(fragments)
    return np.concatenate(ids), np.concatenate(homes)


def centres_of(rows: Rows, source: Path, count: int) -> np.ndarray:
    """k-means centres of a sample of the vectors."""
    if not 1 <= count <= min(rows.count, _SAMPLE):
        raise ConfigError(f"anchors must be at least 1 and at most {min(rows.count, _SAMPLE):,}, found {count}.")
    wanted = np.sort(np.random.default_rng(0).choice(rows.count, min(rows.count, _SAMPLE), replace=False))
    parts, seen = [], 0
    for batch in rows.batches():
        here = wanted[(wanted >= seen) & (wanted < seen + len(batch))] - seen
        parts.append(matrix(batch.column(VECTOR), dim_of(rows), source, seen)[here])
        seen += len(batch)
    return k_means(np.concatenate(parts), count, rounds=_ROUNDS)
