"""The models that the figures show, trained on part of the bundled sample; a finished one is not trained again."""

from __future__ import annotations

from pathlib import Path

from kedge import Model, train
from kedge.datasets import Dataset, sample, train_val_split

COMMON = ["experiment=demo", "split.shots=120", "recipe.epochs=15", "recipe.batch_size=64"]
PAPER = ["loss.discriminate=0", "loss.normalize=false"]
RUNS = {
    "plane": ["encoder.dim=2", *PAPER],
    "plane-cross-entropy": ["encoder.dim=2", "loss=cross_entropy", "recipe.optimizer.lr=0.02"],
    "bounded": PAPER,
    "linear": ["encoder.head=linear", *PAPER],
}


def model(name: str, folder: Path) -> Model:
    """The model of a run."""
    place = folder / name
    if not (place / "model").exists():
        train(overrides=[*COMMON, *RUNS[name]], folder=place)
    return Model.load(place, "cpu")


def pictures() -> Dataset:
    """What the runs were trained on, and the test pictures."""
    whole = sample()
    shown, _ = train_val_split(whole.train, 0.1, 120)
    return Dataset(whole.name, whole.classes, shown, whole.test)
