"""Vectors in, results out: a search by distance, or by class and looks, that survives damaged lists."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from kedge.gallery.anchors import Anchors
from kedge.gallery.calibration import CalibrationFile
from kedge.gallery.inverted_lists import DamagedLists
from kedge.gallery.ranking import Pair, Rank, RankedSearch
from kedge.gallery.search import Columns, Result, Snapshot
from kedge.gallery.snapshot import SnapshotLoader

__all__ = ["Searcher", "VectorSearch"]


@dataclass(frozen=True)
class VectorSearch:
    """What is asked for; `probes` None: all lists."""

    k: int
    probes: int | None
    min_candidates: int
    where: str | None
    exclude_id: int | None
    rank: Rank


class Searcher:
    """Searches snapshots of the class space and, in a gallery that keeps features, of the looks space."""

    def __init__(self, classes: SnapshotLoader, looks: SnapshotLoader | None, calibration: CalibrationFile) -> None:
        self._classes, self._looks, self._calibration = classes, looks, calibration
        self._pair: Pair | None = None

    def search(
        self,
        snapshot: Snapshot,
        embeddings: np.ndarray,
        features: np.ndarray | None,
        how: VectorSearch,
        min_familiarity: float | None,
    ) -> list[Result]:
        """A result for each query; by distance of embeddings where there are no features to compare."""
        is_ranked = how.rank != "class" and features is not None and self._looks is not None
        # Without a learned anchor nothing is predicted, and without an item in the looks space nothing compared.
        if is_ranked and (how.rank == "looks" or (snapshot.anchors.learned and len(self.paired(snapshot).ids))):
            assert features is not None
            return self._by_class_and_looks(snapshot, embeddings, features, how, min_familiarity)
        return self._by_distance(snapshot, embeddings, how)

    def paired(self, snapshot: Snapshot) -> Pair:
        """A snapshot, and that of the looks space of the same version."""
        assert self._looks is not None
        looks, pair = self._looks.at(snapshot.version), self._pair
        if pair is None or pair.classes is not snapshot or pair.looks is not looks:
            try:
                pair = Pair(snapshot, looks)
            except DamagedLists:
                snapshot = self._classes.repaired(snapshot)
                pair = Pair(snapshot, self._looks.at(snapshot.version))
            self._pair = pair
        return pair

    def is_unknown(self, anchors: Anchors, queries: np.ndarray, nearest: np.ndarray | None = None) -> list[bool | None]:
        """Whether each query is far from every anchor, the `nearest` if known; None without a calibration."""
        if (calibration := self._calibration.load()) is None:
            return [None] * len(queries)
        unknown: list[bool | None] = (
            np.sqrt(anchors.nearest_squares(queries, nearest)) > calibration.threshold
        ).tolist()
        return unknown

    def _by_distance(self, snapshot: Snapshot, embeddings: np.ndarray, how: VectorSearch) -> list[Result]:
        """In the lists of the nearest anchors, or in all."""
        started = time.perf_counter()

        def run(snapshot: Snapshot) -> tuple[Snapshot, list[Columns], list[np.ndarray] | None]:
            masks = None if how.where is None else snapshot.masks(self._classes.matching(snapshot, how.where))
            found = snapshot.search(embeddings, how.k, how.probes, how.min_candidates, masks, how.exclude_id)
            return snapshot, *found

        try:
            snapshot, hits, probed = run(snapshot)
        except DamagedLists:
            snapshot, hits, probed = run(self._classes.repaired(snapshot))
        seconds = (time.perf_counter() - started) / max(1, len(embeddings))
        names, nearest = snapshot.anchors.names, None
        if probed is None:
            anchors = [list(names)] * len(embeddings)
        else:
            anchors = [[names[number] for number in numbers.tolist()] for numbers in probed]
            if how.where is None:
                nearest = np.array([numbers[0] for numbers in probed], dtype=np.int64)
        unknown = self.is_unknown(snapshot.anchors, embeddings, nearest)
        return [Result(*of_query, seconds) for of_query in zip(hits, anchors, unknown, strict=True)]

    def _by_class_and_looks(
        self,
        snapshot: Snapshot,
        embeddings: np.ndarray,
        features: np.ndarray,
        how: VectorSearch,
        min_familiarity: float | None,
    ) -> list[Result]:
        """By class or by looks, whichever suits each query."""
        started = time.perf_counter()
        assert self._looks is not None
        matching = None if how.where is None else self._classes.matching(snapshot, how.where)
        always_looks = how.rank == "looks"
        search = RankedSearch(
            how.k, how.probes, how.min_candidates, how.exclude_id, matching, always_looks, min_familiarity
        )
        unknown: list[bool | None] = [None] * len(embeddings)
        if min_familiarity is None:
            unknown = self.is_unknown(snapshot.anchors, embeddings)
        try:
            ranked = search.run(self.paired(snapshot), embeddings, features, unknown)
        except DamagedLists:
            for loader in (self._classes, self._looks):
                loader.verified()
            ranked = search.run(self.paired(self._classes.latest()), embeddings, features, unknown)
        seconds = (time.perf_counter() - started) / max(1, len(embeddings))
        return [Result(found.columns, found.anchors, found.unknown, seconds, found.rank) for found in ranked]
