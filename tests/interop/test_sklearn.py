from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits, make_blobs
from sklearn.dummy import DummyClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import kedge
from kedge.errors import ConfigError
from kedge.interop.sklearn import KedgeClassifier, KedgeRetriever


@parametrize_with_checks(
    [
        KedgeClassifier(hidden=16, epochs=25),
        KedgeClassifier("identity", epochs=5),
        KedgeRetriever(hidden=16, epochs=5),
    ]
)
def test_scikit_learns_own_checks(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.fixture(scope="module")
def digits() -> list[np.ndarray]:
    split: list[np.ndarray] = train_test_split(
        *load_digits(return_X_y=True), train_size=800, test_size=500, random_state=0
    )
    return split


def test_digits_beside_nearest_neighbours_and_logistic_regression(digits: list[np.ndarray]) -> None:
    X, X_test, y, y_test = digits
    rivals = {
        "most frequent class": DummyClassifier(),
        "5 nearest neighbours": KNeighborsClassifier(),
        "logistic regression": make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)),
        "anchors": KedgeClassifier(epochs=30, random_state=0),
        "anchors, linear head": KedgeClassifier("linear", epochs=30, random_state=0),
        "anchors, no head": KedgeClassifier("identity", epochs=30, random_state=0),
    }
    found = {name: one.fit(X, y).score(X_test, y_test) for name, one in rivals.items()}
    print({name: round(score, 4) for name, score in found.items()})
    for name in ("anchors", "anchors, linear head", "anchors, no head"):
        assert 1 - found[name] < (1 - found["most frequent class"]) / 4
    assert found["anchors"] >= found["logistic regression"]
    assert found["anchors"] > found["anchors, linear head"]


def test_the_loss_is_the_one_that_falls(digits: list[np.ndarray]) -> None:
    X, _, y, _ = digits
    few, many = (KedgeClassifier(epochs=epochs, random_state=0).fit(X, y) for epochs in (1, 20))
    values = []
    for one in (few, many):
        loss = kedge.CAMLoss(10, one.anchors_.shape[1])
        loss.anchors.data = torch.from_numpy(one.anchors_)
        values.append(loss(torch.from_numpy(one.transform(X)), torch.from_numpy(y)).item())
    assert values[1] < values[0] / 2


def test_probabilities_are_those_of_gaussians_around_the_anchors(digits: list[np.ndarray]) -> None:
    X, X_test, y, _ = digits
    names = np.array([f"digit {number}" for number in range(10)])
    model = KedgeClassifier("linear", epochs=5, random_state=0).fit(X, names[y])
    embeddings = model.transform(X_test[:50])
    squares = np.array([[((e - c) ** 2).sum() for c in model.anchors_] for e in embeddings])
    np.testing.assert_allclose(model.decision_function(X_test[:50]), -squares / 2, atol=1e-9)
    densities = np.exp(-squares / 2)
    np.testing.assert_allclose(model.predict_proba(X_test[:50]), densities / densities.sum(1, keepdims=True))
    assert model.predict(X_test[:50]).tolist() == [names[row] for row in squares.argmin(1)]
    assert model.get_feature_names_out()[0] == "kedgeclassifier0"


def test_in_a_pipeline_a_grid_a_clone_and_a_pickle(digits: list[np.ndarray]) -> None:
    X, X_test, y, y_test = (part[:400] for part in digits)
    pipeline = make_pipeline(StandardScaler(), KedgeClassifier("linear", epochs=8, random_state=0))
    grid = GridSearchCV(pipeline, {"kedgeclassifier__dim": [1, 10]}, cv=2).fit(X, y)
    assert grid.best_params_ == {"kedgeclassifier__dim": 10}
    fitted = clone(grid.best_estimator_).fit(X, y)
    state = torch.random.get_rng_state()
    again = pickle.loads(pickle.dumps(clone(fitted).fit(X, y)))
    assert torch.equal(torch.random.get_rng_state(), state)  # nobody else's chance is touched
    np.testing.assert_array_equal(fitted.predict_proba(X_test), again.predict_proba(X_test))
    other = clone(fitted).set_params(kedgeclassifier__random_state=1).fit(X, y)
    assert not np.array_equal(other.predict_proba(X_test), again.predict_proba(X_test))
    # Embeddings are what the next step learns from.
    onwards = make_pipeline(KedgeClassifier("linear", epochs=8, random_state=0), KNeighborsClassifier()).fit(X, y)
    assert onwards.score(X_test, y_test) > 0.8


