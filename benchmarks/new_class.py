"""Ten photos of a class that nobody trained on are added to a gallery: who finds them, and what becomes of the others.

    python benchmarks/new_class.py PETS [--strangers FOLDER] [--draws 3]   writes benchmarks/results/new_class.json

Each draw takes 12 breeds, trains on 40 photos of each, indexes these, and asks with 5 others of each (60 old queries).
Then 10 photos of a thirteenth breed join the gallery, and 20 others of it are asked for. A query keeps its route if it
is ranked as before (by class or by looks) and goes to the same anchor or, by looks, finds the same first hit. 60
strangers are of the other breeds, and 60 of the folder of --strangers: rejected are those that the gallery calls
unknown. Beside it, a logistic regression trained anew on the same features of all 13 breeds (what training again would
give), and the features by cosine: the label of the nearest, and a threshold on its cosine that accepts
95 % of the old queries, as one on Kedge's score does for comparison. Kedge's own threshold comes from the held-out
photos of its run, so the share of old queries that it accepts is said too, and how many strangers the nearest cosine
rejects if it accepts as many.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import kedge
from kedge.gallery import Gallery
from kedge.gallery.ingest import index_folder
from kedge.gallery.result import Result
from kedge.reproduce.machine import describe
from photos import Photos, linked, read, unit

RESULTS = Path(__file__).parent / "results" / "new_class.json"
BREEDS, TRAINED, OLD, ADDED, NEW, STRANGERS = 12, 40, 5, 10, 20, 60
ACCEPT = 0.95


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pets", type=Path)
    parser.add_argument("--strangers", type=Path, help="class folders of photos of something else")
    parser.add_argument("--draws", type=int, default=3)
    given = parser.parse_args()
    photos = read(given.pets)
    others = read(given.strangers) if given.strangers else None
    draws = [draw(photos, others, seed) for seed in range(given.draws)]
    for one in draws:
        print(json.dumps(one))
    RESULTS.write_text(json.dumps({"draws": draws, "machine": describe()}, indent=1) + "\n")


def draw(photos: Photos, others: Photos | None, seed: int) -> dict[str, Any]:
    """One trial."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(photos.classes))
    breeds, later, rest = order[:BREEDS], order[BREEDS], order[BREEDS + 1 :]
    shuffled = {one: rng.permutation(np.flatnonzero(photos.labels == one)) for one in order.tolist()}
    trained = np.concatenate([shuffled[one][:TRAINED] for one in breeds])
    old = np.concatenate([shuffled[one][TRAINED : TRAINED + OLD] for one in breeds])
    added, new = shuffled[later][:ADDED], shuffled[later][ADDED : ADDED + NEW]
    strange = rng.permutation(np.concatenate([shuffled[one] for one in rest]))[:STRANGERS]
    with tempfile.TemporaryDirectory() as scratch:
        folder = linked(photos, trained, Path(scratch, "photos"))
        model = kedge.train(folder, overrides=[f"seed={seed}", "logger=none"], folder=Path(scratch, "run"))
        gallery = Gallery.create(Path(scratch, "gallery"), model)
        index_folder(gallery, folder)

        def ask(rows: np.ndarray, source: Photos = photos) -> list[Result]:
            return [gallery.search(source.files[row], k=1) for row in rows]

        def rejected(results: list[Result]) -> int:
            return sum(result.unknown is True for result in results)

        def familiarity(rows: np.ndarray, source: Photos = photos) -> np.ndarray:
            vectors = model.vectors([source.files[row] for row in rows])
            return gallery.familiarity(vectors.embeddings.numpy(), vectors.features.numpy())

        before, strangers = ask(old), {"other breeds": ask(strange)}
        known_scores, scores = familiarity(old), {"other breeds": familiarity(strange)}
        far = np.arange(0)
        if others is not None:
            far = rng.permutation(len(others.files))[:STRANGERS]
            strangers["another folder"] = ask(far, others)
            scores["another folder"] = familiarity(far, others)
        index_folder(gallery, linked(photos, added, Path(scratch, "added")))
        after, of_new = ask(old), ask(new)
    vectors = unit(photos.features)
    known = (vectors[old] @ vectors[trained].T).max(1)
    accepted, at_least = len(old) - rejected(before), round(ACCEPT * len(old))
    cosines = {"other breeds": (vectors[strange] @ vectors[trained].T).max(1)}
    if others is not None:
        cosines["another folder"] = (unit(others.features[far]) @ vectors[trained].T).max(1)
    both = np.concatenate([trained, added])
    nearest = photos.labels[both][(vectors[new] @ vectors[both].T).argmax(1)]
    again = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    again.fit(photos.features[both], photos.labels[both])
    name = photos.classes[later]
    return {
        "new class": name,
        "old queries": len(old),
        "keep their route": sum(route(one) == route(other) for one, other in zip(before, after, strict=True)),
        "taken by the new class": sum(result.hits[0].label == name for result in after),
        "old queries, first hit right": [right(photos, old, results) for results in (before, after)],
        "new queries": len(new),
        "find the new class": sum(result.hits[0].label == name for result in of_new),
        "find the new class, raw features": int((nearest == later).sum()),
        "find the new class, trained again": int((again.predict(photos.features[new]) == later).sum()),
        "old queries right, trained again": int((again.predict(photos.features[old]) == photos.labels[old]).sum()),
        "old queries accepted": accepted,
        "strangers rejected": {
            kind: {
                "of": len(results),
                "Kedge": rejected(results),
                "Kedge, 95 % accepted": int((scores[kind] < threshold(known_scores, at_least)).sum()),
                "nearest cosine, 95 % accepted": int((cosines[kind] < threshold(known, at_least)).sum()),
                "nearest cosine, as many accepted": int((cosines[kind] < threshold(known, accepted)).sum()),
            }
            for kind, results in strangers.items()
        },
    }


def route(result: Result) -> tuple[Any, ...]:
    """How a query was searched."""
    return result.rank, result.anchors[:1] if result.rank == "class" else result.hits[0].id


def right(photos: Photos, rows: np.ndarray, results: list[Result]) -> int:
    """Queries whose first hit has their class."""
    wanted = [photos.classes[label] for label in photos.labels[rows]]
    return sum(result.hits[0].label == label for result, label in zip(results, wanted, strict=True))


def threshold(scores: np.ndarray, accepted: int) -> float:
    """The score that so many of the queries reach."""
    return float(np.sort(scores)[::-1][accepted - 1])


if __name__ == "__main__":
    main()
