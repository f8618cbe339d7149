"""Whatever is done to a gallery, three ways to search it agree: all lists, brute force, and plain numpy."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from kedge.encoders import build_encoder
from kedge.gallery import Gallery
from kedge.images import Preprocessing
from kedge.model import Model

DIM = 4
LABELS = ["a", "b", "c", "unseen", "another", None]


class Galleries(RuleBasedStateMachine):
    items = Bundle("items")

    @initialize(
        lists=st.sampled_from(["label", "anchor"]),
        kind=st.sampled_from(["dim", "anchors", "features"]),
    )
    def begin(self, lists: Any, kind: str) -> None:
        self.folder = Path(tempfile.mkdtemp())
        anchors = np.eye(3, DIM, dtype=np.float32) * 2
        own: dict[str, Any] = {"anchors": anchors, "classes": LABELS[:3]} if kind == "anchors" else {"dim": DIM}
        if kind == "features":
            encoder = build_encoder("resnet10", dim=DIM, stem="imagenet")
            size = Preprocessing(size=32)
            own = {"model": Model(encoder, anchors=torch.from_numpy(anchors), classes=LABELS[:3], preprocessing=size)}  # type: ignore[arg-type]
        self.gallery = Gallery.create(self.folder / "g", lists=lists, **own)
        self.vectors: dict[int, np.ndarray] = {}
        self.features: dict[int, np.ndarray] = {}
        self.labels: dict[int, str | None] = {}
        self.prices: dict[int, int | None] = {}

    @rule(target=items, seed=st.integers(0, 10**6), count=st.integers(1, 12), priced=st.booleans())
    def add(self, seed: int, count: int, priced: bool) -> Any:
        chance = np.random.default_rng(seed)
        # Few different coordinates, so that ties and duplicates happen.
        vectors = chance.integers(-2, 3, (count, DIM)).astype(np.float32)
        labels = [LABELS[int(one)] for one in chance.integers(0, len(LABELS), count)]
        prices = chance.integers(0, 5, count).tolist() if priced else [None] * count
        metadata = {"price": prices} if priced else None
        # Some come without features, as vectors from elsewhere do.
        features = chance.normal(size=(count, self.gallery.features)) if self.gallery.features and seed % 3 else None
        ids = self.gallery.add_embeddings(vectors, labels=labels, metadata=metadata, features=features)
        if features is not None:
            self.features |= dict(zip(ids, features / np.linalg.norm(features, axis=1, keepdims=True), strict=True))
        assert not set(ids) & set(self.labels)
        for one, vector, label, price in zip(ids, vectors, labels, prices, strict=True):
            self.vectors[one], self.labels[one], self.prices[one] = vector, label, price
        return multiple(*ids)

    @rule(gone=st.lists(items, min_size=1, max_size=5))
    def remove(self, gone: list[int]) -> None:
        assert self.gallery.remove(gone) == len({one for one in gone if one in self.vectors})
        for one in gone:
            self.vectors.pop(one, None)
            self.features.pop(one, None)

    @rule()
    def optimize(self) -> None:
        self.gallery.optimize()

    @rule()
    def reopen(self) -> None:
        self.gallery = Gallery.open(self.gallery.path)

    @rule(seed=st.integers(0, 10**6), k=st.integers(1, 30))
    def search(self, seed: int, k: int) -> None:
        self.agree(np.random.default_rng(seed).integers(-2, 3, DIM).astype(np.float32), k, None, set(self.vectors))

    @rule(seed=st.integers(0, 10**6), label=st.sampled_from([name for name in LABELS if name]))
    def search_with_a_filter(self, seed: int, label: str) -> None:
        wanted = {one for one in self.vectors if self.labels[one] == label}
        self.agree(np.random.default_rng(seed).normal(size=DIM).astype(np.float32), 10, f"label = '{label}'", wanted)
        if any(price is not None for price in self.prices.values()):
            cheap = {one for one in wanted if (self.prices[one] or 0) < 3 and self.prices[one] is not None}
            self.agree(np.zeros(DIM, np.float32), 10, f"label = '{label}' AND price < 3", cheap)

    def agree(self, query: np.ndarray, k: int, where: str | None, wanted: set[int]) -> None:
        distances = {one: float(np.linalg.norm(self.vectors[one].astype(np.float64) - query)) for one in wanted}
        expected = sorted(distances.values())[:k]
        for options in ({"method": "brute_force"}, {"probes": 10**6}, {"min_candidates": 10**6}):
            hits = self.gallery.search(query, k=k, where=where, **options).hits
            ids = [hit.id for hit in hits]
            assert len(set(ids)) == len(ids) == min(k, len(wanted))
            assert set(ids) <= wanted
            # Items at (nearly) equal distances may change places, and nothing else may.
            assert np.allclose([distances[one] for one in ids], expected, atol=1e-5)
            assert [hit.label for hit in hits] == [self.labels[one] for one in ids]
        if self.gallery.features:
            self.agree_by_looks(query, k, where, wanted & set(self.features))

    def agree_by_looks(self, query: np.ndarray, k: int, where: str | None, wanted: set[int]) -> None:
        features = np.random.default_rng(int(abs(query).sum() * 1000)).normal(size=self.gallery.features)
        unit = features / np.linalg.norm(features)
        distances = {one: float(np.linalg.norm(self.features[one] - unit)) for one in wanted}
        (result,) = self.gallery.search_embeddings(query[None], k, where=where, features=features[None], rank="looks")
        assert result.ids == sorted(wanted, key=lambda one: (distances[one], one))[:k]
        assert np.allclose(result.distances, [distances[one] for one in result.ids], atol=1e-5)
        (result,) = self.gallery.search_embeddings(query[None], k, where=where, features=features[None])
        assert set(result.ids) <= set(self.vectors)
        assert len(set(result.ids)) == len(result)

    @invariant()
    def counts(self) -> None:
        if hasattr(self, "gallery"):
            assert len(self.gallery) == len(self.vectors)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)


_common = settings(stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck))


class TestGalleries(Galleries.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(_common, max_examples=3)


@pytest.mark.soak
class TestManyGalleries(Galleries.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(_common, max_examples=100)
