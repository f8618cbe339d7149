from __future__ import annotations

import hashlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kedge.datasets import Dataset, ImageSplit
from kedge.encoders import build_encoder
from kedge.errors import ConfigError, DataError
from kedge.evaluation import METHODS, METRICS, evaluate, evaluate_embeddings, route, top_hits
from kedge.images import Preprocessing
from kedge.model import Model, embed_split

CLASSES = ("anchor", "buoy", "cleat")


def walk(order: np.ndarray, right: np.ndarray, relevant: int) -> dict[str, float]:
    """The scores of one result, met item by item."""
    found, total = 0, 0.0
    for place, item in enumerate(order, start=1):
        if right[item]:
            found += 1
            total += found / place
    return {"mAP": total / relevant} | {f"P@{k}": right[order[:k]].sum() / k for k in (20, 100)}


def test_every_column_equals_a_walk_down_the_results() -> None:
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(6, 5))
    gallery_labels, query_labels = rng.integers(0, 5, 200), rng.integers(0, 6, 40)
    gallery = centres[gallery_labels] + rng.normal(size=(200, 5))
    queries = centres[query_labels] + rng.normal(size=(40, 5))
    routes = [((v[:, None] - centres) ** 2).sum(2).argmin(1) for v in (queries, gallery)]
    report = evaluate_embeddings(
        queries, query_labels, gallery, gallery_labels, query_routes=routes[0], gallery_routes=routes[1]
    )

    expected: dict[str, list[dict[str, float]]] = {method: [] for method in METHODS}
    nearest_right = 0
    for query, label, routed in zip(queries, query_labels, routes[0], strict=True):
        order = np.linalg.norm(gallery - query, axis=1).argsort()
        right = gallery_labels == label
        nearest_right += right[order[0]]
        if not right.any():
            continue
        by_label, by_anchor = gallery_labels[order] == routed, routes[1][order] == routed
        cosines = gallery @ query / np.linalg.norm(gallery, axis=1)
        results = {
            "brute_force": order,
            "brute_force_cosine": (-cosines).argsort(),
            "label_lists": order[by_label],
            "label_lists_rest_last": np.concatenate([order[by_label], order[~by_label]]),
            "anchor_lists": order[by_anchor],
        }
        for method, result in results.items():
            expected[method].append(walk(result, right, right.sum()))
    for method in METHODS:
        for metric in METRICS:
            mean = np.mean([scores[metric] for scores in expected[method]])
            assert report.scores(method)[metric] == pytest.approx(mean, abs=1e-12), (method, metric)
    assert report.accuracy == pytest.approx((routes[0] == query_labels).mean())
    assert report.knn1 == pytest.approx(nearest_right / 40)
    assert (report.queries, report.left_out) == (40, (query_labels == 5).sum())
    assert report.left_out > 0


def test_label_lists_are_all_right_or_all_wrong() -> None:
    # As SPEC says of label lists: mAP is then the accuracy, exactly, where nothing is left out.
    rng = np.random.default_rng(1)
    labels, query_labels, routes = rng.integers(0, 4, 90), rng.integers(0, 4, 50), rng.integers(0, 4, 50)
    report = evaluate_embeddings(
        rng.normal(size=(50, 3)),
        query_labels,
        rng.normal(size=(90, 3)),
        labels,
        query_routes=routes,
        gallery_routes=labels,
    )
    assert report.label_lists["mAP"] == pytest.approx(report.accuracy)
    assert report.label_lists_rest_last["mAP"] > report.label_lists["mAP"]
    assert report.anchor_lists == report.label_lists


@pytest.fixture
def dataset() -> Dataset:
    rng = np.random.default_rng(0)

    def split(rows: int) -> ImageSplit:
        labels = np.arange(rows) * 3 // rows
        images = rng.integers(0, 60, (rows, 3, 16, 16)) + labels[:, None, None, None] * 90
        return ImageSplit(images.astype(np.uint8), labels)

    return Dataset("harbour", CLASSES, split(60), split(21))


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    encoder = build_encoder("resnet10", dim=8, image_size=16).eval()
    return Model(
        encoder,
        anchors=torch.randn(3, 8),
        classes=CLASSES,
        preprocessing=Preprocessing(size=None),
        loss="contrastive",
    )


