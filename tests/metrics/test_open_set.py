"""Open-set scores against scikit-learn, and against a threshold moved over every score."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score, roc_curve

from kedge.errors import ConfigError, DataError
from kedge.metrics import auroc, fpr_at_tpr, oscr


def draw(seed: int, *, ties: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    known, unknown = rng.normal(0.8, 1, 83), rng.normal(0, 1, 41)
    if ties:
        known, unknown = known.round(), unknown.round()
    return known, rng.random(83) < 0.7, unknown


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_scikit_learn_agrees(seed: int, ties: bool) -> None:
    known, _, unknown = draw(seed, ties=ties)
    is_known, scores = np.r_[np.ones(83), np.zeros(41)], np.r_[known, unknown]
    assert auroc(known, unknown) == pytest.approx(roc_auc_score(is_known, scores))
    rates, hits, _ = roc_curve(is_known, scores, drop_intermediate=False)
    for tpr in (0.5, 0.95, 1.0):
        assert fpr_at_tpr(known, unknown, tpr) == pytest.approx(rates[hits >= tpr].min())


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_oscr_is_the_area_under_its_curve(seed: int, ties: bool) -> None:
    known, is_correct, unknown = draw(seed, ties=ties)
    thresholds = [np.inf, *np.unique(np.r_[known, unknown])[::-1]]
    rates = [(unknown >= threshold).mean() for threshold in thresholds]
    right = [(is_correct & (known >= threshold)).mean() for threshold in thresholds]
    area = np.trapezoid(right, rates)
    assert oscr(known, is_correct, unknown) == pytest.approx(area)
    assert oscr(known, is_correct, unknown) < is_correct.mean()
    assert oscr(known, np.ones(83, bool), unknown) == pytest.approx(auroc(known, unknown))


def test_extremes() -> None:
    assert auroc([1.0, 2.0], [0.0]) == 1
    assert auroc([1.0], [1.0]) == 0.5
    assert fpr_at_tpr([1.0] * 20, [2.0]) == 1
    # Nineteen of twenty are 95 %: the lowest need not pass.
    assert fpr_at_tpr([0.0, *[1.0] * 19], [0.5]) == 0


def test_what_is_no_score_is_refused() -> None:
    for bad in ([], [float("nan")], [[1.0]]):
        with pytest.raises(DataError, match="known must be a row"):
            auroc(bad, [1.0])
    with pytest.raises(DataError, match="is_correct has shape"):
        oscr([1.0], [True, False], [0.0])
    with pytest.raises(ConfigError, match="tpr must lie"):
        fpr_at_tpr([1.0], [0.0], 0)
