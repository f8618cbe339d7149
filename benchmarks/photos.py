"""Photos in class folders, the encoder frozen: Kedge beside what one would use instead.

    python benchmarks/photos.py flowers=FOLDER pets=FOLDER cub=FOLDER [--seeds 3] [--parts known unseen few]

A folder holds a folder of photos for each class. All ways use the features of one encoder, that of `kedge[pretrained]`,
computed once: the seconds of that pass are those of the line "features". A fifth of each class is asked for, the same
for all seeds, and the rest is trained on and searched. Seeds change what is trained, which classes are unseen and which
photos are the few shots.

known    all classes trained on. Raw features by cosine (numpy) and through FAISS (IndexFlatIP); the posteriors of
         scikit-learn's logistic regression by cosine (standardised features, C chosen on a fifth of the training
         photos); pytorch-metric-learning's ProxyAnchor on a linear layer of 512 (standardised features; rate, epochs
         and the rate of the proxies chosen by mAP on the same fifth, with the first seed); Kedge as one uses it:
         `kedge.train` on the folder, `kedge index`, a search with `rank="auto"`.
unseen   half of the classes are never trained on; the gallery holds all classes, or the unseen alone.
         AUROC: how well a score tells queries of known classes from others where the gallery holds the known alone.
few      1, 2, 5, 10 photos of each class, to train on and to search.

mAP ranks the whole gallery (Kedge: `method="brute_force"`); a two-stage search returns one list, and what it leaves out
counts as not found. Results go to benchmarks/results/photos.json (or --name).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from pytorch_metric_learning.losses import ProxyAnchorLoss
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

import kedge
from frozen import CS, OUTER, parted
from kedge.gallery import Gallery
from kedge.gallery.gallery import Method
from kedge.gallery.ingest import index_folder
from kedge.gallery.ranking import Rank
from kedge.model import Vectors
from kedge.model.features import file_features
from kedge.reproduce.machine import describe

RESULTS = Path(__file__).parent / "results"
MEASURES = ("R@1", "mAP", "MAP@R")
SHOTS = (1, 2, 5, 10)
K = 20
TIMED = 200
"""Queries, one after the other, whose median is the time of one."""
PROXY_GRID = [
    {"rate": rate, "epochs": epochs, "proxies": proxies}
    for rate in (3e-4, 1e-3, 3e-3)
    for epochs in (20, 60)
    for proxies in (10, 100)
]
"""Rate of the layer, epochs, and how many times as fast the proxies learn (100 in the paper)."""
PROXY_CHOICES: dict[tuple[int, int], dict[str, float]] = {}
"""What was chosen for some photos and a number of their classes: once, for all seeds."""

Scores = dict[str, float]


@dataclass(frozen=True)
class Photos:
    """The photos of a folder: files, class numbers, features."""

    files: list[Path]
    labels: np.ndarray
    classes: list[str]
    features: np.ndarray
    seconds: float
    """Of decoding and encoding all of them."""


@dataclass(frozen=True)
class Trial:
    """Rows of the photos to train on, and rows to ask with."""

    photos: Photos
    train: np.ndarray
    queries: np.ndarray

    @property
    def wanted(self) -> np.ndarray:
        """The classes of the queries."""
        return self.photos.labels[self.queries]

    def scores(self, order: np.ndarray, gallery: np.ndarray, asked: np.ndarray | None = None) -> Scores:
        """R@1, mAP and MAP@R of hits, best first (rows of the gallery, -1 for none), over the queries asked."""
        labels = self.photos.labels[gallery]
        hits = ((order >= 0) & (labels[order] == self.wanted[:, None])).astype(np.float64)
        relevant = (labels[None] == self.wanted[:, None]).sum(1)
        ranks = np.arange(1, hits.shape[1] + 1)
        precision = hits.cumsum(1) / ranks * hits
        within = precision * (ranks <= relevant[:, None])
        values = hits[:, 0], precision.sum(1) / relevant.clip(1), within.sum(1) / relevant.clip(1)
        judged = relevant > 0 if asked is None else asked & (relevant > 0)
        return {name: float(value[judged].mean()) for name, value in zip(MEASURES, values, strict=True)}


class Way(ABC):
    """A way to search."""

    seconds: Scores
    """Of training, of indexing the training photos, of one query."""

    @abstractmethod
    def order(self, gallery: np.ndarray) -> np.ndarray:
        """For each query of the trial the photos of a gallery, best first: queries x gallery."""

    @abstractmethod
    def confidence(self, gallery: np.ndarray) -> np.ndarray:
        """Higher for queries that are more like something in the gallery."""


class Space(Way):
    """Vectors of length 1, compared with all others by cosine."""

    def __init__(self, trial: Trial, embed: Callable[[np.ndarray], np.ndarray], training: float = 0.0) -> None:
        self.trial = trial
        features = trial.photos.features
        started = time.perf_counter()
        gallery = unit(embed(features[trial.train]))
        indexing = time.perf_counter() - started
        self.vectors = unit(embed(features))

        def search(row: int) -> None:
            cosines = gallery @ unit(embed(features[row : row + 1]))[0]
            top = np.argpartition(-cosines, min(K, len(cosines) - 1))[:K]
            top[np.argsort(-cosines[top])]

        self.seconds = {"training": training, "indexing": indexing, "query": one_query(search, trial.queries)}

    def order(self, gallery: np.ndarray) -> np.ndarray:
        """By cosine."""
        return np.argsort(-self._cosines(gallery), axis=1, kind="stable")

    def confidence(self, gallery: np.ndarray) -> np.ndarray:
        """The cosine of the nearest."""
        highest: np.ndarray = self._cosines(gallery).max(1)
        return highest

    def _cosines(self, gallery: np.ndarray) -> np.ndarray:
        cosines: np.ndarray = self.vectors[self.trial.queries] @ self.vectors[gallery].T
        return cosines


class Faiss(Space):
    """The raw features in an IndexFlatIP."""

    def __init__(self, trial: Trial) -> None:
        super().__init__(trial, lambda features: features)
        started = time.perf_counter()
        index = self._index(trial.train)
        self.seconds["indexing"] = time.perf_counter() - started
        features = trial.photos.features
        self.seconds["query"] = one_query(lambda row: index.search(unit(features[row : row + 1]), K), trial.queries)

    def order(self, gallery: np.ndarray) -> np.ndarray:
        """As FAISS says."""
        found: np.ndarray = self._index(gallery).search(self.vectors[self.trial.queries], len(gallery))[1]
        return found

    def _index(self, gallery: np.ndarray) -> faiss.IndexFlatIP:
        index = faiss.IndexFlatIP(self.vectors.shape[1])
        index.add(self.vectors[gallery])
        return index


class Logistic(Space):
    """The posteriors of scikit-learn's logistic regression, or its logits."""

    def __init__(self, trial: Trial, outputs: str = "predict_proba") -> None:
        features, labels = trial.photos.features, trial.photos.labels

        def fitted(rows: np.ndarray, c: float) -> Any:
            pipeline = make_pipeline(StandardScaler(), LogisticRegression(C=c, max_iter=300, tol=1e-3))
            return pipeline.fit(features[rows], labels[rows])

        inner, held_out = (trial.train[rows] for rows in held_out_fifth(trial))
        best = CS[2]  # of one photo per class, none can be held out
        if len(inner):
            judged = {c: fitted(inner, c).score(features[held_out], labels[held_out]) for c in CS}
            best = max(judged, key=lambda c: judged[c])
        started = time.perf_counter()
        self.model = fitted(trial.train, best)
        super().__init__(trial, getattr(self.model, outputs), time.perf_counter() - started)

    def confidence(self, gallery: np.ndarray) -> np.ndarray:
        """The highest posterior."""
        del gallery
        queries = self.trial.photos.features[self.trial.queries]
        highest: np.ndarray = self.model.predict_proba(queries).max(1)
        return highest


