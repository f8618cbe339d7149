from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.datasets import ImageSplit, few_shot, hold_out, shot_counts, train_val_split
from kedge.errors import ConfigError

labels_of = st.lists(st.integers(0, 6), min_size=1, max_size=80).map(np.array)


@settings(deadline=None, max_examples=60)
@given(labels_of, st.floats(0.01, 0.95), st.integers(0, 5), st.sampled_from([2, 5]))
def test_hold_out_is_a_partition_by_class(labels: np.ndarray, fraction: float, seed: int, at_least: int) -> None:
    train, held_out = hold_out(labels, fraction, seed, at_least=at_least)
    assert sorted([*train, *held_out]) == list(range(len(labels)))
    for label in np.unique(labels):
        count, held = np.sum(labels == label), np.sum(labels[held_out] == label)
        if count < at_least:
            assert held == 0
        else:
            assert 1 <= held < count
            assert abs(held - fraction * count) <= 1
    again = hold_out(labels, fraction, seed, at_least=at_least)
    assert np.array_equal(train, again[0])
    assert np.array_equal(held_out, again[1])


def test_hold_out_of_a_tenth() -> None:
    labels = np.repeat(np.arange(100), 500)
    train, held_out = hold_out(labels)
    assert np.bincount(labels[held_out]).tolist() == [50] * 100
    assert len(train) == 45_000
    assert not np.array_equal(held_out, hold_out(labels, seed=1)[1])
    # Classes are drawn apart: not the same positions in each.
    assert len({tuple(held_out[labels[held_out] == label] % 500) for label in range(100)}) == 100


def test_hold_out_of_nothing() -> None:
    train, held_out = hold_out(np.array([0, 0, 1]), 0)
    assert train.tolist() == [0, 1, 2]
    assert held_out.tolist() == []


@settings(deadline=None, max_examples=60)
@given(labels_of, st.integers(0, 5))
def test_few_shot_sets_are_nested_and_end_with_all(labels: np.ndarray, seed: int) -> None:
    smaller: set[int] = set()
    for shots in shot_counts(labels):
        rows = few_shot(labels, shots, seed)
        assert np.array_equal(rows, few_shot(labels, shots, seed))
        assert smaller <= set(rows.tolist())
        smaller = set(rows.tolist())
        expected = np.minimum(np.bincount(labels), shots)
        assert np.array_equal(np.bincount(labels[rows], minlength=len(expected)), expected)
    assert smaller == set(range(len(labels)))


def test_shot_counts() -> None:
    assert shot_counts(np.repeat([0, 1], 500)) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert shot_counts(np.repeat([0, 1], 8)) == [1, 2, 4, 8]
    assert shot_counts(np.array([0, 1])) == [1]


def test_few_shot_depends_on_the_seed() -> None:
    labels = np.repeat(np.arange(10), 50)
    assert not np.array_equal(few_shot(labels, 1), few_shot(labels, 1, seed=1))


def test_bad_arguments() -> None:
    for fraction in (-0.1, 1.0):
        with pytest.raises(ConfigError, match="fraction"):
            hold_out(np.array([0, 1]), fraction)
    with pytest.raises(ConfigError, match="shots"):
        few_shot(np.array([0, 1]), 0)


def test_few_shots_are_taken_from_what_is_left() -> None:
    pictures = ImageSplit(np.arange(40 * 3, dtype=np.uint8).reshape(40, 3, 1, 1), np.repeat([0, 1], 20))
    rows, kept = hold_out(pictures.labels, 0.2, seed=3)
    train, held_out = train_val_split(pictures, 0.2, None, seed=3)
    assert held_out is not None
    assert np.array_equal(train.take(range(len(train))), pictures.take(rows))
    assert np.array_equal(held_out.take(range(len(held_out))), pictures.take(kept))
    few, same = train_val_split(pictures, 0.2, 3, seed=3)
    assert same is not None
    assert np.bincount(few.labels).tolist() == [3, 3]
    assert np.array_equal(same.take(range(len(same))), held_out.take(range(len(held_out))))
    taken, left = ({image.tobytes() for image in some.take(range(len(some))).numpy()} for some in (few, same))
    assert not taken & left
    assert train_val_split(pictures, 0.0, None)[1] is None
