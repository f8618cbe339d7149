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
    order = torch.argsort(labels, stable=True)
    ordered = gallery[order].contiguous()
    ends = torch.cumsum(torch.bincount(labels, minlength=len(dataset.classes)), 0).tolist()
    starts = [0, *ends[:-1]]
    anchors = model.anchors.float().to(gallery.device)
    norms, anchor_norms = ordered.square().sum(1), anchors.square().sum(1)
    k = min(_K, len(gallery))

    def brute_force(query: Tensor) -> Tensor:
        return order[_nearest(query, ordered, norms, k)]

    def two_stage(query: Tensor) -> Tensor:
        anchor = int(_nearest(query, anchors, anchor_norms, 1))
        first, last = starts[anchor], ends[anchor]
        return order[first + _nearest(query, ordered[first:last], norms[first:last], min(k, last - first))]

    count = min(_TIMED_QUERIES, len(dataset.test))
    rows = np.arange(count) * len(dataset.test) // count
    times: dict[str, list[float]] = {"encoder": [], "brute_force": [], "two_stage": []}
    for turn, row in enumerate([*rows[:5], *rows]):  # the first few warm up
        query, encoder = _timed(lambda pixels: model.embed_pixels(pixels)[0].float(), dataset.test.take([int(row)]))
        spent = (encoder, _timed(brute_force, query)[1], _timed(two_stage, query)[1])
        if turn >= 5:
            for name, seconds in zip(times, spent, strict=True):
                times[name].append(seconds)
    median = {name: 1000 * statistics.median(values) for name, values in times.items()}
    return {
        "encoder_ms": median["encoder"],
        **{f"{name}_search_ms": median[name] for name in ("brute_force", "two_stage")},
        **{f"{name}_ms": median["encoder"] + median[name] for name in ("brute_force", "two_stage")},
        "device": str(gallery.device.type),
    }


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


def _nearest(query: Tensor, vectors: Tensor, norms: Tensor, k: int) -> Tensor:
    """The rows of the nearest vectors, nearest first; `norms` are the squares of their lengths."""
    return (norms - 2 * (vectors @ query)).topk(k, largest=False).indices


def _timed(function: Callable[[Tensor], Tensor], argument: Tensor) -> tuple[Tensor, float]:
    """The result, and the seconds until it is there."""
    started = time.perf_counter()
    result = function(argument)
    if result.device.type == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - started


def _rounded(values: np.ndarray) -> list[list[float]]:
    return [[round(float(value), 3) for value in row] for row in values]
