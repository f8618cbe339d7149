"""Ranking against a naive oracle and three other libraries; where definitions differ, the test says how."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN
from sklearn.metrics import average_precision_score
from torchmetrics.functional.retrieval import retrieval_average_precision, retrieval_precision

from kedge.errors import ConfigError, DataError
from kedge.metrics import Ranking, rank_relevant, ranking
from kedge.metrics.ranking import Lists, Rest, rank_in_lists

KS = (1, 3, 20)


def naive(
    queries: np.ndarray,
    query_labels: np.ndarray,
    gallery: np.ndarray,
    gallery_labels: np.ndarray,
    query_lists: np.ndarray | None = None,
    gallery_lists: np.ndarray | None = None,
    rest: str = "dropped",
    self_index: np.ndarray | None = None,
) -> tuple[list[float], dict[int, list[float]], list[int]]:
    """Walk down one fully sorted result per query."""
    average_precision, precision, relevant = [], {k: [] for k in KS}, []
    for q in range(len(queries)):
        result = []
        for g in range(len(gallery)):
            if self_index is not None and self_index[q] == g:
                continue
            distance = np.float32(((queries[q].astype(float) - gallery[g].astype(float)) ** 2).sum())
            outside = gallery_lists is not None and gallery_lists[g] != query_lists[q]
            result.append((outside, distance, g))
        hits = [gallery_labels[g] == query_labels[q] for _, _, g in result]
        relevant.append(sum(hits))
        returned = sorted(r for r in result if not (r[0] and rest == "dropped"))
        right = [bool(gallery_labels[g] == query_labels[q]) for _, _, g in returned]
        total = sum(sum(right[: i + 1]) / (i + 1) for i, is_right in enumerate(right) if is_right)
        average_precision.append(total / relevant[-1] if relevant[-1] else 0.0)
        for k in KS:
            precision[k].append(sum(right[:k]) / k)
    return average_precision, precision, relevant


def draw(seed: int, *, queries: int = 12, gallery: int = 60, dim: int = 4, classes: int = 5, ties: bool) -> Any:
    """Random data; with ``ties`` the vectors are small integers. One class is asked for but never stored."""
    rng = np.random.default_rng(seed)
    vectors = [
        rng.integers(-2, 3, (rows, dim)).astype(np.float32) if ties else rng.normal(size=(rows, dim)).astype(np.float32)
        for rows in (queries, gallery)
    ]
    return vectors[0], rng.integers(0, classes + 1, queries), vectors[1], rng.integers(0, classes, gallery)


def check(ranking: Ranking, expected: tuple[list[float], dict[int, list[float]], list[int]]) -> None:
    average_precision, precision, relevant = expected
    assert ranking.relevant.tolist() == relevant
    np.testing.assert_allclose(ranking.average_precision.cpu(), average_precision, atol=1e-12)
    for k in KS:
        np.testing.assert_allclose(ranking.precision[k].cpu(), precision[k], atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    ties=st.booleans(),
    lists=st.sampled_from([None, "dropped", "last"]),
    selves=st.booleans(),
    gallery=st.integers(1, 60),
    memory=st.sampled_from([1, 10_000, 10**9]),
)
def test_equals_the_naive_walk(seed: int, ties: bool, lists: Any, selves: bool, gallery: int, memory: int) -> None:
    data = draw(seed, gallery=gallery, ties=ties)
    rng = np.random.default_rng(seed + 1)
    options: dict[str, Any] = {}
    if selves:
        options["self_index"] = rng.integers(-1, gallery, 12)
    if lists:
        options |= {
            "query_lists": rng.integers(0, 3, 12),
            "gallery_lists": rng.integers(0, 3, gallery),
            "rest": lists,
        }
    check(rank_relevant(*data, ks=KS, memory=memory, **options), naive(*data, **options))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("lists", [None, "dropped", "last"])
def test_the_way_of_a_gpu_gives_the_same(ties: bool, lists: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = draw(3, ties=ties)
    rng = np.random.default_rng(0)
    options: dict[str, Any] = {"self_index": rng.integers(-1, 60, 12)}
    if lists:
        options |= {"query_lists": rng.integers(0, 3, 12), "gallery_lists": rng.integers(0, 3, 60), "rest": lists}
    monkeypatch.setattr(ranking, "_by_sorting", ranking._by_counting)
    check(rank_relevant(*data, ks=KS, **options), naive(*data, **options))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("ties", [False, True])
def test_on_a_gpu(ties: bool) -> None:
    data = draw(4, ties=ties)
    check(rank_relevant(*(torch.as_tensor(array).cuda() for array in data), ks=KS), naive(*data))


@pytest.mark.parametrize("ties", [False, True])
def test_memory_and_tiles_do_not_change_a_bit(ties: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    data = draw(5, queries=70, gallery=3000, dim=24, ties=ties)
    reference = rank_relevant(*data)
    for memory in (1, 100_000, 2_000_000):
        other = rank_relevant(*data, memory=memory)
        assert torch.equal(other.average_precision, reference.average_precision)
    monkeypatch.setattr("kedge.metrics.distances._tile_rows", lambda *_: 7)
    other = rank_relevant(*data)
    assert torch.equal(other.average_precision, reference.average_precision)
    assert all(torch.equal(other.precision[k], reference.precision[k]) for k in (1, 20, 100))


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_a_common_offset_costs_no_digits(offset: float) -> None:
    rng = np.random.default_rng(0)
    gallery = rng.normal(size=(300, 8)) * 1e-3
    queries, labels = gallery[:40] + 1e-5, rng.integers(0, 10, 300)
    shifted = rank_relevant(queries + offset, labels[:40], gallery + offset, labels, ks=KS)
    check(shifted, naive(queries, labels[:40], gallery, labels))


@pytest.mark.parametrize("spread", [0.0, 1e-20, 1e10])
def test_any_spread_of_distances(spread: float) -> None:
    rng = np.random.default_rng(1)
    gallery, labels = rng.normal(size=(100, 3)) * spread, rng.integers(0, 4, 100)
    check(
        rank_relevant(gallery[:9], labels[:9], gallery, labels, ks=KS),
        naive(gallery[:9], labels[:9], gallery, labels),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32])
def test_dtypes(dtype: torch.dtype) -> None:
    queries, query_labels, gallery, gallery_labels = draw(6, ties=True)
    ranking = rank_relevant(
        torch.tensor(queries, dtype=dtype),
        query_labels,
        torch.tensor(gallery, dtype=dtype),
        gallery_labels,
        ks=KS,
    )
    check(ranking, naive(queries, query_labels, gallery, gallery_labels))


def test_scikit_learn_agrees_where_nothing_ties() -> None:
    queries, query_labels, gallery, gallery_labels = draw(7, queries=30, gallery=400, ties=False)
    ranking = rank_relevant(queries, query_labels, gallery, gallery_labels)
    for q in np.flatnonzero(ranking.relevant.numpy()):
        scores = -np.linalg.norm(gallery.astype(float) - queries[q], axis=1)
        expected = average_precision_score(gallery_labels == query_labels[q], scores)
        assert ranking.average_precision[q].item() == pytest.approx(expected, abs=1e-12)


def test_scikit_learn_takes_tied_items_together() -> None:
    # Two items at the same distance, the relevant one stored first: for us it has rank 1; scikit-learn has
    # one threshold for both, where precision is 1/2.
    assert rank_relevant([[0.0]], [1], [[1.0], [-1.0]], [1, 0]).mean()["mAP"] == 1.0
    assert rank_relevant([[0.0]], [1], [[1.0], [-1.0]], [0, 1]).mean()["mAP"] == 0.5
    assert average_precision_score([1, 0], [-1.0, -1.0]) == average_precision_score([0, 1], [-1.0, -1.0]) == 0.5


def test_torchmetrics_agrees_on_positive_scores() -> None:
    # Its scores must be positive (it takes others for "not relevant"), hence 1 / (1 + distance).
    queries, query_labels, gallery, gallery_labels = draw(8, queries=20, gallery=200, ties=False)
    ranking = rank_relevant(queries, query_labels, gallery, gallery_labels, ks=KS)
    for q in np.flatnonzero(ranking.relevant.numpy()):
        distances = torch.tensor(((gallery.astype(float) - queries[q]) ** 2).sum(1))
        target = torch.tensor(gallery_labels == query_labels[q])
        expected = retrieval_average_precision(1 / (1 + distances), target)
        assert ranking.average_precision[q].item() == pytest.approx(float(expected), abs=1e-6)
        for k in KS:
            expected = retrieval_precision(1 / (1 + distances), target, top_k=k)
            assert ranking.precision[k][q].item() == pytest.approx(float(expected), abs=1e-6)


def test_torchmetrics_divides_by_what_was_found() -> None:
    # Four relevant items, two of them in the query's list: we divide by four, torchmetrics by two.
    gallery, labels = np.arange(4.0)[:, None], [1, 1, 1, 1]
    ours = rank_relevant([[0.0]], [1], gallery, labels, query_lists=[0], gallery_lists=[0, 0, 5, 5])
    assert ours.mean()["mAP"] == 0.5
    assert float(retrieval_average_precision(torch.tensor([0.9, 0.8]), torch.tensor([True, True]))) == 1.0


@pytest.mark.parametrize("include_self", [False, True])
def test_pytorch_metric_learning_agrees(include_self: bool) -> None:
    queries, query_labels, gallery, gallery_labels = (
        torch.as_tensor(array) for array in draw(9, queries=40, gallery=300, ties=False)
    )
    options: dict[str, Any] = {}
    if include_self:
        # It calls the gallery's first rows the queries, and drops the match by index, as we do.
        queries, query_labels, options = gallery[:40], gallery_labels[:40], {"self_index": torch.arange(40)}
    calculator = AccuracyCalculator(
        include=("mean_average_precision", "precision_at_1"),
        k=len(gallery) - include_self,
        device=torch.device("cpu"),
        knn_func=CustomKNN(LpDistance(normalize_embeddings=False)),
    )
    expected = calculator.get_accuracy(queries, query_labels, gallery, gallery_labels, ref_includes_query=include_self)
    ours = rank_relevant(queries, query_labels, gallery, gallery_labels, **options)
    assert include_self or ours.left_out > 0  # it leaves queries without a relevant item out, too
    # It divides AP by the relevant items among its k neighbours; with k = the gallery that is all of them.
    assert ours.mean()["mAP"] == pytest.approx(expected["mean_average_precision"], abs=1e-6)
    assert ours.mean()["P@1"] == pytest.approx(expected["precision_at_1"], abs=1e-6)


def test_self_match_goes_by_identity_not_by_distance() -> None:
    twins = [[1.0], [1.0], [5.0]]
    ranking = rank_relevant(twins[:1], [0], twins, [0, 0, 1], self_index=[0], ks=(1, 2))
    assert ranking.relevant.tolist() == [1]
    assert ranking.mean() == {"mAP": 1.0, "P@1": 1.0, "P@2": 0.5}


def test_queries_without_a_relevant_item_are_left_out() -> None:
    ranking = rank_relevant([[0.0], [0.0]], [0, 9], [[0.0], [1.0]], [0, 1], ks=(1,))
    assert ranking.left_out == 1
    assert ranking.mean() == {"mAP": 1.0, "P@1": 1.0}
    with pytest.raises(DataError, match="same labels"):
        rank_relevant([[0.0]], [9], [[0.0]], [0]).mean()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query_labels": [0]}, DataError, "query_labels has shape"),
        ({"gallery_labels": [[0, 1, 2]]}, DataError, "gallery_labels has shape"),
        ({"gallery_labels": [0.0, 1.0, 2.0]}, DataError, "give integers"),
        ({"queries": [[0.0, float("nan")], [0.0, 0.0]]}, DataError, "queries holds NaN"),
        ({"gallery": [[0.0, float("inf")]] * 3}, DataError, "gallery holds NaN"),
        ({"gallery": [[0.0, 1e30]] * 3}, DataError, "scale the embeddings down"),
        ({"gallery": [[0.0, 1j]] * 3}, DataError, "real numbers"),
        ({"queries": [[0.0]] * 2}, DataError, "queries have 1 dimensions but the gallery has 2"),
        ({"queries": [0.0, 1.0]}, DataError, "queries has shape"),
        ({"gallery": np.zeros((0, 2)), "gallery_labels": np.zeros(0, int)}, DataError, "gallery has shape"),
        ({"ks": (0,)}, ConfigError, "k is 0"),
        ({"rest": "first"}, ConfigError, "rest is 'first'"),
        ({"query_lists": [0, 0]}, ConfigError, "give both or neither"),
        ({"query_lists": [0, 0], "gallery_lists": [0]}, DataError, "gallery_lists has shape"),
        ({"self_index": [0, 3]}, DataError, "self_index runs from 0 to 3"),
        ({"self_index": [-2, 0]}, DataError, "self_index runs from -2"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {
        "queries": [[0.0, 1.0], [1.0, 0.0]],
        "query_labels": [0, 1],
        "gallery": [[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]],
        "gallery_labels": [0, 1, 2],
    }
    rank_relevant(**arguments)
    with pytest.raises(error, match=message):
        rank_relevant(**(arguments | change))


@pytest.mark.parametrize("rest", ["dropped", "last"])
def test_several_lists_rank_as_each_alone(rest: Rest) -> None:
    rng = np.random.default_rng(3)
    queries, gallery = rng.integers(0, 3, (40, 2)).astype(float), rng.integers(0, 3, (90, 2)).astype(float)
    labels, items, routes = (rng.integers(0, 4, count) for count in (40, 90, 40))
    lists = Lists(routes, items, rest), None, Lists(labels, rng.integers(0, 4, 90), rest)
    own = np.arange(40)
    # Equal vectors, of which there are many here, tie whatever the block.
    for memory in (1 << 29, 1):
        together = rank_in_lists(queries, labels, gallery, items, lists, self_index=own, memory=memory)
        for outcome, each in zip(together, lists, strict=True):
            one = {} if each is None else {"query_lists": each.query, "gallery_lists": each.gallery, "rest": rest}
            alone = rank_relevant(queries, labels, gallery, items, self_index=own, **one)
            assert torch.equal(outcome.average_precision, alone.average_precision)
            assert outcome.mean() == alone.mean()
            assert outcome.retrieval() == alone.retrieval()
