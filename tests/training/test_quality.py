"""What a run says of itself when it ends."""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from kedge.training.loggers import TrainingProgress
from kedge.training.quality import chance_level, frozen_summary, summary


def test_chance_is_what_random_hits_reach() -> None:
    queries, gallery = np.array([0, 0, 1, 2]), np.array([0, 0, 0, 0, 0, 0, 1, 1])
    drawn = np.random.default_rng(0).choice(gallery, (100_000, 4))
    assert chance_level(queries, gallery) == pytest.approx((drawn == queries).mean(), abs=0.01)


def rows(*scores: tuple[float, float]) -> list[dict[str, str]]:
    return [
        {"epoch": str(epoch), "val/accuracy": str(accuracy), "val/mAP": str(precision)}
        for epoch, (accuracy, precision) in enumerate(scores, 1)
    ]


def test_a_trained_encoder_is_compared_with_chance() -> None:
    history = [*rows((0.5, 0.3), (0.9, 0.8), (0.95, 0.7)), {"epoch": "4", "val/mAP": ""}]
    assert summary(history, 1200, 0.1) == "On 1,200 held-out images: accuracy .900 (chance .100), mAP .800."
    lines = summary(rows((0.2, 0.15)), 40, 0.1).splitlines()
    assert lines[0] == "On 40 held-out images: accuracy .200 (chance .100), mAP .150."
    assert lines[1].startswith("This is poor. Train longer (recipe.epochs=…)")
    pairs = [{"epoch": "1", "val/knn1": "1.0", "val/mAP": "0.8"}]
    assert summary(pairs, 40, 0.1) == "On 40 held-out images: first hit right 1.000 (chance .100), mAP .800."
    assert summary([{"epoch": "1"}], 40, 0.1) == ""


def test_a_frozen_encoder_is_compared_with_its_features() -> None:
    good, worse, poor = ({"1-NN": hit, "mAP": precision} for hit, precision in ((0.9, 0.8), (0.8, 0.6), (0.2, 0.2)))
    assert frozen_summary(40, 0.1, good, worse) == (
        "On 40 held-out images: first hit right .900 (raw features .800, chance .100), mAP .800 (raw features .600)."
    )
    assert "Training did not help. Search by the raw features" in frozen_summary(40, 0.1, worse, good)
    assert "This is poor. Check the labels" in frozen_summary(40, 0.1, poor, poor)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_has_one_bar_and_anything_else_a_line_per_epoch(terminal: bool) -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=80, _environ={}, soft_wrap=True)
    progress = TrainingProgress(console, epochs=2, total_steps=4)
    losses = {"loss": 0.123, "attractor": 0.1, "repeller": 0.02}
    progress.start(0)
    for epoch in range(2):
        progress.on_epoch_end(epoch, 2 * epoch + 2, losses, {"val/accuracy": 0.5 + epoch / 4, "val/mAP": 0.25})
    progress.stop()
    if terminal:
        shown = next(line for line in reversed(text.getvalue().splitlines()) if "epoch" in line)
        for words in ("epoch 2/2", "accuracy 0.750", "mAP 0.250", "loss 0.123", "0:00:00", "left"):
            assert words in shown
        assert "attractor" not in text.getvalue()
    else:
        assert text.getvalue().splitlines() == [
            "epoch 1/2  loss 0.123  attractor 0.1  repeller 0.02  val/accuracy 0.500  val/mAP 0.250",
            "epoch 2/2  loss 0.123  attractor 0.1  repeller 0.02  val/accuracy 0.750  val/mAP 0.250",
        ]
