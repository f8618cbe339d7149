"""Batches for losses of pairs: several images of a class together, several views of an image; and what guards them."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from kedge import train
from kedge.config.compose import compose
from kedge.datasets import ImageSplit
from kedge.losses import ContrastiveLoss, CrossEntropyLoss
from kedge.training.config import Settings
from kedge.training.data import ClassGroups, TrainingData
from kedge.training.parallel import Layout
from kedge.training.step import EpochMeans, Step

LABELS = np.array([0] * 9 + [1] * 4 + [2] * 3 + [3] * 1)


def numbered() -> ImageSplit:
    """Images whose pixels say which they are."""
    images = np.broadcast_to(np.arange(len(LABELS), dtype=np.uint8)[:, None, None, None], (len(LABELS), 3, 2, 2))
    return ImageSplit(np.ascontiguousarray(images), LABELS)


def drawn(epoch: int = 0, batch_size: int = 8, layout: Layout | None = None, **options: int) -> list[list[int]]:
    data = TrainingData(
        numbered(),
        None,
        batch_size=batch_size,
        seed=5,
        classes=None,
        labels=LABELS,
        layout=layout or Layout(),
        **options,
    )
    batches = [inputs[:, 0, 0, 0].tolist() for inputs, _ in data.train_batches(epoch)]
    assert len(batches) == data.steps_per_epoch * (1 if layout is None else layout.accumulate)
    return batches


def test_images_of_a_class_come_together() -> None:
    groups = ClassGroups(LABELS, 4)
    rows = groups.draw(torch.Generator().manual_seed(0)).view(-1, 4)
    assert len(groups) == rows.numel() == 4 * (2 + 1 + 1 + 1)
    for group in rows.tolist():
        assert len({LABELS[row] for row in group}) == 1
    counts = np.bincount(rows.flatten(), minlength=len(LABELS))
    # Nine images make two groups and one is left; three or one fill theirs by coming again.
    assert sorted(counts[:9]) == [0] + [1] * 8
    assert counts[9:13].tolist() == [1] * 4
    assert sorted(counts[13:16]) == [1, 1, 2]
    assert counts[16] == 4


def test_the_order_is_that_of_seed_and_epoch() -> None:
    assert drawn(per_class=2) == drawn(per_class=2) != drawn(epoch=1, per_class=2)


def test_views_of_an_image_stand_side_by_side() -> None:
    batches = drawn(views=2)
    assert len(batches) == 2 * len(LABELS) // 8
    assert all(batch[0::2] == batch[1::2] for batch in batches)
    assert [batch[0::2] for batch in batches] == drawn(batch_size=4)


@pytest.mark.parametrize("options", [{"per_class": 2}, {"views": 2}, {"per_class": 2, "views": 2}])
def test_ranks_share_the_batches_of_one(options: dict[str, int]) -> None:
    shares = [drawn(layout=Layout(devices=2, accumulate=2, rank=rank), **options) for rank in (0, 1)]
    together = [
        list(itertools.chain(*(part for share in shares for part in share[step : step + 2])))
        for step in range(0, len(shares[0]), 2)
    ]
    assert together == drawn(**options)


def test_gradients_are_clipped(tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    step = torch.optim.SGD.step

    def look(self: torch.optim.SGD, *arguments: object) -> object:
        values = [value.grad for group in self.param_groups for value in group["params"] if value.grad is not None]
        seen.append(max(float(value.abs().max()) for value in values))
        return step(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.optim.SGD, "step", look)
    for clip in (0.0, 1e-3):
        seen.clear()
        train(overrides=[*tiny, "recipe.epochs=1", f"recipe.optimizer.clip={clip}"], folder=tmp_path / str(clip))
        assert max(seen) == (pytest.approx(clip) if clip else pytest.approx(max(seen), abs=0))
        assert (max(seen) > 2e-3) == (clip == 0)


def separation(points: torch.Tensor, labels: torch.Tensor, batches: int = 1) -> float | None:
    step = Step(torch.nn.Identity(), ContrastiveLoss(), Settings().recipe.mixing)
    means = EpochMeans("contrastive")
    for part, own in zip(points.chunk(batches), labels.chunk(batches), strict=True):
        means.add(step.compare((part, None), own))
    return means.separation(None)


def test_how_far_classes_are_apart() -> None:
    rng = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 6
    noise = torch.randn(60, 4, generator=rng)
    means = 3 * torch.randn(6, 4, generator=rng)
    points = noise + means[labels]
    same, other = [], []
    for first, second in itertools.combinations(range(60), 2):
        (same if labels[first] == labels[second] else other).append(
            float((points[first] - points[second]).square().sum())
        )
    assert separation(points, labels) == pytest.approx(1 - np.mean(same) / np.mean(other), abs=1e-5)
    assert separation(points, labels, batches=3) == pytest.approx(separation(points, labels), abs=0.1)
    # What the loss settles on when it tells nothing apart: all pairs at half the margin, or all in one point.
    assert separation(noise, labels) == pytest.approx(0, abs=0.1)
    assert separation(torch.ones(60, 4), labels) == 0
    assert separation(points, torch.arange(60)) is None, "no pair of one class"
    assert separation(points, torch.zeros(60, dtype=torch.int64)) is None


def test_losses_without_pairs_are_not_judged_by_them() -> None:
    step = Step(torch.nn.Identity(), CrossEntropyLoss(6, 4), Settings().recipe.mixing)
    means = EpochMeans("cross_entropy")
    means.add(step.compare((torch.ones(12, 4), None), torch.arange(12) % 6))
    assert means.separation(None) is None


def test_a_loss_of_pairs_on_its_plateau_is_noticed(tiny: list[str], tmp_path: Path) -> None:
    lazy = [*tiny, "loss=contrastive", "recipe.optimizer.lr=1e-9", "encoder.name=timm:test_resnet"]
    shuffled = np.load(next(word for word in tiny if word.startswith("dataset.path=")).partition("=")[2])
    arrays = {name: shuffled[name] for name in shuffled.files}
    arrays["y_train"] = np.random.default_rng(0).permutation(arrays["y_train"])
    path = tmp_path / "shuffled.npz"
    np.savez(path, **arrays)
    with pytest.warns(UserWarning, match=r"After 2 of 3 epochs images of one class are only .*recipe\.per_class=4"):
        train(overrides=[*lazy, f"dataset.path={path}"], folder=tmp_path / "run")


def test_what_the_rivals_files_say() -> None:
    def recipe(loss: str, name: str = "kedge") -> tuple[object, ...]:
        made = Settings.from_config(compose([f"loss={loss}", f"recipe={name}"])).recipe
        return made.per_class, made.views, made.optimizer.name, made.optimizer.clip

    assert recipe("cam") == recipe("cross_entropy") == (None, 1, "sgd", 0)
    assert recipe("contrastive", "paper") == (None, 1, "adam", 0), "the paper's form, as the paper trains it"
    assert recipe("contrastive_normalized") == recipe("triplet") == recipe("multi_similarity") == (4, 1, "adam", 0)
    assert recipe("supcon") == (None, 2, "sgd", 0)
    assert recipe("proxy_anchor") == recipe("proxy_anchor", "paper") == (None, 1, "adamw", 10)
