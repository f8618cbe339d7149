"""What can be measured of a trained run, by name."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kedge.config.compose import dataset_of, held_out_of
from kedge.datasets import Dataset
from kedge.evaluation import METHODS, Report, evaluate, evaluate_unseen, top_hits
from kedge.model import Model, embed_split
from kedge.reproduce.jobs import DataFiles, build_named
from kedge.training import kept_epochs

__all__ = ["MEASURES", "UNKNOWN"]

UNKNOWN = "svhn"
"""The dataset whose images are unknown to a model that was trained on all classes of its own."""

_HITS, _QUERIES = 6, 2
"""Hits of a query and queries of a dataset, as many as the paper shows."""
_POINTS = 4000
"""Points of a scatter plot: enough for a figure, few enough for a line."""
_TIMED_QUERIES, _WARM_UP = 200, 5
"""Queries that are timed, one by one, and those before them that are not counted."""
_K = 100
"""Hits of a timed search."""


def scores(model: Model, dataset: Dataset, folder: Path, data_files: DataFiles) -> dict[str, Any]:  # noqa: ARG001
    """Every metric of the evaluation protocol."""
    report = evaluate(model, dataset)
    report.save(folder / "metrics.json")
    return _metrics(report) | {"queries": report.queries, "left_out": report.left_out}


def curve(model: Model, dataset: Dataset, folder: Path, data_files: DataFiles) -> dict[str, Any]:  # noqa: ARG001
    """The metrics of the evaluation protocol for every kept epoch."""
    # The run was trained by this process, or its configuration was compared with the job's.
    return {str(epoch): _metrics(evaluate(kept, dataset)) for epoch, kept in kept_epochs(folder, trust=True)}


def speed(model: Model, dataset: Dataset, folder: Path, data_files: DataFiles) -> dict[str, Any]:  # noqa: ARG001
    """Milliseconds per query, median over single queries: the encoder, and either search for the nearest 100.

    Two-stage search finds the nearest anchor, then searches only the images with that anchor's label. All on the CPU,
    where a search costs more than its start: on a GPU, kernel launches hide what is searched.
    """
    if model.anchors is None:
        return {}
    anchors = _searcher(model.anchors.float().cpu())
    gallery = embed_split(model.embed_pixels, dataset.train, batch_size=256, title="gallery").float().cpu()
    model = model.to("cpu")
    labels = torch.as_tensor(np.asarray(dataset.train.labels))
    whole = _searcher(gallery)
    lists = [_searcher(gallery[labels == label]) for label in range(len(dataset.classes))]
    steps: dict[str, Callable[[Tensor], Tensor]] = {
        "encoder": lambda pixels: model.embed_pixels(pixels)[0].float(),
        "brute_force": lambda query: whole(query, _K),
        "two_stage": lambda query: lists[int(anchors(query, 1))](query, _K),
    }
    rows = _spread(_TIMED_QUERIES, len(dataset.test))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for row in [*rows[:_WARM_UP], *rows]:
        argument = dataset.test.take([int(row)])
        for name, step in steps.items():
            started = time.perf_counter()
            result = step(argument)
            times[name].append(time.perf_counter() - started)
            if name == "encoder":
                argument = result
    median = {name: 1000 * statistics.median(seconds[_WARM_UP:]) for name, seconds in times.items()}
    encoder = median.pop("encoder")
    return {
        "encoder_ms": encoder,
        **{f"{name}_search_ms": search for name, search in median.items()},
        **{f"{name}_ms": encoder + search for name, search in median.items()},
        "device": "cpu",
    }


def _searcher(vectors: Tensor) -> Callable[[Tensor, int], Tensor]:
    """A search for the nearest of these vectors, whose norms are computed once."""
    norms = vectors.square().sum(1)
    return lambda query, k: (norms - 2 * (vectors @ query)).topk(min(k, len(vectors)), largest=False).indices


def points(model: Model, dataset: Dataset, folder: Path, data_files: DataFiles) -> dict[str, Any]:  # noqa: ARG001
    """Two-dimensional embeddings of an even sample of training and test images, and the anchors."""
    values: dict[str, Any] = {"classes": list(dataset.classes), "anchors": None}
    if model.anchors is not None:
        values["anchors"] = _rounded(model.anchors)
    for name, split in (("train", dataset.train), ("test", dataset.test)):
        sample = split.subset(_spread(_POINTS, len(split)))
        embeddings = embed_split(model.embed_pixels, sample, batch_size=256, title=name)
        values[name] = {"points": _rounded(embeddings), "labels": [int(label) for label in sample.labels]}
    return values


def hits(model: Model, dataset: Dataset, folder: Path, data_files: DataFiles) -> dict[str, Any]:  # noqa: ARG001
    """The first hits of a few queries, which are the same for every run."""
    rng = np.random.default_rng(0)
    queries = np.sort(rng.choice(len(dataset.test), min(_QUERIES, len(dataset.test)), replace=False))
    rows = top_hits(model, dataset, queries, k=min(_HITS, len(dataset.train)))
    return {"queries": queries.tolist(), "hits": rows.tolist()}


def unseen(model: Model, dataset: Dataset, folder: Path, data_files: DataFiles) -> dict[str, Any]:  # noqa: ARG001
    """Search for classes that were kept out of training, by the dataset or by `split.unseen`."""
    return evaluate_unseen(model, dataset_of(folder, trust=True))


def open_set(model: Model, dataset: Dataset, folder: Path, data_files: DataFiles) -> dict[str, Any]:  # noqa: ARG001
    """Open-set detection by familiarity: unknown are the classes kept out of training or, without any, `UNKNOWN`.

    Known are the test images or, where the dataset has none of its trained classes, those held out of training.
    """
    known = dataset_of(folder, trust=True)
    if len(known.test) == 0:
        known = held_out_of(folder, trust=True)
    unknown = None if known.unseen else replace(build_named(UNKNOWN, data_files), name=UNKNOWN)
    report = evaluate(model, known, unknown=unknown)
    [(name, detection)] = report.open_set.items()
    return {"unknown": name, **detection, "accuracy": report.accuracy, "queries": report.queries}


MEASURES: dict[str, Callable[[Model, Dataset, Path, DataFiles], dict[str, Any]]] = {
    measure.__name__: measure for measure in (scores, curve, speed, points, hits, unseen, open_set)
}


def _spread(count: int, length: int) -> np.ndarray:
    """Rows that are spread evenly."""
    count = min(count, length)
    return np.arange(count) * length // count


def _metrics(report: Report) -> dict[str, Any]:
    content = report.to_json()
    return {name: content[name] for name in (*METHODS, "accuracy", "knn1")}


def _rounded(vectors: Tensor) -> list[list[float]]:
    rounded: list[list[float]] = vectors.double().cpu().numpy().round(3).tolist()
    return rounded
