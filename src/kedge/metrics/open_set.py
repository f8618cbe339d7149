"""How well a score tells known queries from unknown ones: the higher, the more surely a query is known."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from kedge.errors import ConfigError, DataError
from kedge.metrics.inputs import Array

Scores = npt.NDArray[np.float64]


def auroc(known: Array, unknown: Array) -> float:
    """The probability that a known query scores higher than an unknown one; a tie counts as half.

    >>> auroc([0.9, 0.8, 0.3], [0.1, 0.3])
    0.9166666666666666
    """
    return float(_wins(*_checked(known, unknown)).mean())


def fpr_at_tpr(known: Array, unknown: Array, tpr: float = 0.95) -> float:
    """The share of unknown queries that pass the strictest threshold which a share `tpr` of the known ones pass.

    >>> fpr_at_tpr([0.9, 0.8, 0.3], [0.1, 0.3], tpr=0.6)
    0.0
    """
    if not 0 < tpr <= 1:
        raise ConfigError(f"tpr must lie above 0 and at most at 1, found {tpr}.")
    inside, outside = _checked(known, unknown)
    # Counted with a hair less, since .95 × 20 may come out as a little more than 19.
    threshold = np.sort(inside)[::-1][math.ceil(tpr * len(inside) - 1e-9) - 1]
    return float((outside >= threshold).mean())


def oscr(known: Array, is_correct: Array, unknown: Array) -> float:
    """The area under the open-set classification rate curve (Dhamija et al., 2018).

    Over all thresholds, the share of known queries that pass and are given the right class (`is_correct`), against the
    share of unknown queries that pass. It is at most the accuracy, and equals AUROC where every class is right.

    >>> oscr([0.9, 0.8, 0.3], [True, False, True], [0.1, 0.3])
    0.5833333333333334
    """
    inside, outside = _checked(known, unknown)
    correct = torch.as_tensor(is_correct).cpu().numpy().astype(bool)
    if correct.shape != inside.shape:
        raise DataError(f"is_correct has shape {correct.shape} but there are {len(inside)} known queries.")
    return float((_wins(inside, outside) * correct).mean())


def _wins(known: Scores, unknown: Scores) -> Scores:
    """For each known score, the share of unknown ones below it; equal ones count as half."""
    ordered = np.sort(unknown)
    below, up_to = (np.searchsorted(ordered, known, side=side) for side in ("left", "right"))
    return np.asarray((below + up_to) / (2 * len(ordered)))


def _checked(known: Array, unknown: Array) -> tuple[Scores, Scores]:
    parts = []
    for name, values in {"known": known, "unknown": unknown}.items():
        scores = torch.as_tensor(values).detach().cpu().double().numpy()
        if scores.ndim != 1 or len(scores) == 0 or np.isnan(scores).any():
            raise DataError(f"{name} must be a row of at least one number, without NaN; found shape {scores.shape}.")
        parts.append(scores)
    return parts[0], parts[1]
