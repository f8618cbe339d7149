"""`Gallery`: a folder that holds a collection of images or embeddings and searches it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
from PIL import Image

from kedge.datasets import is_external
from kedge.deprecation import renamed_keywords
from kedge.errors import ConfigError
from kedge.gallery.anchors import Anchors, Space
from kedge.gallery.calibration import Calibration, CalibrationFile, save_calibration
from kedge.gallery.distances import unit_rows
from kedge.gallery.ingest import Added, add_images, dataset_images, list_with_labels
from kedge.gallery.location import Location, wrap_url_errors
from kedge.gallery.manifest import ListKind, Manifest, create_folder, open_folder, open_model
from kedge.gallery.ranking import RANKS, Rank, Searcher, VectorSearch, compare, looks_probes
from kedge.gallery.result import Item, Result
from kedge.gallery.schema import check_columns, check_vectors, require_positive
from kedge.gallery.search import Snapshot
from kedge.gallery.snapshot import Items, SnapshotLoader, stolen_items
from kedge.gallery.table import MEMORY, Change, Table, Version
from kedge.images import fetch_image, is_url, read_image
from kedge.model import Model

__all__ = ["Gallery", "Item", "Method", "Rank"]

Method = Literal["two_stage", "brute_force"]
_METHODS = get_args(Method)
_log = logging.getLogger(__name__)
Query = str | Path | bytes | int | Image.Image | np.ndarray


class Gallery:
    """Images or embeddings in a folder, for any number of readers and one writer; made with `create` or `open`."""

    precision = "float32"  # of the inverted lists

    def __init__(
        self, location: Location, manifest: Manifest, learned: np.ndarray | None, model: Model | None, memory: int
    ) -> None:
        self.location = location
        self.path = location.folder
        """The folder; of a gallery in an object store, its local cache."""
        self.model = model
        self.classes: tuple[str, ...] = tuple(manifest.classes)
        self.lists: ListKind = manifest.lists
        self.dim = int(manifest.dim)
        self.thumbnails = int(manifest.thumbnails)
        self.features = int(manifest.features)
        """The size of the features that it keeps beside its embeddings; 0: it keeps none."""
        self._calibration = CalibrationFile(location)
        self._calibration.load()
        self._table = Table(location, self.dim, memory=memory)
        space = Space(
            self.dim,
            learned=learned,
            classes=self.classes,
            by_label=self.lists == "label",
            learned_first=self.features > 0,
            scale_means=self.features == 0 and manifest.format >= 3,  # earlier ones answer as they did
        )
        self._snapshots = SnapshotLoader(self._table, space)
        self._looks = SnapshotLoader(self._table, Space.of_looks(self.features)) if self.features else None
        self._loaders = [loader for loader in (self._snapshots, self._looks) if loader is not None]
        self._searcher = Searcher(self._snapshots, self._looks, self._calibration)
        self._judged = set(self.classes)
        """Labels of which it is known whether their anchors take items of others."""

    @classmethod
    @renamed_keywords(precision=None)
    def create(
        cls,
        path: str | Path,
        model: Model | None = None,
        *,
        anchors: np.ndarray | None = None,
        classes: Sequence[str] | None = None,
        dim: int | None = None,
        lists: ListKind = "label",
        thumbnails: int = 0,
    ) -> Gallery:
        """An empty gallery for the images that `model` embeds, or for external embeddings.

        External embeddings come with `anchors` (one row per class, named by `classes`) or only with their `dim`:
        then labels route a search by their means, and vectors without labels by k-means centroids. `lists` says
        where an item sits: in the list of its label, where that is known, or of its nearest anchor. `thumbnails` is
        the longer side of the thumbnails that the gallery keeps of its images; 0 keeps none.
        """
        location = Location.of(path)
        with wrap_url_errors(location):
            return cls(
                location, *create_folder(location, model, anchors, classes, dim, lists, thumbnails), model, MEMORY
            )

    @classmethod
    def open(cls, path: str | Path, model: Model | None = None, *, memory: int = MEMORY) -> Gallery:
        """Open an existing gallery. It holds its model; one that is in memory already saves loading it.

        `memory` is what it may keep in bytes, beside the page cache.
        """
        if memory < 64 << 20:
            raise ConfigError(f"memory must be at least 64 MiB, found {memory / 2**20:g} MiB.")
        location, manifest = open_folder(path)
        model, learned = open_model(location, manifest, model)
        return cls(location, manifest, learned, model, memory)

    def __len__(self) -> int:
        return len(self.snapshot())

    def __repr__(self) -> str:
        model = "no model" if self.model is None else self.model.encoder_name
        return f"Gallery({str(self.location)!r}, {len(self):,} items, {model}, dim={self.dim}, lists={self.lists})"

    @property
    def calibration(self) -> Calibration | None:
        """When a query is unknown, if the gallery was calibrated, by this process or another."""
        return self._calibration.load()

    def snapshot(self) -> Snapshot:
        """The newest version: its anchors and lists. It never changes, whatever writers do meanwhile."""
        return self._snapshots.latest()

    def verified_snapshot(self, *, looks: bool = False) -> Snapshot:
        """The same for a reader of all of it: all lists and the table were compared with their checksums.

        With `looks`, of the features in the place of the embeddings.
        """
        self._table.latest().verify()
        return (self._features_loader("looks") if looks else self._snapshots).verified()

    def item(self, id: int) -> Item:
        """Path, label and metadata of one item."""
        table = self._table.latest()
        row = table.row(id)
        return Item(id, row["path"], row["label"], {name: row[name] for name in table.metadata_columns})

    def thumbnail(self, id: int) -> bytes | None:
        """The thumbnail (JPEG) of an item's image, if the gallery keeps any."""
        content: bytes | None = self._table.latest().row(id)["thumbnail"]
        return content

    def vector(self, id: int) -> np.ndarray:
        """The embedding of one item."""
        return self.item_vectors(id)[0]

    def item_vectors(self, id: int) -> tuple[np.ndarray, np.ndarray | None]:
        """The embedding of one item, and its features, if the gallery keeps them and it was added with any."""
        row = self._table.latest().row(id)
        features = row["features"] if self.features else None
        return np.asarray(row["embedding"]), features if features is not None and features.any() else None

    def features_at(self, snapshot: Snapshot, id: int) -> np.ndarray | None:
        """The features of an item in one version, from the inverted lists; None where it has none."""
        return self._searcher.paired(snapshot).features(id)

    def ids(self, where: str | None = None) -> list[int]:
        """The items that match, such as `"label = 'cat'"`, in order."""
        return self._table.latest().ids(where)

    def check_filter(self, where: str) -> None:
        """Raise unless a filter is one expression over the columns of this gallery, and nothing behind it."""
        self._table.latest().check_filter(where)

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """All items in batches of some thousand: id, path, label, hash, embedding, features, thumbnail, metadata."""
        return self._table.latest().batches(columns)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of every item that are not the user's metadata."""
        return self._table.own_columns

    def check(self) -> str:
        """Compare all with its checksums, in a sentence; damaged lists are rebuilt, a damaged table raises."""
        table = self._table.latest()
        table.verify(again=True)
        intact = True
        for loader in self._loaders:
            loader.reopen()
            before = loader.latest()
            intact &= before is loader.verified()
        lists = "as they were written" if intact else "were damaged and have been rebuilt"
        return f"the table of {len(table):,} items is as it was written, its lists {lists}"

    def touch(self) -> None:
        """Raise unless the table can be read; for health checks."""
        self._table.touch()

    def versions(self) -> list[Version]:
        """The versions that can be restored, oldest first."""
        return self._table.versions()

    def history(self, count: int | None = None) -> list[Change]:
        """The last `count` versions, or all, oldest first: their items, and how many each added or removed."""
        return self._table.latest().history(count)

    def restore(self, version: int) -> None:
        """Make an old version the current one."""
        with self.writing() as table:
            table.restore(version)

    def add(
        self,
        source: Any,
        labels: Sequence[str | None] | None = None,
        *,
        metadata: Mapping[str, Sequence[Any]] | None = None,
        commit_every: int | None = None,
        progress: Callable[[Added], None] | None = None,
    ) -> Added:
        """Add images: a file, several, a folder, whose first-level folders are labels, or a labelled dataset.

        A dataset is a map-style one of PyTorch, a Hugging Face `Dataset` or `DatasetDict`, or a dictionary of such.
        What is there already (same path, same content) is left out; an image that cannot be read is reported in
        the result and is not fatal. Returns the ids of what was added: all of them are there or, after a kill, none;
        with `commit_every`, those that were complete when it came. `progress` is called as the work goes on.
        """
        if self.model is None:
            raise ConfigError(f"Gallery '{self.location}' has no model; use add_embeddings.")
        require_positive(commit_every=1 if commit_every is None else commit_every)
        files, names = dataset_images(source, labels) if is_external(source) else list_with_labels(source, labels)
        columns = check_columns(len(files), names, None, metadata, self._table.own_columns)
        steps = commit_every or len(files)
        with self._judging_new_labels(columns["label"]), self.writing() as table:
            return add_images(table, self.model, files, columns, self.thumbnails, steps, progress)

    def add_embeddings(
        self,
        vectors: np.ndarray,
        labels: Sequence[str | None] | None = None,
        paths: Sequence[str | None] | None = None,
        metadata: Mapping[str, Sequence[Any]] | None = None,
        *,
        features: np.ndarray | None = None,
    ) -> list[int]:
        """Add external embeddings, one row each; all of them or, after a kill, none. Returns their ids.

        In a gallery that keeps features, items that come without are not found by looks.
        """
        matrix = self.check_vectors(vectors)
        columns: dict[str, Any] = check_columns(len(matrix), labels, paths, metadata, self._table.own_columns)
        if not len(matrix):
            return []
        if features is not None:
            columns["features"] = self._check_features(features, len(matrix))
        with self._judging_new_labels(columns["label"]), self.writing() as table:
            table.add_columns(columns)
            first = table.reserve_ids(len(matrix))
            ids = list(range(first, first + len(matrix)))
            table.commit(table.write({"id": ids, "embedding": matrix, **columns}))
        return ids

    def remove(self, ids: int | Sequence[int]) -> int:
        """Remove items; returns how many of them were there. A single id that is not there is a `ConfigError`."""
        several = [int(ids)] if isinstance(ids, (int, np.integer)) else ids
        with self.writing() as table:
            count = table.delete(several)
        if several is not ids and not count:
            raise ConfigError(f"There is no item {ids} in {self.location}; nothing was removed.")
        return count

    def calibrate(self, held_out: str | Path | Sequence[str | Path] | np.ndarray, accept: float = 0.95) -> Calibration:
        """Learn from held-out items when a query is unknown, and keep it: how far from every anchor it then is.

        In a gallery that keeps features, also how unlike every item of a trained class. `held_out` are images (a
        folder, files) or vectors of classes that the gallery knows, which were neither trained on nor added; of items
        like these, the share `accept` will count as known.
        """
        features = None
        if isinstance(held_out, np.ndarray):
            vectors = self.check_vectors(held_out)
        elif self.model is None:
            raise ConfigError(f"Gallery '{self.location}' has no model; calibrate it with vectors.")
        else:
            embedded = self.model.vectors(list_with_labels(held_out)[0])
            vectors, features = embedded.embeddings.numpy(), embedded.features.numpy()
        snapshot = self._snapshots.verified()
        nearest = np.sqrt(snapshot.anchors.nearest_squares(vectors))
        calibration = Calibration.from_distances(nearest, accept)
        if self._looks is not None and features is not None:
            self._looks.verified()
            pair = self._searcher.paired(snapshot)
            if len(pair.ids) > len(pair.foreign):
                calibration = calibration.with_familiarity(self.familiarity(vectors, features))
        with self.writing():
            save_calibration(self.location, calibration)
            self._calibration.invalidate()
        return calibration

    def familiarity(self, vectors: np.ndarray, features: np.ndarray) -> np.ndarray:
        """How much queries look like what the gallery holds of trained classes; of unknown ones it is lowest."""
        vectors = self.check_vectors(vectors)
        features = self._check_features(features, len(vectors))
        blocks = compare(self._searcher.paired(self.snapshot()), vectors, features)
        return np.concatenate([np.empty(0), *(block.familiarity() for block in blocks)])

    def optimize(self, *, forget: float | None = None) -> None:
        """Fold everything that is new into the inverted lists, and join the table's small files.

        Versions older than `forget` days can then not be restored, and their files make room; by default all are kept.
        """
        if forget is not None and not forget >= 0:
            raise ConfigError(f"forget must be a number of days, at least 0, found {forget}.")
        with self.writing() as table:
            # What is damaged must not be written on, and the versions before it must not be forgotten.
            table.verify(again=True)
            table.compact()
            if forget is not None:
                table.forget(forget)
            table.seal((), prune=True)
            for loader in self._loaders:
                loader.write_lists(table)

    @renamed_keywords(at_least="min_candidates")
    def search(
        self,
        query: Query,
        k: int = 20,
        method: Method = "two_stage",
        probes: int = 1,
        min_candidates: int = 0,
        where: str | None = None,
        *,
        rank: Rank = "auto",
        allow_url: bool = False,
    ) -> Result:
        """The k items most like an image (path, bytes, PIL image), a vector or an item (its id, itself left out).

        Searches the inverted lists of the `probes` nearest anchors, and more until they hold `min_candidates` items;
        with the filter `where`, the nearest lists that hold matching items, until these are k. `rank` says what makes
        items alike: their `class`, their `looks` (the features, whatever the label), or `auto`: by the class that
        embedding and looks predict, whose items are then ordered by looks; where that is a label the model was not
        trained on, its items come first and all others follow, by looks.
        The image behind an http(s) URL is fetched only with `allow_url`.
        """
        vector, features, exclude_id = self.query_vectors(query, allow_url=allow_url)
        return self.search_embeddings(
            vector[None],
            k,
            method,
            probes,
            min_candidates,
            where,
            features=None if features is None else features[None],
            rank=rank,
            exclude_id=exclude_id,
        )[0]

    def search_text(self, text: str, k: int = 20, method: Method = "two_stage", where: str | None = None) -> Result:
        """The k items that a text describes best, of any label: by the cosine of its vector and their features.

        For models whose encoder has a text tower (CLIP, SigLIP). No anchor takes part: all items are compared or, by
        `two_stage` in a gallery of more than 100,000, those of the nearest eighth of the lists.
        """
        return self.search_text_vector(self.embed_text(text), k, method, where)

    def embed_text(self, text: str) -> np.ndarray:
        """A text in the space of the features, of length 1; raises where this gallery cannot be searched by text."""
        if self.model is None:
            raise ConfigError(f"{self.location} was made without a model: text needs one with a text tower.")
        vector: np.ndarray = self.model.embed_text(text)[0].numpy()
        if not self.takes_text:
            raise ConfigError(f"{self.location} keeps no features to compare a text with: index the images again.")
        return vector

    @property
    def takes_text(self) -> bool:
        """Whether it can be searched by text: its model has a text tower, and it keeps features of its space."""
        model = self.model
        if model is None or model.text_source is None:
            return False
        return self.features > 0 or (model.normalize and not model.has_features)

    def search_text_vector(
        self,
        vector: np.ndarray,
        k: int = 20,
        method: Method = "two_stage",
        where: str | None = None,
        *,
        snapshot: Snapshot | None = None,
    ) -> Result:
        """`search_text` with the vector that `embed_text` made of a text; in the newest version, or in a `snapshot`."""
        snapshot = self.snapshot() if snapshot is None else snapshot
        queries, options = vector[None], dict[str, Any](where=where, snapshot=snapshot)
        if self.features:
            # A text has no embedding.
            none = np.zeros((1, self.dim), np.float32)
            [result] = self.search_embeddings(none, k, method, features=queries, rank="looks", **options)
        else:
            probes = looks_probes(snapshot)
            method = "brute_force" if method == "two_stage" and probes is None else method
            [result] = self.search_embeddings(queries, k, method, probes or 1, **options)
        result.rank, result.anchors, result.unknown = "looks", [], None
        return result

    def query_vectors(
        self, query: Query, *, allow_url: bool = False
    ) -> tuple[np.ndarray, np.ndarray | None, int | None]:
        """Embedding and features (None: not known) of a query, and the id to exclude where the query is an item."""
        if isinstance(query, (int, np.integer)) and not isinstance(query, bool):
            return *self.item_vectors(int(query)), int(query)
        if isinstance(query, np.ndarray) and query.ndim == 1:
            return query, None, None
        embeddings, features = self.image_vectors([query], allow_url=allow_url)
        return embeddings[0], None if features is None else features[0], None

    def image_vectors(self, images: Sequence[Any], *, allow_url: bool = False) -> tuple[np.ndarray, np.ndarray | None]:
        """Embeddings and, where the gallery keeps them, features of images, which share the encoder's batches."""
        if self.model is None:
            raise ConfigError(f"Gallery '{self.location}' has no model; search with a vector or the id of an item.")

        def load(image: Any) -> Any:
            if isinstance(image, bytes):
                return read_image(image)
            if not isinstance(image, str) or not is_url(image):
                return image
            if not allow_url:
                raise ConfigError(f"{image} is a URL; pass allow_url=True (--url) to fetch it.")
            return fetch_image(image)

        embeddings, features = self.model.vectors([load(image) for image in images])
        return embeddings.numpy(), features.numpy() if self.features else None

    def neighbour_distances(self, compared: Literal["embedding", "features"], sample: int = 200) -> np.ndarray:
        """The distances of some items to their nearest neighbour, sorted: what counts as near in this gallery."""
        snapshot = self.snapshot()
        items = Items(snapshot)
        rows = np.random.default_rng(0).permutation(len(items))[:sample]
        ids, vectors, features = items.ids[rows], items.vectors(rows), None
        if compared == "features":
            looks = [self.features_at(snapshot, id) for id in ids.tolist()]
            known = [row for row, values in enumerate(looks) if values is not None]
            ids, vectors, features = ids[known], vectors[known], np.array([looks[row] for row in known])
        if not len(ids):
            return np.empty(0)
        rank: Rank = "class" if features is None else "looks"
        results = self.search_embeddings(vectors, 2, features=features, rank=rank, snapshot=snapshot)
        others = ([hit.distance for hit in result if hit.id != id] for id, result in zip(ids, results, strict=True))
        return np.sort([distances[0] for distances in others if distances])

    @renamed_keywords(at_least="min_candidates", without="exclude_id")
    def search_embeddings(
        self,
        queries: np.ndarray,
        k: int = 20,
        method: Method = "two_stage",
        probes: int = 1,
        min_candidates: int = 0,
        where: str | None = None,
        *,
        features: np.ndarray | None = None,
        rank: Rank = "auto",
        exclude_id: int | Sequence[int] | None = None,
        snapshot: Snapshot | None = None,
    ) -> list[Result]:
        """The k nearest items of each vector, but for `exclude_id` (one item, or one for each vector).

        In the newest version, or in a `snapshot`. `rank` as in `search`; without the `features` of the queries, `auto`
        is by class.
        """
        matrix = self.check_vectors(queries)
        require_positive(k=k, probes=probes)
        if method not in _METHODS:
            raise ConfigError(f"method must be one of {', '.join(_METHODS)}, found {method!r}.")
        if rank not in RANKS:
            raise ConfigError(f"rank must be one of {', '.join(RANKS)}, found {rank!r}.")
        if rank == "looks":
            self._features_loader("rank='looks'")
            if features is None:
                raise ConfigError(
                    "rank='looks' needs the features of the queries; pass features, or search with images."
                )
        looks = None if features is None or not self.features else self._check_features(features, len(matrix))
        lists = probes if method == "two_stage" else None
        exclude = None if exclude_id is None else np.broadcast_to(np.asarray(exclude_id, np.int64), len(matrix))
        min_familiarity = None if looks is None else self.min_familiarity
        how = VectorSearch(k, lists, min_candidates, where, exclude, rank, min_familiarity)
        return self._searcher.search(self.snapshot() if snapshot is None else snapshot, matrix, looks, how)

    def _features_loader(self, argument: str) -> SnapshotLoader:
        """The loader of the looks space, which `argument` asks for."""
        if self._looks is None:
            raise ConfigError(f"Gallery '{self.location}' has no features beside its embeddings; leave {argument} out.")
        return self._looks

    def _check_features(self, features: Any, count: int) -> np.ndarray:
        """Features as a matrix of length 1 rows, one for each of `count` items."""
        self._features_loader("features")
        matrix = unit_rows(check_vectors(features, self.features, "features"))
        if len(matrix) != count:
            raise ConfigError(f"features must have {count} rows, one for each vector, found {len(matrix)}.")
        return matrix

    @property
    def min_familiarity(self) -> float | None:
        """The smallest familiarity of a known query: the gallery's own or, by default, the model's."""
        if (own := self.calibration) is not None and own.familiarity is not None:
            return own.familiarity
        calibration = None if self.model is None else self.model.calibration
        return None if calibration is None else -calibration.threshold

    def is_unknown(self, anchors: Anchors, queries: np.ndarray) -> list[bool | None]:
        """Whether each query is far from every anchor; None without a calibration."""
        return self._searcher.is_unknown(anchors, queries)

    def check_vectors(self, vectors: Any) -> np.ndarray:
        """Vectors as a float32 matrix of this gallery's dimension, one row each; raises where they are none."""
        return check_vectors(vectors, self.dim)

    @contextmanager
    def _judging_new_labels(self, labels: Sequence[str | None]) -> Iterator[None]:
        """Inside the block items with these labels are added: say so where new anchors take items of other labels.

        Not in a gallery that keeps features, where new anchors take no part in routing.
        """
        added = {label for label in labels if label is not None} - self._judged
        if not added or self.features or not self.classes:
            yield
            return
        added -= set(self.snapshot().anchors.names)
        yield
        self._judged |= added
        if added and (stolen := stolen_items(self.snapshot(), added)) is not None:
            label, share = stolen
            _log.warning(
                "%s: the new label %r takes %.0f %% of the items of other labels from their lists: "
                "train with it, or search with more probes.",
                self.location,
                label,
                100 * share,
            )

    def anchors_for(self, table: Table) -> Anchors:
        """The anchors for what `table` holds now."""
        return self._snapshots.anchors(table)

    @contextmanager
    def writing(self) -> Iterator[Table]:
        """Be the only writer of the table; the system releases the lock when its holder dies."""
        try:
            with self._table.writing():
                yield self._table
        finally:
            for loader in self._loaders:
                loader.invalidate()
