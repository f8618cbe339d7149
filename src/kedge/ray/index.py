"""Images into a gallery with Ray: listed once, decoded, embedded and written by workers, committed once."""

from __future__ import annotations

import copy
import hashlib
import pickle
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from kedge.errors import ConfigError, DataError
from kedge.gallery import Added, Gallery
from kedge.gallery.ingest import UNREADABLE, Batch, ExistingItem, collate, existing_items, write_unreadable
from kedge.gallery.location import Location
from kedge.gallery.table import Table
from kedge.images import Preprocessing
from kedge.model import Model
from kedge.ray.cluster import Cluster, connect
from kedge.ray.journal import Entry, Journal
from kedge.ray.lance_index import absolute_location
from kedge.ray.sources import CHUNK, Item, Listing, Shard, list_source

__all__ = ["Decoder", "Embedder", "Task", "Writer", "index_with_ray", "pack", "unpack"]

Rows = dict[str, Any]
_DECODE_CPUS, _EMBED_CPUS = 0.5, 0.25
"""Shares of a CPU, so that the models leave room for the decoders even when most machines are lost."""


def index_with_ray(
    gallery: Gallery,
    source: str | Path | Sequence[str | Path],
    *,
    address: str | None = None,
    workers: int | None = None,
    progress: Callable[[Added], None] | None = None,
) -> Added:
    """Add the images of a source: what `gallery.add` does, over all machines of a Ray cluster.

    `source` is a folder (first-level folders are labels), a .txt file with paths or a list of them, Parquet files
    (columns `image` or `path`, perhaps `label`, further ones are metadata) or WebDataset shards (.tar). `workers`
    is how many models embed at a time. All of it is there at the end or, after a kill, nothing: started again with
    the same source, a run goes on behind what its workers had finished.
    """
    if gallery.model is None:
        raise ConfigError(f"{gallery.location} was made without a model, so it takes no images: make a new gallery.")
    listing = list_source(source)
    if not len(listing):
        raise DataError(f"{source} holds no images: give the folder that holds them.")
    with connect(address, workers) as cluster, gallery.writing() as table:
        added = _index(gallery, gallery.model, table, listing, cluster, workers, progress or (lambda _: None))
    write_unreadable(gallery.path / UNREADABLE, added.skipped)
    return added


def _index(
    gallery: Gallery,
    model: Model,
    table: Table,
    listing: Listing,
    cluster: Cluster,
    workers: int | None,
    progress: Callable[[Added], None],
) -> Added:
    """Run over a listing, or resume a run. The caller must hold the gallery's lock."""
    shards = listing.shards
    paths = [path for shard in shards for path in shard.paths]
    existing, outdated = existing_items(table, paths)
    table.add_columns({name: pa.array([], kind) for name, kind in listing.metadata.items()})
    # What the ids and rows of a run follow from: with anything else, it is another run.
    about = hashlib.sha256(repr((model.fingerprint, gallery.thumbnails, table.metadata_columns)).encode())
    for shard in shards:
        about.update(repr(shard).encode())
    digest, journal = about.hexdigest(), Journal(str(gallery.location))
    if not journal.resume(digest, table.version):
        journal.begin(digest, table.reserve_ids(len(paths)))
    states = [_state(shard, existing) for shard in shards]
    firsts = [shard.first for shard in shards]
    entries = journal.entries(lambda start: states[bisect_right(firsts, start) - 1])
    added = _count(entries.values(), Added(len(paths)))
    progress(added)
    tasks = []
    for shard, state in zip(shards, states, strict=True):
        starts = range(shard.first, shard.first + len(shard.paths), CHUNK)
        done = frozenset(start for start in starts if start in entries)
        if sum(entries[start].count for start in done) < len(shard.paths):
            known = {path: existing[path] for path in shard.paths if path in existing}
            tasks.append(Task(shard, known, state, done))
    for entry in _run_tasks(tasks, gallery, model, journal.first, workers or cluster.embedders, gpu=cluster.gpus > 0):
        entries[entry.start] = entry
        progress(_count([entry], added))
    in_order = [entries[start] for start in sorted(entries)]
    journal.begin(digest, journal.first, committing=table.version)
    if fragments := [fragment for entry in in_order for fragment in entry.fragments]:
        table.commit(fragments)
    table.delete([*outdated, *(id for entry in in_order for id in entry.replaced)])
    journal.remove()
    return _count(in_order, Added(len(paths)))


