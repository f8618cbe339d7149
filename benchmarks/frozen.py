"""A head on the features of a frozen encoder, beside logistic regression and the features themselves.

    python benchmarks/frozen.py --weights EFFICIENTNET_LITE0.pth flowers=FOLDER pets=FOLDER cub=FOLDER
    python benchmarks/frozen.py … --choose RUN [OVERRIDE …] --choose RUN …      compares candidates on held-out photos

A folder holds a folder of photos for each class. Features are computed once (EfficientNet-Lite0 of timm, 224 pixels)
and kept beside --cache. A fifth of each class is asked for, the same for all seeds, and the rest is trained on and
searched; with `--choose`, for each seed a fifth of the rest is asked for instead, and the first fifth is left alone.
Kedge is `kedge train recipe=head` through an encoder that looks its features up; logistic regression is scikit-learn's
on standardised features, its C chosen on a fifth of its training photos, and searched by its posteriors. Results go to
benchmarks/results/frozen.json (or frozen_choice.json, or --name). What holding photos out costs a small set:

    python benchmarks/frozen.py pets=FOLDER --classes 12 --shots 40 --only kedge --name frozen_small \
        --choose all split.holdout=0 --choose held-out split.holdout=0.1
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

import kedge
from kedge.datasets import Dataset, arrays
from kedge.encoders.backbones import Backbone
from kedge.encoders.encoder import Encoder
from kedge.evaluation import evaluate_embeddings
from kedge.reproduce.machine import describe

RESULTS = Path(__file__).parent / "results"
CS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
OUTER = 0
"""The seed of the fifth that is asked for: one for all runs, so that what is chosen never saw it."""
COLUMNS = ("accuracy", "brute force", "brute force, cosine", "1-NN", "seconds")
TABLE: dict[str, Tensor] = {}
"""The features that `looked_up` finds, whole: set before each run."""


class LookUp(nn.Module):
    """A backbone for images of one pixel, whose three bytes are the number of a row of features."""

    def __init__(self, features: Tensor) -> None:
        super().__init__()
        self.register_buffer("features", features, persistent=False)
        self.unused = nn.Parameter(torch.zeros(1))  # by which a model tells where it is

    def forward(self, images: Tensor) -> Tensor:
        """The features of the rows that the pixels name."""
        pixels = (images[:, :, 0, 0] * 256).round().long()
        found: Tensor = self.features[pixels @ torch.tensor([65536, 256, 1])]  # type: ignore[index]
        return found


def looked_up(head: str = "linear", dim: int | None = None, **others: Any) -> Encoder:
    """What a run's configuration names as its encoder."""
    del others
    features = TABLE["features"]
    width = features.shape[1]
    return Encoder("looked-up", Backbone(LookUp(features), width, "imagenet", ()), dim=dim or width, head=head)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", nargs="+", help="NAME=FOLDER")
    parser.add_argument("--weights", type=Path, help="needed where no features are kept yet")
    parser.add_argument("--cache", type=Path, default=Path("build/features"))
    parser.add_argument("--choose", nargs="+", action="append", metavar="RUN", help="a name and its overrides")
    parser.add_argument("--shots", type=int, help="train on so many photos of each class")
    parser.add_argument("--classes", type=int, help="take the first so many classes only")
    parser.add_argument("--name", help="of the result file")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--join", action="store_true", help="all photos as one gallery of all classes")
    parser.add_argument("--only", choices=("kedge", "rivals"), help="leave the others out")
    given = parser.parse_args()
    candidates = {name: overrides for name, *overrides in given.choose or [["kedge"]]}
    name = "frozen_choice" if given.choose else "frozen"
    found: dict[str, Any] = {}
    galleries = {
        dataset: kept_features(Path(folder), given.cache / f"{dataset}.npz", given.weights)
        for dataset, folder in (entry.split("=", 1) for entry in given.photos)
    }
    for dataset, (features, labels) in (joined(galleries) if given.join else galleries).items():
        if given.classes:
            features, labels = (part[labels < given.classes] for part in (features, labels))
        rows: dict[str, list[dict[str, float]]] = {}
        for seed in range(given.seeds):
            train, test = parted(labels, OUTER)
            if given.choose:
                inner, held_out = parted(labels[train], seed)
                train, test = train[inner], train[held_out]
            if given.shots:
                train = np.concatenate([train[labels[train] == one][: given.shots] for one in range(labels.max() + 1)])
            part = Part(features, labels, train, test)
            for candidate, overrides in candidates.items():
                if given.only != "rivals":
                    rows.setdefault(candidate, []).append(ours(part, seed, overrides))
            if given.only != "kedge":
                for rival, scores in (("logistic regression", logistic(part, seed)), ("features alone", alone(part))):
                    rows.setdefault(rival, []).append(scores)
        found[dataset] = {way: {key: mean(scores, key) for key in scores[0]} for way, scores in rows.items()}
        for way, scores in found[dataset].items():
            print(f"{dataset:10s} {way:28s}", "  ".join(f"{key} {value[0]:.4f}" for key, value in scores.items()))
        record = {
            "encoder": "EfficientNet-Lite0, ImageNet weights",
            "seeds": given.seeds,
            "shots": given.shots,
            "candidates": candidates,
            "found": found,
            "table": as_table(found),
            "machine": describe(),
        }
        (RESULTS / f"{given.name or name}.json").write_text(json.dumps(record, indent=1) + "\n")