class ProxyAnchor(Space):
    """A linear layer of pytorch-metric-learning's ProxyAnchor loss."""

    def __init__(self, trial: Trial, seed: int) -> None:
        inner, held_out = (trial.train[rows] for rows in held_out_fifth(trial))
        inside = Trial(trial.photos, inner, held_out)

        def judged(setting: dict[str, float]) -> float:
            space = Space(inside, self._fitted(inside, seed, **setting))
            return inside.scores(space.order(inner), inner)["mAP"]

        key = id(trial.photos), len(np.unique(trial.photos.labels[trial.train]))
        if key not in PROXY_CHOICES:
            PROXY_CHOICES[key] = max(PROXY_GRID, key=judged)
        started = time.perf_counter()
        embed = self._fitted(trial, seed, **PROXY_CHOICES[key])
        super().__init__(trial, embed, time.perf_counter() - started)

    @staticmethod
    def _fitted(trial: Trial, seed: int, rate: float, epochs: int, proxies: float) -> Callable[[np.ndarray], Any]:
        torch.manual_seed(seed)
        features, labels = trial.photos.features[trial.train], trial.photos.labels[trial.train]
        scaler = StandardScaler().fit(features)
        inputs = torch.from_numpy(scaler.transform(features)).float()
        classes, numbers = np.unique(labels, return_inverse=True)
        targets = torch.from_numpy(numbers)
        layer = nn.Linear(inputs.shape[1], 512)
        loss = ProxyAnchorLoss(len(classes), 512)
        groups = [{"params": layer.parameters(), "lr": rate}, {"params": loss.parameters(), "lr": rate * proxies}]
        optimizer = torch.optim.AdamW(groups, weight_decay=1e-4)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
        for _ in range(epochs):
            for rows in torch.randperm(len(inputs)).split(128):
                optimizer.zero_grad()
                loss(layer(inputs[rows]), targets[rows]).backward()
                optimizer.step()
            schedule.step()

        @torch.inference_mode()
        def embed(others: np.ndarray) -> Any:
            return layer(torch.from_numpy(scaler.transform(others)).float()).numpy()

        return embed


