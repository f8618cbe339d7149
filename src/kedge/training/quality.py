"""How good a run became, in one or two lines: its held-out images against chance and against raw features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

__all__ = ["chance_level", "frozen_summary", "summary"]

_POOR = 0.25
"""A score is poor below this share of the way from chance to 1."""
_TARGETS = {"val/accuracy": "accuracy", "val/knn1": "first hit right"}


def chance_level(labels: np.ndarray, gallery_labels: np.ndarray) -> float:
    """The share of queries whose hit has the right label where hits are drawn at random."""
    counts = np.bincount(gallery_labels, minlength=int(labels.max()) + 1)
    return float(counts[labels].mean() / len(gallery_labels))


def summary(history: Sequence[Mapping[str, str]], queries: int, chance: float) -> str:
    """For an encoder that was trained: the metrics of the epoch that is kept."""
    rows = [row for row in history if row.get("val/mAP")]
    if not rows:
        return ""
    best = max(rows, key=lambda row: (float(row["val/mAP"]), int(row["epoch"])))
    target = next(name for name in _TARGETS if name in best)
    score, precision = float(best[target]), float(best["val/mAP"])
    text = f"On {queries:,} held-out images: {_TARGETS[target]} {_short(score)} (chance {_short(chance)}), "
    text += f"mAP {_short(precision)}."
    if _is_poor(score, chance):
        text += (
            "\nThis is poor. Train longer (recipe.epochs=…), start from a pretrained encoder "
            "(encoder.weights=default recipe=head), or add images to each class."
        )
    return text


def frozen_summary(queries: int, chance: float, embeddings: Mapping[str, float], features: Mapping[str, float]) -> str:
    """For a head on a frozen encoder: mAP and 1-NN of its embeddings and of the encoder's own features."""
    hit, precision = (f"{_short(embeddings[name])} (raw features {_short(features[name])}" for name in ("1-NN", "mAP"))
    text = f"On {queries:,} held-out images: first hit right {hit}, chance {_short(chance)}), mAP {precision})."
    if embeddings["mAP"] < features["mAP"]:
        text += (
            "\nTraining did not help. Search by the raw features (kedge search --rank looks), check the labels "
            "(kedge audit), or add images to each class."
        )
    elif _is_poor(embeddings["1-NN"], chance):
        text += (
            "\nThis is poor. Check the labels (kedge audit), add images to each class, or use another encoder "
            "(encoder=timm encoder.name=timm:MODEL)."
        )
    return text


def _is_poor(score: float, chance: float) -> bool:
    return score - chance < _POOR * (1 - chance)


def _short(score: float) -> str:
    return f"{score:.3f}".removeprefix("0")
