"""`kedge.train`: the whole of training behind one call."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from kedge.config.compose import compose
from kedge.model import Model
from kedge.training.run import start_run
from kedge.training.source import overrides_for

__all__ = ["train"]


def train(source: Any = None, *, overrides: Sequence[str] = (), folder: str | Path | None = None) -> Model:
    """Train on pictures with labels, and return the model.

    Args:
        source: a folder of class folders, an .npz file, a map-style PyTorch dataset of (PIL image or uint8, label), a
            Hugging Face `Dataset` or `DatasetDict`, or a dictionary of such datasets with `train` and `test`; None
            where `overrides` name a dataset, such as `dataset=cifar100`.
        overrides: Hydra overrides of the configuration, such as `["recipe.epochs=20", "loss=cross_entropy"]`.
        folder: where the run is kept; by default a new folder below `runs/`.
    """
    config = compose(overrides if source is None else overrides_for(source, overrides))
    if folder is None:
        chosen = config.hydra.runtime.choices
        folder = Path("runs", f"{chosen.dataset}-{chosen.encoder}-{chosen.loss}", f"{datetime.now():%Y-%m-%d_%H-%M-%S}")
    return start_run(config, Path(folder))