def test_all_probes_find_what_an_exhaustive_search_finds() -> None:
    X, _ = make_blobs(500, 6, centers=12, random_state=0)
    queries, _ = make_blobs(60, 6, centers=12, random_state=1)
    X, queries = X.astype(np.float32), queries.astype(np.float32)
    exact = NearestNeighbors(n_neighbors=7).fit(X)
    retriever = KedgeRetriever(7, probes=1000, random_state=0).fit(X)
    assert len(retriever.anchors_) == round(500**0.5)
    for asked in (queries, None):
        distances, numbers = retriever.kneighbors(asked)
        expected_distances, expected = exact.kneighbors(asked)
        np.testing.assert_array_equal(numbers, expected)
        np.testing.assert_allclose(distances, expected_distances, rtol=1e-4, atol=1e-4)


def test_few_probes_look_into_the_nearest_lists_only() -> None:
    X = np.random.default_rng(0).normal(size=(400, 5)).astype(np.float32)
    retriever = KedgeRetriever(probes=2, anchors=9, random_state=0).fit(X)
    homes = ((X[:, None] - retriever.anchors_) ** 2).sum(2).argmin(1)
    for query in np.random.default_rng(1).normal(size=(20, 5)).astype(np.float32):
        nearest = np.argsort(((retriever.anchors_ - query) ** 2).sum(1))[:2]
        inside = np.flatnonzero(np.isin(homes, nearest))
        expected = inside[np.argsort(((X[inside] - query) ** 2).sum(1))[:4]]
        found = retriever.kneighbors(query[None], n_neighbors=4, return_distance=False)
        assert found.tolist() == [expected.tolist()]
    # Where the lists hold too few, more are looked into: an answer is always as long as asked for.
    assert retriever.kneighbors(X[:3], n_neighbors=390)[1].shape == (3, 390)


def precision(retriever: Any, X: np.ndarray, y: np.ndarray, labels: np.ndarray) -> float:
    return float((labels[retriever.kneighbors(X, 20, return_distance=False)] == y[:, None]).mean())


def test_labels_bring_a_class_together(digits: list[np.ndarray]) -> None:
    X, X_test, y, y_test = digits
    learned = KedgeRetriever(epochs=30, random_state=0).fit(X, y)
    assert learned.anchors_.shape[0] == 10
    found = {
        "as they are": precision(NearestNeighbors().fit(X), X_test, y_test, y),
        "k-means": precision(KedgeRetriever(probes=4, random_state=0).fit(X), X_test, y_test, y),
        "anchors": precision(learned, X_test, y_test, y),
    }
    print({name: round(value, 4) for name, value in found.items()})
    assert found["anchors"] > found["as they are"]
    assert found["k-means"] > found["as they are"] - 0.02


def test_what_is_refused() -> None:
    X, y = make_blobs(30, random_state=0)
    for settings, match in [
        ({"head": "deep"}, "head must be one of hidden, linear, identity, found 'deep'"),
        ({"head": "identity", "dim": 5}, "dim must be the number of features, 2, found 5"),
        ({"epochs": 0}, "epochs must be a whole number of at least 1"),
        ({"learning_rate": 0}, "learning_rate must be a number above 0"),
    ]:
        with pytest.raises(ConfigError, match=match):
            KedgeClassifier(**settings).fit(X, y)
    with pytest.raises(ConfigError, match="anchors must lie between 1 and the 30 samples, found 31"):
        KedgeRetriever(anchors=31).fit(X)
    with pytest.raises(ConfigError, match="n_neighbors must lie between 1 and 29, found 30"):
        KedgeRetriever().fit(X).kneighbors(n_neighbors=30)
    with pytest.raises(ConfigError, match="probes must be at least 1, found 0"):
        KedgeRetriever(probes=0).fit(X).kneighbors(X)
