"""The protocol: test images are queries, the whole training set is the gallery, five search methods."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from kedge.datasets import Dataset, ImageSplit, as_dataset, is_external
from kedge.datasets.digests import file_digests
from kedge.distributed import all_gather_rows, broadcast_object, shard_range, world_size
from kedge.errors import ConfigError, DataError
from kedge.evaluation.classes import ClassScores, score_classes
from kedge.evaluation.queries import FolderQueries, spread
from kedge.evaluation.report import METRICS, Report
from kedge.gallery.distances import k_means, nearest_centre
from kedge.metrics import (
    Ranking,
    accuracy,
    auroc,
    fpr_at_tpr,
    normalized_mutual_information,
    oscr,
    rank_relevant,
)
from kedge.metrics.distances import DEFAULT_MEMORY
from kedge.metrics.inputs import Array
from kedge.metrics.ranking import Lists, rank_in_lists
from kedge.model import Model
from kedge.model.calibration import familiarity_with
from kedge.model.features import split_embeddings, split_features
from kedge.model.io import kedge_version

if TYPE_CHECKING:
    from kedge.evaluation.gallery import GalleryReport
    from kedge.gallery import Gallery

_BATCH = {"cpu": 256, "cuda": 2048}
"""Images embedded at a time."""
RECALLS = (1, 2, 4, 8)
"""The k of R@k, as the field reports them."""
_ROUNDS = 20
"""Of k-means."""
ROUTE_CHUNK = 16_384
"""Class scores are made for so many embeddings at a time: they need embeddings × classes numbers."""


def route(model: Model, embeddings: Tensor) -> Tensor:
    """The class whose list each embedding is sent to: the one with the highest score."""
    if len(embeddings) == 0:
        return torch.empty(0, dtype=torch.int64, device=embeddings.device)
    chunks = torch.split(embeddings, ROUTE_CHUNK)
    return torch.cat([model.scores(chunk).argmax(dim=1) for chunk in chunks])


def evaluate_embeddings(
    queries: Array,
    query_labels: Array,
    gallery: Array,
    gallery_labels: Array,
    *,
    query_routes: Array,
    gallery_routes: Array,
    classes: Sequence[str] | None = None,
    meta: Mapping[str, Any] | None = None,
    memory: int = DEFAULT_MEMORY,
) -> Report:
    """Score embeddings under brute force, by Euclidean distance and by cosine, and under lists.

    A route is the class a model sends an embedding to (the nearest anchor, the classifier's choice, the
    nearest class mean). Queries look into the list of their route; items sit in the list of their label
    (label lists) or of their own route (anchor lists). ``classes`` are the names of labels and routes 0, 1, …, for the
    scores of each class; by default these are named by their numbers. Under torch.distributed, where all ranks have the
    same embeddings, each rank ranks a shard of the queries.
    """
    sharded = len(queries) >= world_size() > 1
    shard = shard_range(len(queries)) if sharded else range(len(queries))
    own = slice(shard.start, shard.stop)

    def search(vectors: tuple[Array, Array], several: Sequence[Lists | None]) -> list[Ranking]:
        rankings = rank_in_lists(
            *(vectors[0][own], query_labels[own], vectors[1], gallery_labels), several, ks=(1, 20, 100), memory=memory
        )
        return [_all_gather(ranking) for ranking in rankings] if sharded else rankings

    def scores(ranking: Ranking) -> dict[str, float]:
        means = ranking.mean()
        return {metric: means[metric] for metric in METRICS}

    by_label = Lists(query_routes[own], gallery_labels)
    several = [None, by_label, by_label._replace(rest="last"), Lists(query_routes[own], gallery_routes)]
    brute_force, label_lists, rest_last, anchor_lists = search((queries, gallery), several)
    units = normalize(torch.as_tensor(queries), dim=1), normalize(torch.as_tensor(gallery), dim=1)
    # Euclidean distances of embeddings of length 1 rank as their cosines do.
    pairs = zip(units, (queries, gallery), strict=True)
    are_units = all(torch.allclose(unit, torch.as_tensor(given), atol=1e-6) for unit, given in pairs)
    [cosine] = [brute_force] if are_units else search(units, [None])
    return Report(
        brute_force=scores(brute_force),
        brute_force_cosine=scores(cosine),
        label_lists=scores(label_lists),
        label_lists_rest_last=scores(rest_last),
        anchor_lists=scores(anchor_lists),
        accuracy=accuracy(query_routes, query_labels),
        # The first hit is right or wrong; a query of a class that the gallery lacks counts as wrong.
        knn1=float(brute_force.precision[1].mean()),
        queries=len(brute_force.relevant),
        left_out=brute_force.left_out,
        meta=dict(meta or {}),
        classes=_score_classes(query_labels, query_routes, gallery_labels, brute_force, classes),
    )


def _score_classes(
    labels: Array, routes: Array, items: Array, ranking: Ranking, names: Sequence[str] | None
) -> ClassScores:
    """The scores of each class: its queries are given the class of their route, and ranked by brute force."""
    numbers = [torch.as_tensor(values).cpu().numpy() for values in (labels, routes, items)]
    if names is None:
        values, inverse = np.unique(np.concatenate(numbers), return_inverse=True)
        names = list(map(str, values))
        numbers = np.split(inverse, np.cumsum([len(part) for part in numbers])[:-1])
    scores = {"mAP": ranking.average_precision, "P@20": ranking.precision[20]}
    per_query = {name: values.cpu().numpy() for name, values in scores.items()}
    return score_classes(names, numbers[0], numbers[1], numbers[2], per_query, ranking.relevant.cpu().numpy())


@overload
def evaluate(
    model: Model,
    dataset: Any,
    *,
    against: str | Path | None = None,
    batch_size: int | None = None,
    limit: int | None = None,
    unknown: Dataset | None = None,
) -> Report: ...


@overload
def evaluate(
    model: Gallery, dataset: None = None, *, against: str | Path | None = None, limit: int | None = None
) -> GalleryReport: ...


def evaluate(
    model: Model | Gallery,
    dataset: Any = None,
    *,
    against: str | Path | None = None,
    batch_size: int | None = None,
    limit: int | None = None,
    unknown: Dataset | None = None,
) -> Report | GalleryReport:
    """Embed the training set as gallery and the test set as queries, and score the model on its device.

    ``dataset`` is one of ``kedge.datasets``, a map-style dataset of PyTorch, or a Hugging Face ``Dataset`` or
    ``DatasetDict``; of one without a test split, the share that training leaves out by default. With ``against``, a
    folder of class folders, its images are the queries instead of the test set.
    ``batch_size`` depends on the device if None. ``limit`` takes that many queries, spread evenly over the test set;
    the gallery stays whole. In a process group of torch.distributed all ranks must call this: each embeds and ranks a
    shard, and all return the same report. The test images of another dataset, ``unknown``, and those of classes that
    were kept out of training measure open-set detection, unknown against known images (``Report.open_set``).

    A ``Gallery`` in the place of the model is evaluated without a dataset, by ``evaluate_gallery``.
    """
    if not isinstance(model, Model) and dataset is None:
        from kedge.evaluation.gallery import evaluate_gallery
        from kedge.gallery import Gallery

        if isinstance(model, Gallery):
            return evaluate_gallery(model, against, limit=limit)
    if isinstance(model, Model) and is_external(dataset):
        dataset = as_dataset(dataset, most=model.preprocessing.size or 224, classes=model.classes)
    if not isinstance(model, Model) or not isinstance(dataset, Dataset):
        raise ConfigError(
            "evaluate takes a Model (Model.load) and a Dataset (kedge.datasets), or a Gallery alone; found "
            f"{type(model).__name__} and {type(dataset).__name__}."
        )
    if model.classes != dataset.classes:
        raise DataError(
            f"The model has {len(model.classes)} classes and {dataset.name} has {len(dataset.classes)}, which are not "
            "the same in the same order; evaluate on the classes it was trained on."
        )
    if against is None and len(dataset.test) == 0:
        raise DataError(f"{dataset.name} has no test images to use as queries; use the held-out ones (--held-out).")
    if batch_size is None:
        batch_size = _BATCH.get(model.device.type, _BATCH["cpu"])
    started = time.perf_counter()
    about: dict[str, Any] = {"test": len(dataset.test)}
    if against is None:
        rows = spread(len(dataset.test), limit)
        test = dataset.test if len(rows) == len(dataset.test) else dataset.test.subset(rows)
        labels = test.labels
        queries, query_routes = _embed(model, test, batch_size, "queries")
    else:
        read = FolderQueries.read(model, against, set(model.classes), limit=limit)
        numbers = {name: number for number, name in enumerate(model.classes)}
        labels = np.array([numbers[label] for label in read.labels])
        queries, query_routes = read.embeddings, route(model, read.embeddings)
        trained = set() if dataset.train.files is None else set(file_digests(dataset.train.files))
        about = {
            "test": len(labels),
            "against": str(against),
            "skipped": read.skipped,
            "in_gallery": sum(digest in trained for digest in read.digests),
        }
    gallery, gallery_routes = _embed(model, dataset.train, batch_size, "gallery")
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    embedded = time.perf_counter()
    report = evaluate_embeddings(
        queries,
        labels,
        gallery,
        dataset.train.labels,
        query_routes=query_routes,
        gallery_routes=gallery_routes,
        classes=dataset.classes,
        meta={
            "model": model.encoder_name,
            "model_fingerprint": model.fingerprint,
            "loss": model.loss,
            "dim": model.dim,
            "dataset": dataset.name,
            "dataset_fingerprint": dataset.fingerprint(),
            "classes": len(dataset.classes),
            "gallery": len(dataset.train),
            **about,
            "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type,
            "versions": {"kedge": kedge_version(), "torch": torch.__version__},
        },
    )
    if dataset.unseen and against is None:
        report = replace(report, unseen=evaluate_unseen(model, dataset, batch_size))
    strangers = {"unseen classes": dataset.unseen} if dataset.unseen else {}
    strangers |= {unknown.name: (unknown.test,)} if unknown is not None else {}
    if strangers and against is None and model.anchors is not None:
        report = replace(report, open_set=_score_open_set(model, dataset, test, strangers, batch_size))
    ended = time.perf_counter()
    seconds = {"embedding": round(embedded - started, 2), "ranking": round(ended - embedded, 2)}
    return replace(report, meta={**report.meta, "seconds": broadcast_object(seconds)})


def _embed(model: Model, images: ImageSplit, batch_size: int, title: str) -> tuple[Tensor, Tensor]:
    """Embeddings and routes of all images, of which each rank embeds a shard: whole batches, where it can."""
    sharded = len(images) >= world_size() > 1
    if sharded:
        shard = shard_range(len(images), whole=batch_size)
        images = images.subset(np.arange(shard.start, shard.stop))
    embeddings = split_embeddings(model, images, batch_size=batch_size, title=title)
    routes = route(model, embeddings)
    return (all_gather_rows(embeddings), all_gather_rows(routes)) if sharded else (embeddings, routes)


def evaluate_unseen(model: Model, dataset: Dataset, batch_size: int | None = None) -> dict[str, Any]:
    """Images of classes that were kept out of training, each searched among the others, or in a gallery of their own
    where the dataset has one: ``Report.unseen``. NMI is that of the images that are searched.
    """
    if not dataset.unseen:
        raise DataError(f"All classes of {dataset.name} were trained on; keep some out with split.unseen=0.5.")
    size = batch_size or _BATCH.get(model.device.type, _BATCH["cpu"])

    def vectors_of(splits: Sequence[ImageSplit]) -> tuple[dict[str, Tensor], np.ndarray]:
        features = torch.cat([split_features(model, split, batch_size=size, title="unseen") for split in splits])
        embeddings = torch.cat([model.embed_features(part).float() for part in torch.split(features, ROUTE_CHUNK)])
        labels = np.concatenate([split.labels for split in splits])
        return {"embedding": embeddings, "features": normalize(features, dim=1)}, labels

    queries, labels = vectors_of(dataset.unseen)
    others = dataset.unseen_gallery
    gallery, gallery_labels = (queries, labels) if others is None else vectors_of([others])
    own = range(len(labels)) if others is None else None
    scores: dict[str, Any] = {"classes": len(np.unique(labels)), "queries": len(labels)}
    for name, items in gallery.items():
        ranking = rank_relevant(queries[name], labels, items, gallery_labels, ks=RECALLS, self_index=own)
        scores[name] = {**ranking.retrieval(), "NMI": _nmi(items, gallery_labels)}
    return scores


def _score_open_set(
    model: Model, dataset: Dataset, test: ImageSplit, strangers: Mapping[str, Sequence[ImageSplit]], batch_size: int
) -> dict[str, Any]:
    """How well familiarity, by which searches say *unknown*, tells the test images from those of other classes."""

    def features_of(split: ImageSplit, title: str) -> Tensor:
        return split_features(model, split, batch_size=batch_size, title=title).to(model.device)

    gallery = features_of(dataset.train, "gallery")
    labels = torch.from_numpy(dataset.train.labels).to(model.device)

    def familiarity(features: Tensor) -> tuple[np.ndarray, Tensor]:
        embeddings = torch.cat([model.embed_features(part).float() for part in torch.split(features, ROUTE_CHUNK)])
        assert model.anchors is not None
        return familiarity_with(gallery, labels, features, embeddings, model.anchors), route(model, embeddings)

    known, routes = familiarity(features_of(test, "queries"))
    is_correct = routes.cpu().numpy() == test.labels
    scores = {}
    for name, splits in strangers.items():
        unknown, _ = familiarity(torch.cat([features_of(split, name) for split in splits]))
        scores[name] = {
            "images": len(unknown),
            "AUROC": auroc(known, unknown),
            "FPR@95": fpr_at_tpr(known, unknown),
            "OSCR": oscr(known, is_correct, unknown),
        }
    return scores


def _nmi(vectors: Tensor, labels: np.ndarray) -> float:
    """NMI of the labels and as many k-means clusters as there are classes."""
    rows = vectors.cpu().numpy()
    centres = k_means(rows, len(np.unique(labels)), rounds=_ROUNDS)
    return normalized_mutual_information(labels, nearest_centre(rows, centres))


def _all_gather(ranking: Ranking) -> Ranking:
    """The scores of all ranks' queries."""
    precision = {k: all_gather_rows(values) for k, values in ranking.precision.items()}
    scores = (ranking.average_precision, ranking.relevant, ranking.average_precision_at_r, ranking.precision_at_r)
    average, *others = map(all_gather_rows, scores)
    return Ranking(average, precision, *others)