def joined(galleries: dict[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """One gallery of the classes of all."""
    sizes = [labels.max() + 1 for _, labels in galleries.values()]
    starts = np.cumsum([0, *sizes[:-1]])
    features = np.concatenate([features for features, _ in galleries.values()])
    labels = np.concatenate([labels + start for (_, labels), start in zip(galleries.values(), starts, strict=True)])
    return {" + ".join(galleries): (features, labels)}


class Part:
    """Some photos to train on and search, others to ask with."""

    def __init__(self, features: np.ndarray, labels: np.ndarray, train: np.ndarray, test: np.ndarray) -> None:
        self.features, self.labels, self.train, self.test = features, labels, train, test
        self.x, self.y, self.queries, self.wanted = features[train], labels[train], features[test], labels[test]

    def dataset(self, path: Path) -> Dataset:
        """The photos as pixels that name their rows."""

        def pixels(rows: np.ndarray) -> np.ndarray:
            return np.stack([rows >> 16, rows >> 8 & 255, rows & 255], axis=1).astype(np.uint8)[:, None, None]

        classes = np.array([f"{one:04d}" for one in range(self.labels.max() + 1)])
        split = {"x_train": pixels(self.train), "x_test": pixels(self.test), "y_train": self.y, "y_test": self.wanted}
        np.savez(path, **split, classes=classes)
        return arrays(path)

    def scores(self, embed: Callable[[np.ndarray], Any], classify: Callable[[Any], Any] | None) -> dict[str, float]:
        """Of embeddings and, where they know classes, of these."""
        queries, gallery = embed(self.queries), embed(self.x)
        routes = [self.wanted, self.y] if classify is None else [classify(queries), classify(gallery)]
        report = evaluate_embeddings(
            queries, self.wanted, gallery, self.y, query_routes=routes[0], gallery_routes=routes[1]
        )
        values = report.accuracy, report.brute_force["mAP"], report.brute_force_cosine["mAP"], report.knn1
        found = dict(zip(COLUMNS, values, strict=False))
        return found if classify is not None else {key: value for key, value in found.items() if key != "accuracy"}


def ours(part: Part, seed: int, overrides: list[str]) -> dict[str, float]:
    TABLE["features"] = torch.from_numpy(part.features)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "photos.npz")
        dataset = part.dataset(path)
        wanted = ["dataset=arrays", f"dataset.path={path}", "encoder._target_=frozen.looked_up", "recipe=head"]
        ways = ["recipe.size=1", "recipe.normalize=false", "split.holdout=0", "logger=none", f"seed={seed}"]
        started = time.perf_counter()
        model = kedge.train(overrides=[*wanted, *ways, *overrides], folder=Path(scratch, "run"))
        seconds = time.perf_counter() - started
        report = kedge.evaluate(model, dataset)
    values = report.accuracy, report.brute_force["mAP"], report.brute_force_cosine["mAP"], report.knn1, seconds
    return dict(zip(COLUMNS, values, strict=True))


def logistic(part: Part, seed: int) -> dict[str, float]:
    def fitted(rows: np.ndarray, c: float) -> tuple[StandardScaler, LogisticRegression]:
        scaler = StandardScaler().fit(part.x[rows])
        return scaler, LogisticRegression(C=c, max_iter=300, tol=1e-3).fit(scaler.transform(part.x[rows]), part.y[rows])

    inner, held_out = parted(part.y, seed)
    judged = {}
    for c in CS:
        scaler, model = fitted(inner, c)
        judged[c] = model.score(scaler.transform(part.x[held_out]), part.y[held_out])
    best = max(judged, key=lambda c: judged[c])
    started = time.perf_counter()
    scaler, model = fitted(np.arange(len(part.x)), best)
    seconds = time.perf_counter() - started
    found = part.scores(lambda x: model.predict_proba(scaler.transform(x)), lambda p: p.argmax(axis=1))
    return {**found, "seconds": seconds}


def alone(part: Part) -> dict[str, float]:
    return part.scores(lambda x: x, None)


def parted(labels: np.ndarray, seed: int, share: float = 0.2) -> tuple[np.ndarray, np.ndarray]:
    """Rows to train on and rows to ask with: a share of each class, at least one."""
    chance = np.random.default_rng(seed)
    asked = np.zeros(len(labels), bool)
    for one in np.unique(labels):
        rows = chance.permutation(np.flatnonzero(labels == one))
        asked[rows[: max(1, round(share * len(rows)))]] = True
    order = chance.permutation(len(labels))
    return order[~asked[order]], order[asked[order]]


def mean(scores: list[dict[str, float]], key: str) -> tuple[float, float]:
    values = [one[key] for one in scores]
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def as_table(found: dict[str, Any]) -> dict[str, Any]:
    rows = [
        [dataset, way, *(cell(key, scores[key]) if key in scores else "–" for key in COLUMNS)]
        for dataset, ways in found.items()
        for way, scores in ways.items()
    ]
    return {"columns": ["photos", "way", *COLUMNS], "rows": rows}


def cell(key: str, value: tuple[float, float]) -> str:
    if key == "seconds":
        return f"{value[0]:.0f}"
    spread = f" ± {value[1]:.3f}" if value[1] else ""  # none of a single seed
    return f"{value[0]:.3f}{spread}".replace("0.", ".")


def kept_features(folder: Path, cache: Path, weights: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Features and labels of all photos in a folder."""
    if not cache.exists():
        if weights is None:
            raise SystemExit(f"--weights is needed to compute the features of {folder}.")
        files = sorted([*folder.glob("*/*.jpg"), *folder.glob("*/*.png")])
        classes = sorted({file.parent.name for file in files})
        network = lite0(weights)
        found = []
        with torch.inference_mode():
            for start in range(0, len(files), 8):
                pixels = np.stack([squared(file) for file in files[start : start + 8]])
                images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float().div(255).sub(0.498).div(0.502)
                found.append(network(images.contiguous(memory_format=torch.channels_last)))
        cache.parent.mkdir(parents=True, exist_ok=True)
        np.savez(cache, x=torch.cat(found).numpy(), y=np.array([classes.index(file.parent.name) for file in files]))
    with np.load(cache) as kept:
        return kept["x"], kept["y"]


def lite0(weights: Path) -> nn.Module:
    """EfficientNet-Lite0 of timm with weights of its original package, which has another name for each of them."""
    whole = timm.create_model("efficientnet_lite0")
    state = torch.load(weights, weights_only=True)
    whole.load_state_dict(dict(zip(whole.state_dict(), state.values(), strict=True)))
    whole.reset_classifier(0)
    return whole.eval().to(memory_format=torch.channels_last)  # type: ignore[no-any-return]


def squared(file: Path) -> np.ndarray:
    """The centre 224 × 224 of a photo whose shorter side is 256 pixels."""
    with Image.open(file) as image:
        image.draft("RGB", (256, 256))
        photo = image.convert("RGB")
    scale = 256 / min(photo.size)
    width, height = (max(256, round(side * scale)) for side in photo.size)
    left, top = (width - 224) // 2, (height - 224) // 2
    resized = photo.resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(resized.crop((left, top, left + 224, top + 224)))


if __name__ == "__main__":
    import frozen  # a run's configuration names `frozen.looked_up`, which must see this very TABLE

    frozen.main()
