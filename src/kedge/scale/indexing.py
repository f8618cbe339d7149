"""Pictures into a gallery with Ray: listed once, read, embedded and written by workers, committed once."""

from __future__ import annotations

import copy
import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from kedge.errors import ConfigError, DataError
from kedge.gallery import Added, Gallery
from kedge.gallery.adding import known_items
from kedge.gallery.indexing import UNREADABLE, tell_unreadable
from kedge.gallery.pictures import Known
from kedge.gallery.record import Record
from kedge.model import Model
from kedge.scale.cluster import Cluster, connected
from kedge.scale.journal import Entry, Journal
from kedge.scale.pieces import CHUNK, Piece
from kedge.scale.routes import place_of_all
from kedge.scale.sources import Listing, list_source
from kedge.scale.stages import Embedder, Reader, Work, Writer, packed, unpacked

__all__ = ["index_with_ray"]

_READ_CPUS, _EMBED_CPUS = 0.5, 0.25
"""Parts of a processor, so that the models leave room for those who read even when most machines are lost."""


def index_with_ray(
    gallery: Gallery,
    source: str | Path | Sequence[str | Path],
    *,
    address: str | None = None,
    workers: int | None = None,
    progress: Callable[[Added], None] | None = None,
) -> Added:
    """Add the pictures of a source: what `gallery.add` does, over all machines of a Ray cluster.

    `source` is a folder (first-level folders are labels), a .txt file with paths or a list of them, Parquet files
    (columns `image` or `path`, perhaps `label`, further ones are metadata) or WebDataset shards (.tar). `workers`
    is how many models embed at a time. All of it is there at the end or, after a kill, nothing: started again with
    the same source, a run goes on behind what its workers had finished.
    """
    if gallery.model is None:
        raise ConfigError(f"{gallery.place} was made without a model, so it takes no pictures: make a new gallery.")
    listing = list_source(source)
    if not len(listing):
        raise DataError(f"{source} holds no pictures: give the folder that holds them.")
    with connected(address, workers) as cluster, gallery.writing() as record:
        run = _Run(gallery, gallery.model, record, listing, progress or (lambda _: None))
        added = run.add(cluster, workers)
    tell_unreadable(gallery.path / UNREADABLE, added.skipped)
    return added


class _Run:
    """One run over a listing. Whoever uses it must hold the gallery's lock."""

    def __init__(
        self, gallery: Gallery, model: Model, record: Record, listing: Listing, progress: Callable[[Added], None]
    ) -> None:
        self._gallery = gallery
        self._model = model
        self._record = record
        self._listing = listing
        self._progress = progress
        self._firsts = [piece.first for piece in listing.pieces]

    def add(self, cluster: Cluster, workers: int | None) -> Added:
        paths = [path for piece in self._listing.pieces for path in piece.paths]
        known, outdated = known_items(self._record, paths)
        self._record.add_columns({name: pa.array([], kind) for name, kind in self._listing.metadata.items()})
        journal = Journal(str(self._gallery.place))
        digest = self._digest()
        if not journal.resume(digest, self._record.version):
            journal.begin(digest, self._record.reserve(len(paths)))
        states = [_state(piece, known) for piece in self._listing.pieces]
        entries = journal.entries(lambda start: states[bisect_right(self._firsts, start) - 1])
        added = Added(len(paths))
        for entry in entries.values():
            _count(added, entry)
        self._progress(added)
        work = []
        for piece, state in zip(self._listing.pieces, states, strict=True):
            done = _done(piece, entries)
            if sum(entries[start].count for start in done) < len(piece.paths):
                here = {path: known[path] for path in piece.paths if path in known}
                work.append(Work(piece, here, state, done))
        for entry in self._finished(
            work, journal.first, min(workers or cluster.embedders, max(1, len(work))), gpu=cluster.gpus > 0
        ):
            entries[entry.start] = entry
            _count(added, entry)
            self._progress(added)
        in_order = [entries[start] for start in sorted(entries)]
        journal.begin(digest, journal.first, committing=self._record.version)
        if fragments := [fragment for entry in in_order for fragment in entry.fragments]:
            self._record.commit(fragments)
        self._record.delete([*outdated, *(id for entry in in_order for id in entry.replaced)])
        journal.remove()
        whole = Added(len(paths))
        for entry in in_order:
            _count(whole, entry)
        return whole

    def _finished(self, work: Sequence[Work], first: int, embedders: int, *, gpu: bool) -> Iterator[Entry]:
        """What the workers finish, as it comes."""
        if not work:
            return
        import ray.data

        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        place, dim, thumbnails = place_of_all(self._gallery), self._gallery.dim, self._gallery.thumbnails
        model = ray.put(copy.deepcopy(self._model).to("cpu"))
        alone: dict[str, Any] = {"batch_size": 1, "batch_format": "numpy"}
        chunks = ray.data.from_items([{"packed": _bytes(one)} for one in work], override_num_blocks=len(work))
        entries = (
            chunks.map_batches(Reader(first, self._model.preprocessing, thumbnails), num_cpus=_READ_CPUS, **alone)
            .map_batches(
                Embedder,
                fn_constructor_args=([model],),
                concurrency=embedders,
                num_cpus=_EMBED_CPUS,
                num_gpus=1 if gpu else 0,
                **alone,
            )
            .map_batches(Writer(place, dim, first), num_cpus=_READ_CPUS, **alone)
        )
        for rows in entries.iter_batches(batch_size=1, batch_format="numpy", prefetch_batches=0):
            yield from unpacked(rows)

    def _digest(self) -> str:
        """What the ids and rows of a run follow from: with any other, it is another run."""
        about = hashlib.sha256()
        about.update(repr((self._model.fingerprint, self._gallery.thumbnails, self._record.metadata_columns)).encode())
        for piece in self._listing.pieces:
            about.update(repr(piece).encode())
        return about.hexdigest()


def _bytes(work: Work) -> bytes:
    content: bytes = packed(work)["packed"][0]
    return content


def _state(piece: Piece, known: Mapping[str, Known]) -> str:
    there = [(path, known[path]) for path in piece.paths if path in known]
    return hashlib.sha256(repr(there).encode()).hexdigest()[:16]


def _done(piece: Piece, entries: Mapping[int, Entry]) -> frozenset[int]:
    return frozenset(start for start in range(piece.first, piece.first + len(piece.paths), CHUNK) if start in entries)


def _count(added: Added, entry: Entry) -> None:
    added += entry.ids
    added.skipped += entry.skipped
    added.present += entry.present