class Trained:
    """A model that Kedge trained on class folders, and galleries of it."""

    def __init__(self, trial: Trial, seed: int, scratch: Path) -> None:
        self.trial, self.scratch = trial, scratch
        folder = linked(trial.photos, trial.train, scratch / "photos" / "train")
        linked(
            trial.photos, trial.queries[np.isin(trial.wanted, trial.photos.labels[trial.train])], folder.parent / "test"
        )
        started = time.perf_counter()
        self.model = kedge.train(folder.parent, overrides=[f"seed={seed}", "logger=none"], folder=scratch / "run")
        self.training = time.perf_counter() - started
        started = time.perf_counter()
        self.gallery(trial.train)
        self.indexing = time.perf_counter() - started
        features = torch.from_numpy(trial.photos.features[trial.queries])
        self.vectors = Vectors(self.model.embed_features(features).cpu(), features)

    def gallery(self, rows: np.ndarray) -> Gallery:
        """The gallery of these photos, labelled by their folders."""
        name = hashlib.blake2b(rows.tobytes(), digest_size=8).hexdigest()
        if not (self.scratch / name).exists():
            gallery = Gallery.create(self.scratch / name, self.model)
            index_folder(gallery, linked(self.trial.photos, rows, self.scratch / f"{name}-photos"))
        return Gallery.open(self.scratch / name, self.model)


class Kedge(Way):
    """A Kedge gallery, searched by `rank`."""

    def __init__(self, trained: Trained, rank: Rank = "auto") -> None:
        self.trained, self.rank = trained, rank
        gallery = trained.gallery(trained.trial.train)
        embeddings, features = (part.numpy() for part in trained.vectors)

        def search(row: int) -> None:
            gallery.search_embeddings(embeddings[row][None], K, features=features[row][None], rank=rank)

        query = one_query(search, np.arange(len(embeddings)))
        self.seconds = {"training": trained.training, "indexing": trained.indexing, "query": query}

    def order(self, gallery: np.ndarray, method: Method = "brute_force") -> np.ndarray:
        """As a gallery of these photos says."""
        opened = self.trained.gallery(gallery)
        rows = {path: row for row, path in enumerate(self.trained.trial.photos.files[row] for row in gallery)}
        by_id = {
            id: rows[Path(path).resolve()]
            for batch in opened.batches(["id", "path"])
            for id, path in zip(batch.column("id").to_pylist(), batch.column("path").to_pylist(), strict=True)
        }
        embeddings, features = (part.numpy() for part in self.trained.vectors)
        found = np.full((len(embeddings), len(gallery)), -1)
        for start in range(0, len(embeddings), 64):
            part = slice(start, start + 64)
            results = opened.search_embeddings(
                embeddings[part], len(gallery), method, features=features[part], rank=self.rank
            )
            for row, result in enumerate(results, start):
                found[row, : len(result)] = [by_id[id] for id in result.ids]
        return found

    def confidence(self, gallery: np.ndarray) -> np.ndarray:
        """The familiarity by which a gallery calls a query unknown."""
        embeddings, features = (part.numpy() for part in self.trained.vectors)
        return self.trained.gallery(gallery).familiarity(embeddings, features)