def _run_tasks(
    tasks: Sequence[Task], gallery: Gallery, model: Model, first: int, embedders: int, *, gpu: bool
) -> Iterator[Entry]:
    """What the workers finish, as it comes."""
    if not tasks:
        return
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    shared = ray.put(copy.deepcopy(model).to("cpu"))
    single: dict[str, Any] = {"batch_size": 1, "batch_format": "numpy"}
    packed = [{"packed": pack(task)["packed"][0]} for task in tasks]
    entries = (
        ray.data.from_items(packed, override_num_blocks=len(tasks))
        .map_batches(Decoder(first, model.preprocessing, gallery.thumbnails), num_cpus=_DECODE_CPUS, **single)
        .map_batches(
            Embedder,
            fn_constructor_args=([shared],),
            concurrency=min(embedders, len(tasks)),
            num_cpus=_EMBED_CPUS,
            num_gpus=1 if gpu else 0,
            **single,
        )
        .map_batches(Writer(absolute_location(gallery), gallery.dim, first), num_cpus=_DECODE_CPUS, **single)
    )
    for rows in entries.iter_batches(batch_size=1, batch_format="numpy", prefetch_batches=0):
        yield from unpack(rows)


def _state(shard: Shard, existing: Mapping[str, ExistingItem]) -> str:
    present = [(path, existing[path]) for path in shard.paths if path in existing]
    return hashlib.sha256(repr(present).encode()).hexdigest()[:16]


def _count(entries: Any, added: Added) -> Added:
    for entry in entries:
        added += entry.ids
        added.skipped += entry.skipped
        added.present += entry.present
    return added


# ---------------------------------------------------------------------- what the workers do


@dataclass(frozen=True)
class Task:
    """A shard, and what the driver knows of it."""

    shard: Shard
    existing: dict[str, ExistingItem]
    state: str
    done: frozenset[int]
    """Chunks, by their start, that are finished."""


@dataclass
class _Chunk:
    entry: Entry
    batch: Batch
    columns: dict[str, Any]


class Decoder:
    """Reads and decodes: a shard in, its chunks out."""

    def __init__(self, first: int, preprocessing: Preprocessing, thumbnails: int) -> None:
        self._first = first
        self._preprocessing = preprocessing
        self._thumbnails = thumbnails

    def __call__(self, rows: Rows) -> Iterator[Rows]:
        """One chunk at a time, so that a large shard needs no more memory than a small one."""
        for task in unpack(rows):
            for start, items in task.shard.chunks():
                if start not in task.done:
                    yield pack(self._decode(task, start, items))

    def _decode(self, task: Task, start: int, items: list[Item]) -> _Chunk:
        paths, existing = [item.path for item in items], task.existing
        decoded = [item.decode(existing.get(item.path), self._preprocessing, self._thumbnails) for item in items]
        batch = collate(0, paths, decoded)
        metadata = {name: [item.metadata[name] for item in items] for name in items[0].metadata}
        columns = batch.columns(self._first + start, paths, [item.label for item in items], metadata)
        entry = Entry(
            start,
            len(items),
            task.state,
            ids=columns["id"],
            replaced=[existing[path].id for path in columns["path"] if path in existing],
            skipped=batch.skipped,
            present=batch.present,
        )
        return _Chunk(entry, batch, columns)


class Embedder:
    """Holds the model, on a GPU if the worker was given one."""

    def __init__(self, model: list[Any]) -> None:
        import ray

        # In a list it comes as a reference, which a worker that takes over can still follow.
        shared: Model = ray.get(model[0])
        self._model = copy.deepcopy(shared).to("auto")

    def __call__(self, rows: Rows) -> Rows:
        """Embeddings in the place of pixels."""
        [chunk] = unpack(rows)
        if chunk.batch.images:
            chunk.columns["embedding"] = self._model.embed(chunk.batch.images).numpy()
        chunk.batch = Batch()
        return pack(chunk)


class Writer:
    """Writes rows that nobody sees until the driver commits them, and the journal entry that names them."""

    def __init__(self, location: Location, dim: int, first: int) -> None:
        self._location = location
        self._dim = dim
        self._first = first

    def __call__(self, rows: Rows) -> Rows:
        """Twice for the same chunk, after a failure, is no harm: one of the two entries stays."""
        [chunk] = unpack(rows)
        entry = chunk.entry
        if entry.ids:
            fragments = Table(self._location, self._dim).write(chunk.columns)
            entry.written = [fragment.to_json() for fragment in fragments]
        Journal(str(self._location), self._first).write(entry)
        return pack(entry)


def pack(*values: Any) -> Rows:
    """Objects as rows: each one stays whole, however the rows are cut."""
    return {"packed": np.array([pickle.dumps(value, protocol=5) for value in values], dtype=object)}


def unpack(rows: Rows) -> list[Any]:
    """The objects that `pack` made rows of."""
    return [pickle.loads(value) for value in rows["packed"]]
