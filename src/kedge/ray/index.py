"""Images into a gallery with Ray: listed once, decoded, embedded and written by workers, committed once."""

from __future__ import annotations

import copy
import hashlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from kedge.errors import ConfigError, DataError
from kedge.gallery import Added, Gallery
from kedge.gallery.ingest import (
    UNREADABLE,
    ExistingItem,
    collate,
    decode_file,
    existing_items,
    vector_columns,
    write_unreadable,
)
from kedge.gallery.location import Location
from kedge.gallery.table import Table
from kedge.images import Preprocessing
from kedge.model import Model
from kedge.model.features import FeatureCache, vectors_of
from kedge.ray.cluster import connect
from kedge.ray.journal import Entry, Journal
from kedge.ray.lance_index import absolute_location
from kedge.ray.sources import Item, Shard, list_source

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
        raise ConfigError(f"{gallery.location} has no model, so images cannot be indexed; create a new gallery.")
    listing = list_source(source)
    if not len(listing):
        raise DataError(f"{source} holds no images; pass the folder that holds them.")
    report = progress or (lambda _: None)
    paths = [path for shard in listing.shards for path in shard.paths]
    with connect(address, workers) as cluster, gallery.writing() as table:
        existing, outdated = existing_items(table, paths)
        table.add_columns({name: pa.array([], kind) for name, kind in listing.metadata.items()})
        tasks = [
            Task(shard, {path: existing[path] for path in shard.paths if path in existing}) for shard in listing.shards
        ]
        # What the ids and rows of a run follow from: with anything else, it is another run.
        about = hashlib.sha256(repr((gallery.model.fingerprint, gallery.thumbnails, table.metadata_columns)).encode())
        for task in tasks:
            about.update(repr(task).encode())
        digest, journal = about.hexdigest(), Journal(str(gallery.location))
        if not journal.resume(digest, table.version):
            journal.begin(digest, table.reserve_ids(len(paths)))
        entries = journal.entries()
        added = _count(entries.values(), Added(len(paths)))
        report(added)
        for task in tasks:
            task.done.update(start for start in task.shard.starts if start in entries)
        unfinished = [task for task in tasks if len(task.done) < len(task.shard.starts)]
        if unfinished:
            embedders = min(workers or cluster.gpus or cluster.cpus, len(unfinished))
            for entry in _run(gallery, table.own_columns, unfinished, journal.first, embedders, cluster.gpus > 0):
                entries[entry.start] = entry
                report(_count([entry], added))
        in_order = [entries[start] for start in sorted(entries)]
        journal.begin(digest, journal.first, committing=table.version)
        if fragments := [fragment for entry in in_order for fragment in entry.fragments]:
            table.commit(fragments)
        table.delete([*outdated, *(id for entry in in_order for id in entry.replaced)])
        journal.remove()
    added = _count(in_order, Added(len(paths)))
    write_unreadable(gallery.path / UNREADABLE, added.skipped)
    return added


def _count(entries: Iterable[Entry], added: Added) -> Added:
    for entry in entries:
        added += entry.ids
        added.skipped += [(path, reason) for path, reason in entry.skipped]
        added.present += entry.present
    return added


def _run(
    gallery: Gallery, columns: tuple[str, ...], tasks: list[Task], first_id: int, embedders: int, gpu: bool
) -> Iterator[Entry]:
    """Ray Data's pipeline: tasks that decode, actors that hold a model, and tasks that write; entries as they come."""
    import ray.data

    assert gallery.model is not None
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    shared = ray.put(copy.deepcopy(gallery.model).to("cpu"))
    decoder = Decoder(first_id, gallery.model.preprocessing, gallery.thumbnails)
    writer = Writer(absolute_location(gallery), gallery.dim, first_id)
    options: dict[str, Any] = {"batch_size": 1, "batch_format": "numpy"}
    actors: dict[str, Any] = {"fn_constructor_args": ([shared], columns), "concurrency": embedders}
    entries = (
        ray.data.from_items([{"packed": pack(task)["packed"][0]} for task in tasks], override_num_blocks=len(tasks))
        .map_batches(decoder, num_cpus=_DECODE_CPUS, **options)
        .map_batches(Embedder, num_cpus=_EMBED_CPUS, num_gpus=1 if gpu else 0, **actors, **options)
        .map_batches(writer, num_cpus=_DECODE_CPUS, **options)
    )
    for rows in entries.iter_batches(batch_size=1, batch_format="numpy", prefetch_batches=0):
        yield unpack(rows)


# ---------------------------------------------------------------------- what the workers do


@dataclass(frozen=True)
class Task:
    """A shard, and what the driver knows of it."""

    shard: Shard
    existing: dict[str, ExistingItem]
    done: set[int] = field(default_factory=set)
    """Chunks, by their start, that are finished."""


@dataclass(frozen=True)
class Decoder:
    """Reads and decodes: a shard in, its chunks out."""

    first_id: int
    preprocessing: Preprocessing
    thumbnails: int

    def __call__(self, rows: Rows) -> Iterator[Rows]:
        """One chunk at a time, so that a large shard needs no more memory than a small one."""
        task: Task = unpack(rows)
        for start, items in task.shard.chunks():
            if start not in task.done:
                yield pack(self._decode(start, items, task.existing))

    def _decode(self, start: int, items: list[Item], existing: dict[str, ExistingItem]) -> tuple[Any, ...]:
        """The journal entry of a chunk, its images, and the other columns of its rows."""
        paths = [item.path for item in items]
        decoded = [
            decode_file(item, existing.get(item.path), self.preprocessing, self.thumbnails)  # type: ignore[arg-type]
            for item in items
        ]
        metadata = {name: [item.metadata[name] for item in items] for name in items[0].metadata}
        others = {"label": [item.label for item in items], **metadata}
        columns, images, skipped, present = collate(self.first_id + start, paths, decoded, others)
        replaced = [existing[path].id for path in columns["path"] if path in existing]
        return Entry(start, columns["id"], replaced, skipped, present), images, columns


class Embedder:
    """Holds the model, on a GPU if the worker was given one."""

    def __init__(self, model: list[Any], columns: tuple[str, ...]) -> None:
        import ray

        # In a list it comes as a reference, which a worker that takes over can still follow.
        shared: Model = ray.get(model[0])
        self._model = copy.deepcopy(shared).to("auto")
        self._columns = columns

    def __call__(self, rows: Rows) -> Rows:
        """Vectors in the place of pixels."""
        entry, images, columns = unpack(rows)
        if images:
            # Not Model.vectors: what is decoded would be cropped once more.
            vectors = vectors_of(self._model, columns["hash"], images, FeatureCache.of(self._model, enabled=False))
            columns |= vector_columns(vectors, self._columns)
        return pack((entry, columns))


@dataclass(frozen=True)
class Writer:
    """Writes rows that nobody sees until the driver commits them, and the journal entry that names them."""

    location: Location
    dim: int
    first_id: int

    def __call__(self, rows: Rows) -> Rows:
        """Twice for the same chunk, after a failure, is no harm: one of the two entries stays."""
        entry, columns = unpack(rows)
        if entry.ids:
            entry.written = [fragment.to_json() for fragment in Table(self.location, self.dim).write(columns)]
        Journal(str(self.location), self.first_id).write(entry)
        return pack(entry)


def pack(value: Any) -> Rows:
    """An object as one row, which stays whole however rows are cut."""
    return {"packed": np.array([pickle.dumps(value, protocol=5)], dtype=object)}


def unpack(rows: Rows) -> Any:
    """The object that `pack` made a row of."""
    [packed] = rows["packed"]
    return pickle.loads(packed)
