"""What can be measured of a trained run, each by its name."""

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
"""Of a query, as many as the paper shows."""
_QUESTIONS = 2
"""Of a dataset, as many as the paper shows."""
POINTS = 4000
"""Of a cloud, so many are kept: enough for a picture, few enough for a line."""
_TIMED = 200
"""Queries that are timed, one by one."""
_DEPTH = 100
"""How many hits a timed search returns."""


def scores(model: Model, dataset: Dataset, folder: Path) -> dict[str, Any]:
    """Every column of the protocol."""
    report = evaluate(model, dataset)
    report.save(folder / "metrics.json")
    return _columns(report) | {"queries": report.queries, "left_out": report.left_out}


def curve(model: Model, dataset: Dataset, folder: Path) -> dict[str, Any]:
    """The columns of the protocol for every kept epoch."""
    del model
    # Whoever measures a run has trained it, or has seen that it is the one that was asked for.
    return {str(epoch): _columns(evaluate(kept, dataset)) for epoch, kept in kept_epochs(folder, trust=True)}


def speed(model: Model, dataset: Dataset, folder: Path) -> dict[str, Any]:
    """Milliseconds per query, median over single queries: the encoder, and either search for the nearest 100.

    Two-stage search finds the nearest anchor and then looks only at the pictures with that anchor's label. Vectors
    and searches are on the model's device, as the encoder is.
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
    depth = min(_DEPTH, len(gallery))

    def all_of(query: Tensor) -> Tensor:
        return order[_nearest(query, ordered, norms, depth)]

    def by_anchor(query: Tensor) -> Tensor:
        found = int(_nearest(query, anchors, anchor_norms, 1))
        first, last = starts[found], ends[found]
        return order[first + _nearest(query, ordered[first:last], norms[first:last], min(depth, last - first))]

    rows = np.arange(min(_TIMED, len(dataset.test))) * len(dataset.test) // min(_TIMED, len(dataset.test))
    times: dict[str, list[float]] = {"encoder": [], "brute_force": [], "two_stage": []}
    for turn, row in enumerate([*rows[:5], *rows]):  # the first few warm up
        pixels = dataset.test.take([int(row)])
        query, encoder = _clocked(lambda pixels: model.embed_pixels(pixels)[0].float(), pixels)
        spent = {
            "encoder": encoder,
            "brute_force": _clocked(all_of, query)[1],
            "two_stage": _clocked(by_anchor, query)[1],
        }
        if turn >= 5:
            for name, value in spent.items():
                times[name].append(value)
    middle = {name: 1000 * statistics.median(values) for name, values in times.items()}
    return {
        "encoder_ms": middle["encoder"],
        **{f"{name}_search_ms": middle[name] for name in ("brute_force", "two_stage")},
        **{f"{name}_ms": middle["encoder"] + middle[name] for name in ("brute_force", "two_stage")},
        "device": str(gallery.device.type),
    }


def points(model: Model, dataset: Dataset, folder: Path) -> dict[str, Any]:
    """Embeddings in two dimensions, evenly taken from training and test pictures, and the anchors."""
    del folder
    found: dict[str, Any] = {"classes": list(dataset.classes), "anchors": None}
    if model.anchors is not None:
        found["anchors"] = _rounded(model.anchors.float().cpu().numpy())
    for name, pictures in (("train", dataset.train), ("test", dataset.test)):
        count = min(POINTS, len(pictures))
        chosen = pictures.subset(np.arange(count) * len(pictures) // count)
        embedded = embed_split(model.embed_pixels, chosen, batch_size=256, title=name).float().cpu().numpy()
        found[name] = {"points": _rounded(embedded), "labels": [int(label) for label in chosen.labels]}
    return found


def hits(model: Model, dataset: Dataset, folder: Path) -> dict[str, Any]:
    """The first hits of some queries that are the same for every run."""
    del folder
    generator = np.random.default_rng(0)
    queries = np.sort(generator.choice(len(dataset.test), min(_QUESTIONS, len(dataset.test)), replace=False))
    found = top_hits(model, dataset, queries, k=min(HITS, len(dataset.train)))
    return {"queries": queries.tolist(), "hits": found.tolist()}


MEASURES: dict[str, Callable[[Model, Dataset, Path], dict[str, Any]]] = {
    "scores": scores,
    "curve": curve,
    "speed": speed,
    "points": points,
    "hits": hits,
}


def _columns(report: Report) -> dict[str, Any]:
    content = asdict(report)
    return {name: content[name] for name in (*METHODS, "accuracy", "knn1")}


def _nearest(query: Tensor, vectors: Tensor, norms: Tensor, count: int) -> Tensor:
    """The rows of the nearest vectors, nearest first; `norms` are the squares of their lengths."""
    distances = norms - 2 * (vectors @ query)
    return distances.topk(count, largest=False).indices


def _clocked(act: Callable[[Tensor], Tensor], given: Tensor) -> tuple[Tensor, float]:
    """What `act` makes of `given`, and the seconds until it is there."""
    started = time.perf_counter()
    found = act(given)
    if found.device.type == "cuda":
        torch.cuda.synchronize()
    return found, time.perf_counter() - started


def _rounded(values: np.ndarray) -> list[list[float]]:
    return [[round(float(value), 3) for value in row] for row in values]
