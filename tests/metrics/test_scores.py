from __future__ import annotations

import numpy as np
import pytest
import torch
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN
from sklearn.metrics import accuracy_score
from sklearn.neighbors import KNeighborsClassifier

from kedge.errors import ConfigError, DataError
from kedge.metrics import (
    accuracy,
    knn_accuracy,
    map_at_r,
    mean_average_precision,
    nearest,
    precision_at_k,
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
        include=("precision_at_1", "mean_average_precision_at_r"),
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
    assert 0.05 < expected["mean_average_precision_at_r"] < 0.95


def test_recall_and_map_at_r_with_ties_go_by_gallery_order() -> None:
    rng = np.random.default_rng(1)
    queries, gallery = rng.integers(-1, 2, (30, 3)), rng.integers(-1, 2, (60, 3))
    query_labels, labels = rng.integers(0, 5, 30), rng.integers(0, 4, 60)
    hit, scores = [], []
    for query, label in zip(queries, query_labels, strict=True):
        right = labels[((gallery - query) ** 2).sum(1).argsort(kind="stable")] == label
        if count := right.sum():
            hit.append(right[:3].any())
            scores.append(sum(right[: k + 1].mean() for k in range(count) if right[k]) / count)
    assert len(scores) < 30
    assert recall_at_k(queries, query_labels, gallery, labels, k=3) == pytest.approx(np.mean(hit))
    assert map_at_r(queries, query_labels, gallery, labels) == pytest.approx(np.mean(scores))


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