def unit(vectors: np.ndarray) -> np.ndarray:
    """Vectors of length 1."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.ascontiguousarray(vectors / lengths.clip(1e-12), dtype=np.float32)


def one_query(search: Callable[[int], Any], rows: np.ndarray) -> float:
    """Seconds, the median of some queries one after the other."""
    seconds = []
    for row in rows[:TIMED].tolist():
        started = time.perf_counter()
        search(row)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def held_out_fifth(trial: Trial) -> tuple[np.ndarray, np.ndarray]:
    """Positions among the training photos: those to fit on, and a fifth to choose by."""
    return parted(trial.photos.labels[trial.train], OUTER + 1)


def linked(photos: Photos, rows: np.ndarray, folder: Path) -> Path:
    """Class folders of links to some photos."""
    for row in rows.tolist():
        link = folder / photos.files[row].parent.name / photos.files[row].name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(photos.files[row])
    return folder


def known(photos: Photos, seed: int) -> dict[str, Scores]:
    """All classes trained on; ways without chance are measured once."""
    train, queries = parted(photos.labels, OUTER)
    trial = Trial(photos, train, queries)
    ways: dict[str, Way] = {}
    if seed == 0:
        ways |= {"raw features": Space(trial, lambda features: features), "raw features, FAISS": Faiss(trial)}
        ways["logistic regression, posteriors"] = Logistic(trial)
    ways["ProxyAnchor"] = ProxyAnchor(trial, seed)
    with tempfile.TemporaryDirectory() as scratch:
        ours = ways["Kedge"] = Kedge(Trained(trial, seed, Path(scratch)))
        rows = {name: {**trial.scores(way.order(train), train), **way.seconds} for name, way in ways.items()}
        two_stage = trial.scores(ours.order(train, "two_stage"), train)
    return {**rows, "Kedge, two stages": {**two_stage, **ours.seconds}}


def unseen(photos: Photos, seed: int) -> dict[str, Scores]:
    """Half of the classes trained on, and the others asked for too."""
    classes = np.random.default_rng(seed).permutation(len(photos.classes))
    trained = np.isin(photos.labels, classes[: len(classes) // 2])
    gallery, queries = parted(photos.labels, OUTER)
    trial = Trial(photos, gallery[trained[gallery]], queries)
    old = trained[queries]
    with tempfile.TemporaryDirectory() as scratch:
        model = Trained(trial, seed, Path(scratch))
        ways: dict[str, Way] = {
            "raw features": Space(trial, lambda features: features),
            "logistic regression, posteriors": Logistic(trial),
            "logistic regression, logits": Logistic(trial, "decision_function"),
            "ProxyAnchor": ProxyAnchor(trial, seed),
            **{f"Kedge, {rank}": Kedge(model, rank) for rank in ("class", "looks", "auto")},
        }
        rows: dict[str, Scores] = {}
        for name, way in ways.items():
            order = way.order(gallery)
            of_old, of_new = trial.scores(order, gallery, old), trial.scores(order, gallery, ~old)
            later = gallery[~trained[gallery]]
            alone = trial.scores(way.order(later), later, ~old)
            score = way.confidence(trial.train)
            rows[name] = {
                **{f"known {measure}": of_old[measure] for measure in ("R@1", "mAP")},
                **{f"unseen {measure}": of_new[measure] for measure in ("R@1", "MAP@R")},
                **{f"unseen alone {measure}": alone[measure] for measure in ("R@1", "MAP@R")},
                "AUROC": float(roc_auc_score(old, score)),
                "rejected at 95 %": float((score[~old] < np.quantile(score[old], 0.05)).mean()),
            }
    return rows


def few(photos: Photos, seed: int) -> dict[str, Scores]:
    """Some photos of each class, to train on and to search."""
    train, queries = parted(photos.labels, OUTER)
    train = np.random.default_rng(seed).permutation(train)
    rows: dict[str, Scores] = {}
    for shots in SHOTS:
        chosen = np.concatenate([train[photos.labels[train] == one][:shots] for one in range(len(photos.classes))])
        trial = Trial(photos, chosen, queries)
        with tempfile.TemporaryDirectory() as scratch:
            ways: dict[str, Way] = {
                "raw features": Space(trial, lambda features: features),
                "logistic regression, posteriors": Logistic(trial),
                "Kedge": Kedge(Trained(trial, seed, Path(scratch))),
            }
            rows |= {f"{shots}, {name}": trial.scores(way.order(chosen), chosen) for name, way in ways.items()}
    return rows


PARTS: dict[str, Callable[[Photos, int], dict[str, Scores]]] = {"known": known, "unseen": unseen, "few": few}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", nargs="+", help="NAME=FOLDER")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--name", default="photos", help="of the result file")
    parser.add_argument("--cache", type=Path, help="a folder that keeps features, whose seconds then count for nothing")
    given = parser.parse_args()
    found: dict[str, dict[str, Any]] = {part: {} for part in given.parts}
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        # By default an empty cache, so that the features are computed and timed here.
        os.environ["KEDGE_DATA"] = str(given.cache or scratch)
        for dataset, folder in (entry.split("=", 1) for entry in given.photos):
            photos = read(Path(folder))
            seconds[dataset] = round(photos.seconds, 1)
            for part in given.parts:
                found[part][dataset] = averaged([PARTS[part](photos, seed) for seed in range(given.seeds)])
                record = {
                    "seeds": given.seeds,
                    "seconds of the features": seconds,
                    "found": found,
                    **{f"table {part}": as_table(found[part]) for part in given.parts},
                    "machine": describe(),
                }
                (RESULTS / f"{given.name}.json").write_text(json.dumps(record, indent=1) + "\n")
                print_table({dataset: found[part][dataset]})


def averaged(runs: list[dict[str, Scores]]) -> dict[str, dict[str, tuple[float, float]]]:
    """Mean and standard deviation over the seeds, of each score of each way."""
    averages: dict[str, dict[str, tuple[float, float]]] = {}
    for way in runs[0]:
        scores = [run[way] for run in runs if way in run]
        averages[way] = {
            key: (statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0)
            for key in scores[0]
            if (values := [one[key] for one in scores])
        }
    return averages


def as_table(found: dict[str, Any]) -> dict[str, Any]:
    keys = list(dict.fromkeys(key for ways in found.values() for scores in ways.values() for key in scores))
    rows = [
        [dataset, way, *(cell(key, *scores[key]) if key in scores else "–" for key in keys)]
        for dataset, ways in found.items()
        for way, scores in ways.items()
    ]
    return {"columns": ["photos", "way", *keys], "rows": rows}


def cell(key: str, value: float, spread: float) -> str:
    if key in ("training", "indexing"):
        return f"{value:.1f} s"
    if key == "query":
        return f"{1000 * value:.2f} ms"
    return f"{value:.3f}{f' ± {spread:.3f}' if spread else ''}".replace("0.", ".")


def print_table(found: dict[str, Any]) -> None:
    table = as_table(found)
    for row in (table["columns"], *table["rows"]):
        print("  ".join(f"{value:>14s}" if column > 1 else f"{value:34s}" for column, value in enumerate(row)))


def read(folder: Path) -> Photos:
    """The photos of a folder with the features of the pretrained encoder, which Kedge's cache then holds."""
    files = sorted(file.resolve() for file in folder.glob("*/*") if file.suffix.lower() in (".jpg", ".png"))
    classes = sorted({file.parent.name for file in files})
    model = kedge.Model.pretrained()
    started = time.perf_counter()
    features, _ = file_features(model, files)
    seconds = time.perf_counter() - started
    labels = np.array([classes.index(file.parent.name) for file in files])
    return Photos(files, labels, classes, features.numpy(), seconds)


if __name__ == "__main__":
    main()
