"""What can be measured of a trained run, by name."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kedge.datasets import Dataset
from kedge.evaluation import METHODS, Report, evaluate, top_hits
from kedge.model import Model, embed_split
from kedge.training import kept_epochs

__all__ = ["HITS", "MEASURES", "POINTS"]

HITS = 6
"""Hits of a query, as many as the paper shows."""
_QUERIES = 2
"""Queries of a dataset, as many as the paper shows."""
POINTS = 4000
"""Points of a scatter plot: enough for a figure, few enough for a line."""
_TIMED_QUERIES = 200
"""Queries that are timed, one by one."""
_K = 100
"""Hits of a timed search."""
_WARM_UP = 5
"""Queries that are not counted."""


def scores(model: Model, dataset: Dataset, folder: Path) -> dict[str, Any]:
    """Every metric of the evaluation protocol."""
    report = evaluate(model, dataset)
    report.save(folder / "metrics.json")
    return _metrics(report) | {"queries": report.queries, "left_out": report.left_out}


def curve(model: Model, dataset: Dataset, folder: Path) -> dict[str, Any]:
    """The metrics of the evaluation protocol for every kept epoch."""
    del model
    # The run was trained by this process, or its configuration was compared with the job's.
    return {str(epoch): _metrics(evaluate(kept, dataset)) for epoch, kept in kept_epochs(folder, trust=True)}


def speed(model: Model, dataset: Dataset, folder: Path) -> dict[str, Any]:
    """Milliseconds per query, median over single queries: the encoder, and either search for the nearest 100.

    Two-stage search finds the nearest anchor, then searches only the images with that anchor's label. Embeddings and
    searches are on the model's device, as the encoder is.
    """
    del folder
    if model.anchors is None:
        return {}
    gallery = embed_split(model.embed_pixels, dataset.train, batch_size=256, title="gallery").float()
    labels = torch.as_tensor(np.asarray(dataset.train.labels), device=gallery.device)
    everything = _Searched(torch.arange(len(gallery), device=gallery.device), gallery)
    members = [(labels == label).nonzero().squeeze(1) for label in range(len(dataset.classes))]
    lists = [_Searched(rows, gallery[rows]) for rows in members]
    anchors = _Searched(torch.arange(len(lists), device=gallery.device), model.anchors.float().to(gallery.device))
    steps: dict[str, Callable[[Tensor], Tensor]] = {
        "encoder": lambda pixels: model.embed_pixels(pixels)[0].float(),
        "brute_force": lambda query: everything.nearest(query, _K),
        "two_stage": lambda query: lists[int(anchors.nearest(query, 1))].nearest(query, _K),
    }
    count = min(_TIMED_QUERIES, len(dataset.test))
    rows = np.arange(count) * len(dataset.test) // count
    times: dict[str, list[float]] = {name: [] for name in steps}
    for row in [*rows[:_WARM_UP], *rows]:
        argument = dataset.test.take([int(row)])
        for name, step in steps.items():
            started = time.perf_counter()
            result = step(argument)
            if gallery.device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - started)
            if name == "encoder":
                argument = result
    median = {name: 1000 * statistics.median(seconds[_WARM_UP:]) for name, seconds in times.items()}
    return {
        "encoder_ms": median["encoder"],
        **{f"{name}_search_ms": median[name] for name in ("brute_force", "two_stage")},
        **{f"{name}_ms": median["encoder"] + median[name] for name in ("brute_force", "two_stage")},
        "device": str(gallery.device.type),
    }


class _Searched:
    """Vectors to search, and their rows in the gallery."""

    def __init__(self, rows: Tensor, vectors: Tensor) -> None:
        self.rows, self.vectors, self.norms = rows, vectors, vectors.square().sum(1)

    def nearest(self, query: Tensor, k: int) -> Tensor:
        """The rows of the nearest vectors, nearest first."""
        distances = self.norms - 2 * (self.vectors @ query)
        return self.rows[distances.topk(min(k, len(distances)), largest=False).indices]


def points(model: Model, dataset: Dataset, folder: Path) -> dict[str, Any]:
    """Two-dimensional embeddings of an even sample of training and test images, and the anchors."""
    del folder
    values: dict[str, Any] = {"classes": list(dataset.classes), "anchors": None}
    if model.anchors is not None:
        values["anchors"] = _rounded(model.anchors.float().cpu().numpy())
    for name, split in (("train", dataset.train), ("test", dataset.test)):
        count = min(POINTS, len(split))
        sample = split.subset(np.arange(count) * len(split) // count)
        embeddings = embed_split(model.embed_pixels, sample, batch_size=256, title=name).float().cpu().numpy()
        values[name] = {"points": _rounded(embeddings), "labels": [int(label) for label in sample.labels]}
    return values


def hits(model: Model, dataset: Dataset, folder: Path) -> dict[str, Any]:
    """The first hits of a few queries, which are the same for every run."""
    del folder
    rng = np.random.default_rng(0)
    queries = np.sort(rng.choice(len(dataset.test), min(_QUERIES, len(dataset.test)), replace=False))
    rows = top_hits(model, dataset, queries, k=min(HITS, len(dataset.train)))
    return {"queries": queries.tolist(), "hits": rows.tolist()}


MEASURES: dict[str, Callable[[Model, Dataset, Path], dict[str, Any]]] = {
    "scores": scores,
    "curve": curve,
    "speed": speed,
    "points": points,
    "hits": hits,
}


def _metrics(report: Report) -> dict[str, Any]:
    content = asdict(report)
    return {name: content[name] for name in (*METHODS, "accuracy", "knn1")}


def _rounded(values: np.ndarray) -> list[list[float]]:
    rounded: list[list[float]] = values.astype(float).round(3).tolist()
    return rounded
