from __future__ import annotations

import numpy as np
import pytest
import torch
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN
from sklearn.metrics import accuracy_score, normalized_mutual_info_score
from sklearn.neighbors import KNeighborsClassifier

from kedge.errors import ConfigError, DataError
from kedge.metrics import (
    accuracy,
    knn_accuracy,
    map_at_r,
    mean_average_precision,
    nearest,
    normalized_mutual_information,
    precision_at_k,
    r_precision,
    rank_relevant,
    recall_at_k,
)


@pytest.fixture
def data() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(7, 6)) * 1.5
    labels = rng.integers(0, 6, 500)
    query_labels = rng.integers(0, 7, 80)
    queries = centres[query_labels] + rng.normal(size=(80, 6))
    return queries, query_labels, centres[labels] + rng.normal(size=(500, 6)), labels


def test_knn_accuracy_equals_scikit_learn(data: tuple[np.ndarray, ...]) -> None:
    queries, query_labels, gallery, labels = data
    classifier = KNeighborsClassifier(1, algorithm="brute").fit(gallery, labels)
    expected = classifier.score(queries, query_labels)
    assert (query_labels == 6).any()  # a class that is not in the gallery counts as wrong
    assert knn_accuracy(queries, query_labels, gallery, labels) == pytest.approx(expected)
    assert 0.1 < expected < 0.9


def test_knn_accuracy_without_the_query_itself(data: tuple[np.ndarray, ...]) -> None:
    _, _, gallery, labels = data
    assert knn_accuracy(gallery, labels, gallery, labels) == 1.0
    _, neighbours = KNeighborsClassifier(2, algorithm="brute").fit(gallery, labels).kneighbors(gallery)
    expected = (labels[neighbours[:, 1]] == labels).mean()
    assert knn_accuracy(gallery, labels, gallery, labels, self_index=np.arange(500)) == pytest.approx(expected)


def test_single_numbers_are_the_means_of_the_ranking(data: tuple[np.ndarray, ...]) -> None:
    scores = rank_relevant(*data, ks=(5,)).mean()
    assert mean_average_precision(*data) == scores["mAP"]
    assert precision_at_k(*data, k=5) == scores["P@5"]


@pytest.mark.parametrize("among_themselves", [False, True])
def test_recall_and_map_at_r_equal_pytorch_metric_learning(
    data: tuple[np.ndarray, ...], among_themselves: bool
) -> None:
    queries, query_labels, gallery, labels = (torch.from_numpy(part) for part in data)
    known = query_labels < 6  # that library scores a query without relevant items as zero
    queries, query_labels = queries[known], query_labels[known]
    calculator = AccuracyCalculator(
        include=("precision_at_1", "mean_average_precision_at_r", "r_precision"),
        k=499 if among_themselves else 500,
        device=torch.device("cpu"),
        knn_func=CustomKNN(LpDistance(normalize_embeddings=False)),
    )
    if among_themselves:
        expected = calculator.get_accuracy(gallery, labels)
        asked = (gallery, labels, gallery, labels)
        own = torch.arange(500)
    else:
        expected = calculator.get_accuracy(queries, query_labels, gallery, labels, ref_includes_query=False)
        asked, own = (queries, query_labels, gallery, labels), None
    assert recall_at_k(*asked, self_index=own) == pytest.approx(expected["precision_at_1"])
    assert map_at_r(*asked, self_index=own) == pytest.approx(expected["mean_average_precision_at_r"])
    assert r_precision(*asked, self_index=own) == pytest.approx(expected["r_precision"])
    assert 0.05 < expected["mean_average_precision_at_r"] < 0.95


def test_recall_and_map_at_r_with_ties_go_by_gallery_order() -> None:
    rng = np.random.default_rng(1)
    queries, gallery = rng.integers(-1, 2, (30, 3)), rng.integers(-1, 2, (60, 3))
    query_labels, labels = rng.integers(0, 5, 30), rng.integers(0, 4, 60)
    hit, scores, precisions = [], [], []
    for query, label in zip(queries, query_labels, strict=True):
        right = labels[((gallery - query) ** 2).sum(1).argsort(kind="stable")] == label
        if count := right.sum():
            hit.append(right[:3].any())
            precisions.append(right[:count].mean())
            scores.append(sum(right[: k + 1].mean() for k in range(count) if right[k]) / count)
    assert len(scores) < 30
    assert recall_at_k(queries, query_labels, gallery, labels, k=3) == pytest.approx(np.mean(hit))
    assert map_at_r(queries, query_labels, gallery, labels) == pytest.approx(np.mean(scores))
    assert r_precision(queries, query_labels, gallery, labels) == pytest.approx(np.mean(precisions))


def test_recall_at_every_k_of_a_gallery_among_itself() -> None:
    """By a full sort of every row, with ties."""
    rng = np.random.default_rng(2)
    points, labels = rng.integers(-2, 3, (80, 3)), rng.integers(0, 12, 80)
    for k in (1, 2, 4, 8):
        found = []
        for row in range(80):
            order = ((points - points[row]) ** 2).sum(1).argsort(kind="stable")
            right = labels[order[order != row]] == labels[row]
            found.append(right[:k].any())
        assert recall_at_k(points, labels, points, labels, k=k, self_index=range(80)) == pytest.approx(np.mean(found))


@pytest.mark.parametrize("classes", [1, 2, 7, 60])
@pytest.mark.parametrize("clusters", [1, 3, 60])
def test_nmi_equals_scikit_learn(classes: int, clusters: int) -> None:
    rng = np.random.default_rng(classes * 100 + clusters)
    labels, found = 5 * rng.integers(0, classes, 60), rng.integers(0, clusters, 60) - 3
    assert normalized_mutual_information(labels, found) == pytest.approx(normalized_mutual_info_score(labels, found))
    assert normalized_mutual_information(labels, labels) == pytest.approx(1)
    with pytest.raises(DataError, match="empty"):
        normalized_mutual_information([], [])


def test_accuracy_equals_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    predictions, labels = rng.integers(0, 4, 100), rng.integers(0, 4, 100)
    assert accuracy(predictions, labels) == pytest.approx(accuracy_score(labels, predictions))
    with pytest.raises(DataError, match="labels has shape"):
        accuracy(predictions, labels[:5])
    with pytest.raises(DataError, match="empty"):
        accuracy([], [])


@pytest.mark.parametrize("memory", [1, 10**8])
def test_nearest_is_a_stable_sort(memory: int) -> None:
    rng = np.random.default_rng(0)
    queries, gallery = rng.integers(-2, 3, (20, 3)), rng.integers(-2, 3, (90, 3))
    distances = ((queries[:, None] - gallery) ** 2).sum(2)
    expected = distances.argsort(axis=1, kind="stable")[:, :10]
    assert nearest(queries, gallery, 10, memory=memory).tolist() == expected.tolist()


@pytest.mark.parametrize("k", [0, 4])
def test_nearest_wants_a_k_the_gallery_has(k: int) -> None:
    with pytest.raises(ConfigError, match="between 1 and that"):
        nearest([[0.0]], [[0.0]] * 3, k)