def test_evaluate_embeds_test_as_queries_and_train_as_gallery(model: Model, dataset: Dataset) -> None:
    report = evaluate(model, dataset, batch_size=8)
    queries, gallery = model.embed(dataset.test.take(range(21))), model.embed(dataset.train.take(range(60)))
    expected = evaluate_embeddings(
        queries,
        dataset.test.labels,
        gallery,
        dataset.train.labels,
        query_routes=torch.cdist(queries, model.anchors).argmin(1),
        gallery_routes=torch.cdist(gallery, model.anchors).argmin(1),
    )
    for method in METHODS:
        assert report.scores(method) == pytest.approx(expected.scores(method), abs=1e-6)
    assert report.accuracy == expected.accuracy
    assert (report.queries, report.left_out) == (21, 0)
    assert report.meta["dataset"] == "harbour"
    assert report.meta["loss"] == "contrastive"
    assert report.meta["model"] == "resnet10"
    assert report.meta["dataset_fingerprint"] == dataset.fingerprint()
    assert report.meta["gallery"] == 60


def test_a_limit_takes_queries_from_every_class(model: Model, dataset: Dataset) -> None:
    report = evaluate(model, dataset, limit=3)
    assert (report.queries, report.meta["gallery"], report.meta["test"]) == (3, 60, 21)
    few = dataset.test.subset([0, 7, 14])
    assert sorted(few.labels) == [0, 1, 2]
    assert report.knn1 == evaluate(model, Dataset("few", CLASSES, dataset.train, few)).knn1


def test_a_limit_beyond_the_test_set_is_the_test_set(model: Model, dataset: Dataset) -> None:
    assert evaluate(model, dataset, limit=1000).queries == 21


def test_other_classes_are_refused(model: Model, dataset: Dataset) -> None:
    other = Dataset("harbour", CLASSES[::-1], dataset.train, dataset.test)
    with pytest.raises(DataError, match="classes it was trained on"):
        evaluate(model, other)


def test_bad_arguments_are_named(model: Model, dataset: Dataset) -> None:
    with pytest.raises(ConfigError, match="limit is 0"):
        evaluate(model, dataset, limit=0)
    with pytest.raises(ConfigError, match="batch_size is 0"):
        evaluate(model, dataset, batch_size=0)
    with pytest.raises(DataError, match="no test images"):
        evaluate(model, Dataset("harbour", CLASSES, dataset.train, dataset.test.subset([])))


def test_routes_do_not_depend_on_how_many_are_routed_at_once(
    model: Model, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    embeddings = embed_split(model.embed_pixels, dataset.train)
    whole = route(model, embeddings)
    monkeypatch.setattr("kedge.evaluation.protocol.ROUTE_CHUNK", 7)
    assert torch.equal(route(model, embeddings), whole)
    assert route(model, embeddings[:0]).shape == (0,)


def test_top_hits_are_the_nearest_training_rows(model: Model, dataset: Dataset) -> None:
    queries, gallery = model.embed(dataset.test.take([2, 9])), model.embed(dataset.train.take(range(60)))
    expected = torch.cdist(queries.double(), gallery.double()).argsort(dim=1)[:, :6]
    assert top_hits(model, dataset, [2, 9]).tolist() == expected.tolist()


def test_pixels_are_hashed_once(model: Model, dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[object] = []
    counted = SimpleNamespace(sha256=lambda: hashed.append(None) or hashlib.sha256())
    monkeypatch.setattr("kedge.datasets.base.hashlib", counted)
    fingerprint = dataset.fingerprint()
    assert evaluate(model, dataset).meta["dataset_fingerprint"] == fingerprint
    assert len(hashed) == 1
    assert replace(dataset, test=dataset.train).fingerprint() != fingerprint
